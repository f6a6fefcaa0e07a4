"""Rotary position embedding: angles from positions in float32, with the scalings that checkpoints name."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

type RopeKind = Literal["default", "linear", "llama3", "factors"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind.__value__)


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotation frequencies.

    `linear` divides every frequency by `factor`; `llama3` divides the slow ones and blends in between (Llama 3.1);
    `factors` divides frequency i by `factors[i]`, head_dim / 2 of them (how GGUF files store llama3 scaling).
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
        positive = (self.theta, self.factor, self.low_freq_factor, self.original_max_len, *self.factors)
        if not all(math.isfinite(x) and x > 0 for x in positive):
            raise ValueError(f"rope theta, factors and lengths must be positive, got {self}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"rope high_freq_factor must exceed low_freq_factor, got {self}")
        if (self.kind == "factors") != bool(self.factors):
            raise ValueError(f"rope factors go with kind 'factors' and only with it, got {self}")


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each of the head_dim / 2 rotated pairs, float32, on the host."""
    frequencies = config.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    match config.kind:
        case "linear":
            frequencies = frequencies / config.factor
        case "factors":
            if len(config.factors) != head_dim // 2:
                raise ValueError(
                    f"rope has {len(config.factors)} factors, head_dim {head_dim} asks for {head_dim // 2}"
                )
            frequencies = frequencies / np.asarray(config.factors)
        case "llama3":
            # How often a pair turns within the original context decides: fast pairs stay, slow ones are stretched.
            turns = config.original_max_len * frequencies / (2 * np.pi)
            span = config.high_freq_factor - config.low_freq_factor
            keep = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
            frequencies = frequencies * (keep + (1 - keep) / config.factor)
    return frequencies.astype(np.float32)


def rotation(
    positions: Int[Array, "T"], config: RopeConfig, head_dim: int
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosine and sine of each position's angles, float32; half = head_dim / 2."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(config, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T *heads D"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T *heads D"]:
    """Turn each pair (x[i], x[i + D / 2]) by its angle, in float32; the dtype of x comes back."""
    half = x.shape[-1] // 2
    heads = (1,) * (x.ndim - 2)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    cos = cos.reshape(-1, *heads, 1, half)
    # Not two halves put side by side: XLA's CPU backend compiles each layer's concatenate anew, and a product once.
    sin = sin.reshape(-1, *heads, 1, half) * np.array([[-1], [1]], np.float32)
    return (pairs * cos + lax.rev(pairs, (pairs.ndim - 2,)) * sin).reshape(x.shape).astype(x.dtype)
