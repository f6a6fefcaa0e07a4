"""What `LLM` works with: a decoder, a tokenizer, and how the model's authors sample from it."""

import os
from typing import Any

from flax import nnx

from paged_jax.checks import show
from paged_jax.errors import ConfigError
from paged_jax.models import Decoder, Tokenizer, load_model
from paged_jax.models.generation_settings import read_generation_settings

DECODER_NEEDS = (*Decoder.__annotations__, "logits", "__call__")
TOKENIZER_NEEDS = ("encode", "apply_chat_template", "shown", "ids_to_bytes")


def read_parts(
    model: Any, tokenizer: Any, dtype: Any
) -> tuple[Any, Tokenizer | None, dict[str, Any]]:
    """Return a decoder, its tokenizer or None, and the settings of its generation config.

    A model that is no path or name is the decoder itself, and has no such settings. A tokenizer
    that is given is taken instead of the checkpoint's, which is then not read.

    Raises ConfigError for what is no decoder and what is no tokenizer.
    """
    _check_tokenizer(tokenizer)
    if isinstance(model, str | os.PathLike):
        decoder, tokenizer = load_model(model, dtype, tokenizer=tokenizer)
        return decoder, tokenizer, read_generation_settings(model)
    _check_decoder(model)
    if not isinstance(dtype, str) or dtype != "auto":
        raise ConfigError(
            f"dtype={show(dtype)}: a module keeps the dtype of its params; leave it at 'auto'"
        )
    return model, tokenizer, {}


def _check_decoder(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise ConfigError(
            f"model={show(model)}: a path, a name, or a Flax module is needed that has "
            f"{', '.join(DECODER_NEEDS)}"
        )
    if lacking := [name for name in DECODER_NEEDS if not hasattr(model, name)]:
        raise ConfigError(
            f"model: a {type(model).__name__} is no decoder, it lacks {', '.join(lacking)}; "
            "see paged_jax.models.Decoder"
        )


def _check_tokenizer(tokenizer: Any) -> None:
    lacking = [name for name in TOKENIZER_NEEDS if not hasattr(tokenizer, name)]
    if tokenizer is not None and lacking:
        raise ConfigError(
            f"tokenizer={show(tokenizer)}: lacks {', '.join(lacking)}; a "
            "paged_jax.models.Tokenizer is needed, which wraps a tokenizers.Tokenizer"
        )
