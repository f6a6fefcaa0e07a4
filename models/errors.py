"""What loaders raise."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class ModelLoadError(ValueError):
    """A checkpoint that cannot be read as it stands.

    The message names file, key or tensor, and what was expected.
    """


class MissingExtraError(ImportError):
    """Reading checkpoints and text needs a package of the extra `paged-jax[text]`."""


def require(module: str, purpose: str) -> ModuleType:
    """Import a module of the extra.

    Raises MissingExtraError that says what it is needed for and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{purpose} needs {package!r}: pip install 'paged-jax[text]'", name=package
        ) from error


@contextmanager
def load_errors(origin: object) -> Iterator[None]:
    """Turn a bad value raised inside into a ModelLoadError that begins with `origin`."""
    try:
        yield
    except ModelLoadError:
        raise
    except (ValueError, OverflowError) as error:
        raise ModelLoadError(f"{origin}: {error}") from error
