"""From named tensors of a checkpoint to a `Llama`: one check and one assembly for every file format."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.errors import ModelLoadError
from paged_jax.models.llama import Llama
from paged_jax.models.llama_config import LlamaConfig

READERS = 4  # threads that read and widen tensors


class Part(NamedTuple):
    """One tensor by what it does: `role` (q, gate, ...), `kind` (weight or bias) and the layer it is in, if any."""

    role: str
    kind: str
    layer: int | None = None


@dataclass(frozen=True)
class TensorSource:
    """The tensors of one checkpoint, matrices as [out, in].

    Attributes:
        origin: what errors call the checkpoint.
        shapes: name -> shape of every tensor that is to be used.
        read: name -> values, in any float dtype.
        templates: role -> the format's name for it, with `{layer}` where it has one, less `.weight` or `.bias`.
    """

    origin: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    templates: Mapping[str, str]

    def name(self, part: Part) -> str:
        """The file's name of a part."""
        return f"{self.templates[part.role].format(layer=part.layer)}.{part.kind}"


def expected_parts(config: LlamaConfig) -> dict[Part, tuple[int, ...]]:
    """Every part a model of this config consists of, with its shape in a checkpoint."""
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
    biased = ("q", "k", "v") * config.qkv_bias + ("out",) * config.out_bias + ("gate", "up", "down") * config.mlp_bias
    scales = {"attention_norm": (d,), "mlp_norm": (d,)} | (
        {"q_norm": (dim,), "k_norm": (dim,)} if config.qk_norm else {}
    )
    parts = {Part("embed", "weight"): (config.vocab_size, d), Part("norm", "weight"): (d,)}
    if not config.tie_embeddings:
        parts[Part("head", "weight")] = (config.vocab_size, d)
    for layer in range(config.num_layers):
        parts |= {Part(role, "weight", layer): shape for role, shape in (matrices | scales).items()}
        parts |= {Part(role, "bias", layer): matrices[role][:1] for role in biased}
    return parts


def check_tensors(config: LlamaConfig, source: TensorSource) -> None:
    """Raise ModelLoadError that names the first missing, misshapen or unexpected tensor."""
    expected = {source.name(part): shape for part, shape in expected_parts(config).items()}
    for name, shape in expected.items():
        if name not in source.shapes:
            raise ModelLoadError(f"{source.origin}: tensor {name!r} is missing, expected with shape {shape}")
        if source.shapes[name] != shape:
            raise ModelLoadError(f"{source.origin}: tensor {name!r} has shape {source.shapes[name]}, expected {shape}")
    if extra := sorted(source.shapes.keys() - expected.keys()):
        raise ModelLoadError(
            f"{source.origin}: tensor {extra[0]!r} with shape {source.shapes[extra[0]]} is unexpected: "
            f"the config asks for no such tensor ({len(extra)} unexpected in all)"
        )


def assemble(config: LlamaConfig, source: TensorSource) -> Llama:
    """A model filled from the checkpoint, in `config.dtype`, without random weights first. Raises ModelLoadError."""
    check_tensors(config, source)
    dtype = jnp.dtype(config.dtype)

    def take(role: str, kind: str = "weight", layer: int | None = None) -> np.ndarray:
        return source.read(source.name(Part(role, kind, layer))).astype(dtype, copy=False)

    def qkv(kind: str, layer: int) -> np.ndarray:
        by_head = [take(role, kind, layer) for role in ("q", "k", "v")]
        grouped = [x.reshape(config.num_kv_heads, -1, config.head_dim, *x.shape[1:]) for x in by_head]
        return np.concatenate(grouped, axis=1)

    def gate_up(kind: str, layer: int) -> np.ndarray:
        return np.stack([take("gate", kind, layer), take("up", kind, layer)])

    def param(path: tuple) -> np.ndarray:
        match path:
            case ("layers", layer, "attention", ("qkv" | "qkv_bias") as name):
                return qkv("bias" if name.endswith("bias") else "weight", layer)
            case ("layers", layer, "mlp", ("gate_up" | "gate_up_bias") as name):
                return gate_up("bias" if name.endswith("bias") else "weight", layer)
            case ("layers", layer, *_, ("q_norm" | "k_norm" | "attention_norm" | "mlp_norm") as role, "scale"):
                return take(role, layer=layer)
            case ("layers", layer, _, name):
                return take(name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight", layer)
            case ("norm", "scale"):
                return take("norm")
            case (role,):
                return take(role)
        raise AssertionError(f"no tensor makes the parameter {path}")

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def fill(item):
        path, leaf = item
        return path, leaf.replace(jax.device_put(param(path), may_alias=False))

    with ThreadPoolExecutor(max_workers=READERS) as readers:  # numpy works without the interpreter's lock
        filled = list(readers.map(fill, nnx.to_flat_state(abstract)))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
