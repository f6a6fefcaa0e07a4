"""From a checkpoint's tensors to a `Llama`'s params: one check, one reading for every format."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.arrays import keep_default_device
from paged_jax.models.errors import ModelLoadError
from paged_jax.models.llama import Llama
from paged_jax.models.llama_config import LlamaConfig

NUM_READERS = 4  # threads that read and convert tensors


class Part(NamedTuple):
    """One tensor by its purpose.

    Attributes:
        role: q, gate, norm, ...
        kind: weight or bias.
        layer: its layer, if it is in one.
    """

    role: str
    kind: str
    layer: int | None = None


@dataclass(frozen=True)
class TensorSource:
    """The tensors of one checkpoint, matrices as [out, in].

    Attributes:
        origin: what errors call the checkpoint.
        shapes: name -> shape of every tensor that the model uses.
        read: name -> values, in any float dtype.
        templates: role -> the format's name for it, with `{layer}` where it is in one, less
            `.weight` or `.bias`.
    """

    origin: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    templates: Mapping[str, str]

    def name(self, part: Part) -> str:
        """Return the file's name of a part.

        `Part("q", "bias", 3) -> "model.layers.3.self_attn.q_proj.bias"`.
        """
        return f"{self.templates[part.role].format(layer=part.layer)}.{part.kind}"


def read_params(decoder: Llama, source: TensorSource) -> Any:
    """Return the params of a decoder that has their shapes, made of the checkpoint's tensors."""
    config = decoder.config

    def fill(item):
        path, leaf = item
        return path, leaf.replace(jax.device_put(_values(config, source, path), may_alias=False))

    with ThreadPoolExecutor(NUM_READERS) as readers:  # numpy works without the interpreter's lock
        filled = list(readers.map(keep_default_device(fill), nnx.to_flat_state(nnx.state(decoder))))
    return nnx.from_flat_state(filled)


def check_tensors(config: LlamaConfig, source: TensorSource) -> None:
    """Raise ModelLoadError for the first missing, misshapen or unexpected tensor."""
    expected = {source.name(part): shape for part, shape in expected_parts(config).items()}
    for name, shape in expected.items():
        if name not in source.shapes:
            raise ModelLoadError(
                f"{source.origin}: tensor {name!r} is missing, expected with shape {shape}"
            )
        if source.shapes[name] != shape:
            raise ModelLoadError(
                f"{source.origin}: tensor {name!r} has shape {source.shapes[name]}, "
                f"expected {shape}"
            )
    if extra := sorted(source.shapes.keys() - expected.keys()):
        raise ModelLoadError(
            f"{source.origin}: tensor {extra[0]!r} with shape {source.shapes[extra[0]]} is "
            f"unexpected: the config asks for no such tensor ({len(extra)} unexpected in all)"
        )


def expected_parts(config: LlamaConfig) -> dict[Part, tuple[int, ...]]:
    """Return every part of a model of this config, with its shape in a checkpoint."""
    d, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    matrices = {
        "q": (q, d),
        "k": (kv, d),
        "v": (kv, d),
        "out": (d, q),
        "gate": (inner, d),
        "up": (inner, d),
        "down": (d, inner),
    }
    biased = ("q", "k", "v") * config.qkv_bias
    biased += ("out",) * config.out_bias + ("gate", "up", "down") * config.mlp_bias
    weights = matrices | {"attention_norm": (d,), "mlp_norm": (d,)}
    if config.qk_norm:
        weights |= {"q_norm": (dim,), "k_norm": (dim,)}
    parts = {Part("embed", "weight"): (config.vocab_size, d), Part("norm", "weight"): (d,)}
    if not config.tie_embeddings:
        parts[Part("head", "weight")] = (config.vocab_size, d)
    for layer in range(config.num_layers):
        parts |= {Part(role, "weight", layer): shape for role, shape in weights.items()}
        parts |= {Part(role, "bias", layer): matrices[role][:1] for role in biased}
    return parts


def _values(config: LlamaConfig, source: TensorSource, path: tuple) -> np.ndarray:
    """Return a parameter of `Llama` by its path, made of the checkpoint's tensors.

    Heads q0 to q3, k0, k1, v0, v1 of a layer, two KV heads: `qkv` is
    `[[q0 q1 k0 v0], [q2 q3 k1 v1]]`.
    """

    def read(role: str, kind: str = "weight", layer: int | None = None) -> np.ndarray:
        values = source.read(source.name(Part(role, kind, layer)))
        return values.astype(jnp.dtype(config.dtype), copy=False)

    kind = "bias" if str(path[-1]).endswith("_bias") else "weight"
    match path:
        case ("layers", layer, "attention", ("qkv" | "qkv_bias")):
            heads = [read(role, kind, layer) for role in ("q", "k", "v")]
            shape = (config.num_kv_heads, -1, config.head_dim)
            return np.concatenate([x.reshape(*shape, *x.shape[1:]) for x in heads], axis=1)
        case ("layers", layer, "mlp", ("gate_up" | "gate_up_bias")):
            return np.stack([read("gate", kind, layer), read("up", kind, layer)])
        case ("layers", layer, *_, role, "scale"):
            return read(role, layer=layer)
        case ("layers", layer, _, name):
            return read(name.removesuffix("_bias"), kind, layer)
        case ("norm", "scale") | ("embed",) | ("head",):
            return read(path[0])
    raise AssertionError(f"no tensor makes the parameter {path}")
