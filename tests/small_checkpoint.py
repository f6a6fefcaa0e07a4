"""Small checkpoints of numbers that are the same on every machine.

Needs numpy and safetensors alone, so that the reference can make the same ones.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZES = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
BIASES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def numbers(name, shape):
    """Uniform numbers that depend on the name and shape only, with a mean of 1 for norms.

    The raw bits of PCG64 are the same in all versions of NumPy; its distributions are not.
    """
    count = int(np.prod(shape))
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
    uniform = (bits >> np.uint64(11)).astype(np.float64) / 2**52 - 1  # from -1 to 1
    scale = 1.7 * shape[-1] ** -0.5 if len(shape) > 1 else 0.5
    mean = 1.0 if name.endswith("norm.weight") else 0.0
    return (mean + scale * uniform).reshape(shape).astype(np.float32)


def tensors(sizes=SIZES, *, biases=(), qk_norm=False, head=True):
    """Return the tensors of a decoder of these sizes, by name."""
    d, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (sizes["vocab_size"], d), "model.norm.weight": (d,)}
    if head:
        shapes["lm_head.weight"] = (sizes["vocab_size"], d)
    matrices = {
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (inner, d),
        "mlp.up_proj": (inner, d),
        "mlp.down_proj": (d, inner),
    }
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (d,)
        if qk_norm:
            shapes |= {f"{prefix}self_attn.{x}_norm.weight": (dim,) for x in "qk"}
        for name in (name for kind in biases for name in BIASES[kind]):
            shapes[f"{prefix}{name}.bias"] = matrices[name][:1]
    return {name: numbers(name, shape) for name, shape in shapes.items()}


def write(directory, config, arrays, *, num_shards=1, generation=None):
    """Write config.json and the tensors, in one file or in shards with an index."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if num_shards == 1:
        save_file(arrays, directory / "model.safetensors")
        return directory
    names, places = sorted(arrays), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: arrays[name] for name in names[shard::num_shards]}, directory / file)
        places |= dict.fromkeys(names[shard::num_shards], file)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def llama(directory, edit=lambda arrays: arrays, drop=(), **config):
    """Write a checkpoint of `model_type` llama, or another; `edit` changes its tensors.

    `drop` leaves keys out of the config, whatever the tensors are.
    """
    kind = config.get("model_type", "llama")
    biases = ("qkv",) if kind == "qwen2" else ()
    arrays = tensors(biases=biases, qk_norm=kind == "qwen3")
    keys = {"model_type": kind, **SIZES, **config}
    keys = {key: value for key, value in keys.items() if key not in drop}
    return write(directory, keys, edit(arrays))
