"""The tensors of a Hugging Face directory: which of them the decoder uses, and by what names.

As transformers does, it takes names with one `model.` too few or too many, and the head that is in
the files, whatever the config says of it. It passes over tensors that are not of this decoder.
Those that are, and of which the config says nothing, are refused by `weights.check_tensors`;
transformers passes over them too, and computes another model than the one that was saved.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np

from paged_jax.errors import warn
from paged_jax.models.hf_files import SafetensorsFiles
from paged_jax.models.llama_config import LlamaConfig
from paged_jax.models.weights import TensorSource, expected_parts

TEMPLATES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "q_norm": "model.layers.{layer}.self_attn.q_norm",
    "k_norm": "model.layers.{layer}.self_attn.k_norm",
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "out": "model.layers.{layer}.self_attn.o_proj",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BODY = "model."
OF_DECODER = (BODY, "lm_head.", "layers.", "embed_tokens.", "norm.")
# Values that code computes and older exports stored.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "position_ids")
MASKS = ("attn.bias", "attn.masked_bias")
MAX_SHOWN = 3  # names in a warning


def open_tensors(directory: Path, config: LlamaConfig) -> tuple[LlamaConfig, TensorSource]:
    """Open the tensors that the model uses, and return them with the config that fits their head.

    Raises ModelLoadError.
    """
    files = SafetensorsFiles(directory)
    names = match_names(files.shapes, expected_names(config))
    ignored = [name for name in names if _is_ignored(name)]
    for name in ignored:
        del names[name]
    shown = [name for name in ignored if not name.endswith("rotary_emb.inv_freq")]
    if shown and names:  # without names, what is missing will be told
        more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
        warn(f"{directory}: not of this decoder and ignored: {', '.join(shown[:MAX_SHOWN])}{more}")

    def read(name: str) -> np.ndarray:
        return files.read(names[name])

    config = _with_fitting_head(config, names, read, directory)
    shapes = {name: files.shapes[file_name] for name, file_name in names.items()}
    return config, TensorSource(str(directory), shapes, read, TEMPLATES)


def stored_dtype(source: TensorSource) -> str:
    """Return the dtype that "auto" means: that of the files, float32 for anything wider."""
    if NORM not in source.shapes:  # small, and in the dtype of the rest
        return "float32"
    name = source.read(NORM).dtype.name
    return name if name in ("float16", "bfloat16") else "float32"


def expected_names(config: LlamaConfig) -> set[str]:
    """Return the names of all tensors that a model of this config may use, a head included."""
    parts = expected_parts(dataclasses.replace(config, tie_embeddings=False))
    source = TensorSource("", {}, lambda name: np.empty(0), TEMPLATES)
    return {source.name(part) for part in parts}


def match_names(stored: Collection[str], expected: Collection[str]) -> dict[str, str]:
    """Return the stored name of each tensor by the expected one, or by itself where none is.

    Expected `model.norm.weight` and `lm_head.weight`: stored as `norm.weight` (a body saved alone)
    and `model.lm_head.weight` (a model saved as a part of another) they are
    `{"model.norm.weight": "norm.weight", "lm_head.weight": "model.lm_head.weight"}`.
    """
    names = {}
    for name in stored:
        shorter, longer = name.removeprefix(BODY), BODY + name
        fitting = next((n for n in (shorter, longer) if n in expected), name)
        if name in expected or fitting in stored:
            fitting = name
        names[fitting] = name
    return names


def _is_ignored(name: str) -> bool:
    return not name.startswith(OF_DECODER) or name.endswith((*BUFFERS, *MASKS))


def _with_fitting_head(config: LlamaConfig, names: dict[str, str], read, origin: Path):
    """Return the config tied as the tensors are, and leave the names that it uses.

    A head beside a tied config: one that equals the embedding is dropped, another one is used,
    and one without an embedding stands for both. Without a head the embedding does.
    """
    if not config.tie_embeddings:
        if HEAD in names or EMBED not in names:
            return config
        warn(
            f"{origin}: has no {HEAD!r}, though the config says tie_word_embeddings false: "
            "the embedding is used for it"
        )
        return dataclasses.replace(config, tie_embeddings=True)
    if HEAD in names and EMBED not in names:
        names[EMBED] = names.pop(HEAD)
    elif HEAD in names:
        if not np.array_equal(read(HEAD), read(EMBED)):
            warn(
                f"{origin}: {HEAD!r} is used, though the config says tie_word_embeddings true: "
                "it differs from the embedding"
            )
            return dataclasses.replace(config, tie_embeddings=False)
        del names[HEAD]
    return config
