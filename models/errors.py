"""What a loader raises."""

import importlib
from types import ModuleType


class ModelLoadError(ValueError):
    """A checkpoint cannot be read as it stands; the message names file, key or tensor, and what was expected."""


class MissingExtraError(ImportError):
    """Reading checkpoints and text needs a package of the extra `paged-jax[text]`."""


def require(module: str, purpose: str) -> ModuleType:
    """The module, or a `MissingExtraError` that says what it is needed for and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"{purpose} needs {package!r}: pip install 'paged-jax[text]'", name=package) from error
