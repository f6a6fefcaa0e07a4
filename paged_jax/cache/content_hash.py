"""Hashes of token content: one 32-bit number for all tokens of a sequence up to a block's end.

The hash is a sum over tokens, each mixed with its position. So the hashes of all prefixes of a
sequence are one cumsum, and a row continues from the sum that it has.

    hash of 3 blocks = root_hash + sum of block 0 + sum of block 1 + sum of block 2
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

HASH_BITS = 32  # tests leave a few, to force collisions


def root_hash(root: Int[Array, "*k"]) -> UInt[Array, "*k"]:
    """Return the hash of no tokens."""
    return _mix(root, jnp.full_like(root, -1))


def hash_blocks(tokens: Int[Array, "n B"], columns: Int[Array, "n"]) -> UInt[Array, "n"]:
    """Return what each block of a sequence, the `columns[i]`-th, adds to the hash."""
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    position = columns[:, None] * tokens.shape[1] + offsets[None]
    return jnp.sum(_mix(tokens, position), axis=1, dtype=jnp.uint32)


def to_key(hashes: UInt[Array, "n"]) -> UInt[Array, "n"]:
    """Return the bits of a hash that the directory compares."""
    return hashes >> (32 - HASH_BITS)


def _mix(tokens: Int[Array, "..."], position: Int[Array, "..."]) -> UInt[Array, "..."]:
    """Return 32 bits that each depend on all bits of both.

    Two odd multipliers, then the finaliser of murmur3.
    """
    x = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x += position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
