"""Rotary position embedding: angles in float32, with the scalings that checkpoints use."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

type RopeKind = Literal["default", "linear", "llama3", "factors"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind.__value__)


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotation frequencies. Raises ValueError for values that cannot be.

    Attributes:
        theta: base; pair i of D / 2 has the frequency theta ** (-2 i / D).
        kind: "default" scales nothing, "linear" divides every frequency by `factor`, "llama3"
            (Llama 3.1) divides low frequencies and blends in between, "factors" divides frequency
            i by `factors[i]` (how GGUF files store llama3 scaling).
        factor: divisor of "linear" and "llama3".
        low_freq_factor: "llama3" divides what turns at most as often in `original_max_len` tokens.
        high_freq_factor: "llama3" keeps what turns at least as often in `original_max_len` tokens.
        original_max_len: tokens of the context that a "llama3" model was first trained on.
        factors: D / 2 divisors of "factors".
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind {self.kind!r} is not one of {', '.join(ROPE_KINDS)}")
        scalars = (self.theta, self.factor, self.low_freq_factor, self.original_max_len)
        if not all(math.isfinite(x) and x > 0 for x in (*scalars, *self.factors)):
            raise ValueError(f"rope theta, factors and lengths must be positive, got {self}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"rope high_freq_factor must exceed low_freq_factor, got {self}")
        if (self.kind == "factors") != bool(self.factors):
            raise ValueError(f"rope factors go with kind 'factors' and only with it, got {self}")


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float32[np.ndarray, "half"]:
    """Compute radians a position for each of the head_dim / 2 rotated pairs, on the host.

    `theta=100, head_dim=8 -> [1, 0.316, 0.1, 0.032]`; "linear" by 4 gives a quarter of each;
    factors `(1, 2, 4, 8)` give `[1, 0.158, 0.025, 0.004]`.

    Raises ValueError where the config has another number of factors than head_dim / 2.
    """
    frequencies = config.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    match config.kind:
        case "linear":
            frequencies = frequencies / config.factor
        case "factors":
            if len(config.factors) != head_dim // 2:
                raise ValueError(
                    f"rope has {len(config.factors)} factors, "
                    f"head_dim {head_dim} asks for {head_dim // 2}"
                )
            frequencies = frequencies / np.asarray(config.factors)
        case "llama3":
            # Full turns of a pair within the original context: many are kept, few are divided.
            turns = config.original_max_len * frequencies / (2 * np.pi)
            span = config.high_freq_factor - config.low_freq_factor
            kept = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
            frequencies = frequencies * (kept + (1 - kept) / config.factor)
    return frequencies.astype(np.float32)


def rotation(
    positions: Int[Array, "T"], config: RopeConfig, head_dim: int
) -> tuple[Float32[Array, "T half"], Float32[Array, "T half"]]:
    """Compute cosine and sine of each position's angles; half = head_dim / 2."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(config, head_dim)[None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T *heads D"],
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
) -> Float[Array, "T *heads D"]:
    """Rotate each pair (x[i], x[i + D / 2]) by its angle, in float32. Keeps the dtype of x.

    D = 4, by a quarter turn: `[1, 2, 10, 20] -> [-10, -20, 1, 2]`.
    """
    half = x.shape[-1] // 2
    heads = (1,) * (x.ndim - 2)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    cos = cos.reshape(-1, *heads, 1, half)
    # XLA's CPU backend compiles a concatenate of two halves anew for each layer, this product once.
    sin = sin.reshape(-1, *heads, 1, half) * np.array([-1, 1], np.float32).reshape(1, *heads, 2, 1)
    swapped = lax.rev(pairs, (pairs.ndim - 2,))
    return (pairs * cos + swapped * sin).reshape(x.shape).astype(x.dtype)
