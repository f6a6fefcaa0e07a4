"""What `LLM` works with: a decoder, a tokenizer, and how the model's authors sample from it."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from paged_jax.checks import show
from paged_jax.errors import ConfigError
from paged_jax.models import Decoder, Tokenizer
from paged_jax.models.load import open_model

DECODER_NEEDS = (*Decoder.__annotations__, "logits", "__call__")
TOKENIZER_NEEDS = ("encode", "apply_chat_template", "shown", "ids_to_bytes")


class Parts(NamedTuple):
    """The parts of an `LLM`.

    Attributes:
        decoder: a module. Where there is `load`, it has shapes for params.
        load: returns the params; None where the decoder has them.
        tokenizer: None where there is none.
        settings: of the model's generation config.
    """

    decoder: Any
    load: Callable[[], Any] | None
    tokenizer: Tokenizer | None
    settings: dict[str, Any]


def read_parts(model: Any, tokenizer: Any, dtype: Any) -> Parts:
    """Return the parts, of a checkpoint without the params' values.

    A model that is no path or name is the decoder itself, and has no such settings. A tokenizer
    that is given is taken instead of the checkpoint's, which is then not read.

    Raises ConfigError for what is no decoder and what is no tokenizer.
    """
    _check_tokenizer(tokenizer)
    if isinstance(model, str | os.PathLike):
        opened = open_model(model, dtype, tokenizer=tokenizer)
        return Parts(opened.decoder, opened.read_params, opened.tokenizer, opened.settings)
    _check_decoder(model)
    if not isinstance(dtype, str) or dtype != "auto":
        raise ConfigError(
            f"dtype={show(dtype)}: a module keeps the dtype of its params; leave it at 'auto'"
        )
    return Parts(model, None, tokenizer, {})


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
