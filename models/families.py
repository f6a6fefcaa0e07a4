"""The model families that can be loaded: what an architecture's name says beyond its config.

A family that the `Llama` decoder serves is one entry of `FAMILIES`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paged_jax.models.errors import ModelLoadError

type Format = Literal["hf", "gguf"]


@dataclass(frozen=True)
class Family:
    """What all checkpoints of one architecture have in common.

    Attributes:
        formats: where the name stands for the family: as `model_type` in a Hugging Face config
            ("hf"), as `general.architecture` in a GGUF file ("gguf").
        interleaved_rope: in GGUF files the two rows of each rotated pair are adjacent.

    The rest is what Hugging Face configs leave out; in GGUF files the tensors tell it.

        defaults: every config key that the family reads, with its value where the key is absent:
            that of the family's config class in transformers. A key that is not in it counts for
            nothing, whatever a config says. None is the value null.
        qkv_bias: the query, key and value products have a bias and the output product has none.
        qk_norm: queries and keys of each head are normed.
        tokenizer_class: of a vocabulary whose tokenizer_config.json names no class.
    """

    formats: tuple[Format, ...] = ("hf", "gguf")
    interleaved_rope: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    tokenizer_class: str | None = None


# Keys that may be null, which is another value than the default: `"sliding_window": null` is no
# window, where Mistral's default is 4096. Any other key that is null is refused.
NULLABLE = ("head_dim", "layer_types", "num_key_value_heads", "sliding_window")

_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA = _COMMON | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _COMMON | {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "layer_types": None,  # all layers have the window
}
_QWEN2 = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,  # by max_window_layers
}
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False}

FAMILIES = {
    "llama": Family(interleaved_rope=True, defaults=_LLAMA),
    "mistral": Family(formats=("hf",), defaults=_MISTRAL),  # its GGUF files say llama
    "qwen2": Family(defaults=_QWEN2, qkv_bias=True, tokenizer_class="Qwen2Tokenizer"),
    "qwen3": Family(defaults=_QWEN3, qk_norm=True, tokenizer_class="Qwen2Tokenizer"),
}


def family_of(architecture: str, file_format: Format, origin: object) -> Family:
    """Look up a family by its name in a file format.

    Raises ModelLoadError that begins with `origin` and lists the known names.
    """
    known = [name for name, family in FAMILIES.items() if file_format in family.formats]
    if architecture not in known:
        raise ModelLoadError(
            f"{origin}: architecture {architecture!r} is unknown, known are {', '.join(known)}"
        )
    return FAMILIES[architecture]
