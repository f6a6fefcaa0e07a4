"""The model families that can be loaded: what an architecture's name says beyond its config.

A family that the `Llama` decoder serves is one entry of `FAMILIES`.
"""

from dataclasses import dataclass
from typing import Literal

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

        windows: whether the key `sliding_window` counts: "never", "always", or "opt-in", where
            `use_sliding_window` is true.
        qkv_bias: the query, key and value products have a bias and the output product has none,
            whatever the config says.
        qk_norm: queries and keys of each head are normed.
        kv_heads_default: a config without `num_key_value_heads` means as many as query heads.
            The other families' defaults are those of one released model, so the key is required.
    """

    formats: tuple[Format, ...] = ("hf", "gguf")
    interleaved_rope: bool = False
    windows: Literal["never", "always", "opt-in"] = "never"
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads_default: bool = False


FAMILIES = {
    "llama": Family(interleaved_rope=True, kv_heads_default=True),
    "mistral": Family(formats=("hf",), windows="always"),  # its GGUF files say llama
    "qwen2": Family(windows="opt-in", qkv_bias=True),
    "qwen3": Family(windows="opt-in", qk_norm=True),
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
