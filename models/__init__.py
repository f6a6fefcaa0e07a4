"""Flax (NNX) decoders and checkpoint loaders."""

from paged_jax.models.detokenize import Detokenizer
from paged_jax.models.errors import MissingExtraError, ModelLoadError
from paged_jax.models.interface import Decoder, TokenBatch
from paged_jax.models.llama import Llama
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.load import load_model
from paged_jax.models.rope import RopeConfig
from paged_jax.models.tokenizer import Tokenizer

__all__ = [
    "Decoder",
    "Detokenizer",
    "Llama",
    "LlamaConfig",
    "MissingExtraError",
    "ModelLoadError",
    "RopeConfig",
    "TokenBatch",
    "Tokenizer",
    "load_model",
]
