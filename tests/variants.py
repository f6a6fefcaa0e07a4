"""Small checkpoints of every kind that loads, each with one thing of its own.

Needs numpy and safetensors alone, so that the reference can make the same ones.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

import small_checkpoint
from small_checkpoint import SIZES

TOKENS = np.array([(7 * i * i + 3 * i + 5) % 64 for i in range(24)], np.int32)
POSITIONS = (0, 5, 11, 23)  # of which logits are compared
COLUMNS = 64  # of the logits: those of larger vocabularies are cut

NOTHING = MappingProxyType({})
QKV, OUT, MLP = "qkv", "out", "mlp"
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 5}


class Variant(NamedTuple):
    """What differs from the plainest checkpoint of a family.

    Attributes:
        keys: of config.json; a size is that of the tensors too.
        absent: sizes that the tensors have and config.json does not say.
        head: whether there is an lm_head.weight.
        edit: changes the tensors.
    """

    keys: Mapping = NOTHING
    absent: Mapping = NOTHING
    biases: tuple = ()
    head: bool = True
    edit: object = None
    num_shards: int = 1


def stored_as(dtype, *, but=()):
    def edit(arrays):
        return {n: x if n.endswith(but or ("?",)) else x.astype(dtype) for n, x in arrays.items()}

    return edit


def bfloat16(arrays):
    """Round to bfloat16, to nearest even; the names of the type differ between packages."""
    return {n: np.asarray(x).astype(_bfloat16()) for n, x in arrays.items()}


def _bfloat16():
    import ml_dtypes  # comes with jax

    return ml_dtypes.bfloat16


def equal_head(arrays):
    return arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"].copy()}


def body_alone(arrays):
    return {name.removeprefix("model."): values for name, values in arrays.items()}


def part_of_another(arrays):
    return {f"model.{name}": values for name, values in arrays.items()}


def with_leftovers(arrays):
    prefix, ones = "model.layers.0.self_attn.", np.ones(4, np.float32)
    names = (f"{prefix}masked_bias", f"{prefix}rotary_emb.inv_freq", "v_head.summary.weight")
    return arrays | {name: ones.copy() for name in names}


def without_embedding(arrays):
    return {n: x for n, x in arrays.items() if n != "model.embed_tokens.weight"}


COMMON = {
    "plain": Variant(),
    "tied": Variant({"tie_word_embeddings": True}, head=False),
    "tied, equal head": Variant({"tie_word_embeddings": True}, edit=equal_head),
    "tied, other head": Variant({"tie_word_embeddings": True}),
    "tied, head alone": Variant({"tie_word_embeddings": True}, edit=without_embedding),
    "a key head for each query head": Variant({"num_key_value_heads": 4}),
    "one key head": Variant({"num_key_value_heads": 1}),
    "wide heads": Variant({"head_dim": 16}),
    "three layers": Variant({"num_hidden_layers": 3}),
    "one layer": Variant({"num_hidden_layers": 1}),
    "theta": Variant({"rope_theta": 5e5}),
    "theta in rope_parameters": Variant({"rope_parameters": {"rope_theta": 100.0}}),
    "linear rope": Variant({"rope_parameters": {**LINEAR, "rope_theta": 1e4}}),
    "linear rope, older": Variant({"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama3 rope": Variant({"rope_parameters": {**LLAMA3, **ORIGINAL, "rope_theta": 500.0}}),
    "eps": Variant({"rms_norm_eps": 0.05}),
    "no intermediate_size": Variant(absent={"intermediate_size": None}),
    "no num_key_value_heads": Variant(absent={"num_key_value_heads": None}),
    "no head_dim": Variant(absent={"head_dim": None}),
}
LLAMA = {
    "attention bias": Variant({"attention_bias": True}, biases=(QKV, OUT)),
    "mlp bias": Variant({"mlp_bias": True}, biases=(MLP,)),
    "all biases, tied": Variant(
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        biases=(QKV, OUT, MLP),
        head=False,
    ),
    "null keys": Variant(
        {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
        absent={"num_key_value_heads": 4, "head_dim": 4},
    ),
    "no vocab_size": Variant(absent={"vocab_size": None}),
    "no hidden_size": Variant(absent={"hidden_size": None}),
    "no num_attention_heads": Variant(
        {"hidden_size": 32, "head_dim": 2}, absent={"num_attention_heads": None}
    ),
    "no max_position_embeddings": Variant(absent={"max_position_embeddings": None}),
    "swish": Variant({"hidden_act": "swish"}),
    "windows are not read": Variant({"sliding_window": 4, "layer_types": [SLIDING] * 2}),
    "llama3 rope, older": Variant({"rope_scaling": {**LLAMA3, **ORIGINAL}}),
    "llama3 rope, length beside it": Variant({"rope_scaling": LLAMA3, **ORIGINAL}),
    "llama3 rope, length in both": Variant(
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}, **ORIGINAL}
    ),
    "llama3 rope, no length": Variant({"rope_scaling": LLAMA3, "max_position_embeddings": 24}),
    "rope of no type": Variant({"rope_scaling": {"factor": 4.0}}),
    "empty rope": Variant({"rope_parameters": {}, "rope_scaling": {}, "rope_theta": 300.0}),
    "both ropes": Variant({"rope_scaling": LINEAR, "rope_parameters": LINEAR}),
    "float16": Variant(edit=stored_as(np.float16)),
    "bfloat16": Variant(edit=bfloat16),
    "float16 but the norms": Variant(edit=stored_as(np.float16, but=("norm.weight",))),
    "shards": Variant(num_shards=3),
    "body alone, tied": Variant(
        {"tie_word_embeddings": True}, head=False, edit=body_alone, num_shards=2
    ),
    "body alone": Variant(edit=body_alone),
    "part of another model": Variant(edit=part_of_another),
    "leftovers": Variant(edit=with_leftovers),
}
MISTRAL = {
    "window": Variant({"sliding_window": 5}),
    "window of one": Variant({"sliding_window": 1}),
    "null window": Variant({"sliding_window": None}),
    "wide window": Variant({"sliding_window": 4096}),
    "layer types": Variant({"sliding_window": 5, "layer_types": [FULL, SLIDING]}),
    "all layers full": Variant({"sliding_window": 5, "layer_types": [FULL, FULL]}),
    "bias is not read": Variant({"attention_bias": True, "mlp_bias": True}),
    "no max_position_embeddings": Variant(absent={"max_position_embeddings": None}),
}
QWEN = {
    "window in the last layer": Variant({**WINDOW, "max_window_layers": 1}),
    "windows in all layers": Variant({**WINDOW, "max_window_layers": 0}),
    "no max_window_layers": Variant(WINDOW),
    "window not used": Variant({"sliding_window": 5, "max_window_layers": 0}),
    "no sliding_window": Variant({"use_sliding_window": True, "max_window_layers": 0}),
    "null window": Variant({**WINDOW, "sliding_window": None, "max_window_layers": 0}),
    "layer types": Variant({**WINDOW, "layer_types": [SLIDING, FULL]}),
    "null layer types": Variant({**WINDOW, "layer_types": None, "max_window_layers": 1}),
    "window and linear rope": Variant(
        {**WINDOW, "max_window_layers": 1, "rope_parameters": {**LINEAR, "rope_theta": 1e6}}
    ),
}
QWEN2 = {"bias is not read": Variant({"attention_bias": True, "mlp_bias": True})}
QWEN3 = {
    "attention bias": Variant({"attention_bias": True}, biases=(QKV, OUT)),
    "mlp bias is not read": Variant({"mlp_bias": True}),
    "bfloat16": Variant(edit=bfloat16),
}
FAMILIES = {
    "llama": COMMON | LLAMA,
    "mistral": COMMON | MISTRAL,
    "qwen2": COMMON | QWEN | QWEN2,
    "qwen3": COMMON | QWEN | QWEN3,
}
VARIANTS = {
    f"{family}: {name}": (family, variant)
    for family, variants in FAMILIES.items()
    for name, variant in variants.items()
}


def write(name, directory, class_defaults):
    """Write a variant's checkpoint. `class_defaults` are the families' values of absent keys."""
    family, variant = VARIANTS[name]
    defaults = class_defaults[family]
    keys = SIZES | dict(variant.keys)
    sizes = SIZES | {k: v for k, v in variant.keys.items() if k in SIZES}
    for key, value in variant.absent.items():
        if key not in variant.keys:
            del keys[key]
        sizes[key] = defaults[key] if value is None else value
    heads = sizes["num_attention_heads"]
    if "num_key_value_heads" in variant.absent and sizes["num_key_value_heads"] != heads:
        # As many as the class says, of which the query heads must be a multiple.
        heads = sizes["num_key_value_heads"] or heads
        sizes |= {"num_key_value_heads": heads, "num_attention_heads": heads}
        keys["num_attention_heads"] = heads
    if sizes["head_dim"] is None:
        sizes["head_dim"] = sizes["hidden_size"] // heads
    biases = (*variant.biases, *((QKV,) if family == "qwen2" else ()))
    arrays = small_checkpoint.tensors(
        sizes, biases=biases, qk_norm=family == "qwen3", head=variant.head
    )
    arrays = arrays if variant.edit is None else variant.edit(arrays)
    config = {"model_type": family, **keys}
    return small_checkpoint.write(directory, config, arrays, num_shards=variant.num_shards)
