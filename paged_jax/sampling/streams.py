"""Random streams: numbers that depend on a seed and a position, and on no setting of JAX.

All keys are made and folded by threefry2x32. Under `jax_default_prng_impl="rbg"` a batch would draw
from the first of its keys. Bits are made by folding counters in, which no setting changes, while
`jax.random.bits` of an array depends on `jax_threefry_partitionable`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

IMPL = "threefry2x32"
KEY_WORDS = (2, 4)  # of an untyped key: of threefry2x32, of rbg and unsafe_rbg


def split_seeds(key: Key[Array, ""] | UInt[Array, "words"], count: int) -> UInt[Array, "count"]:
    """Return `count` seeds that depend on all words of a user's key, of any implementation."""
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if words.shape == (2,):
        own = jax.random.wrap_key_data(words, impl=IMPL)
    else:
        own = jax.random.key(0, impl=IMPL)
        for word in words.ravel():
            own = jax.random.fold_in(own, word)
    return _bits(own, count)


def uniforms(seeds: UInt[Array, "S"], positions: Int[Array, "S"]) -> Float[Array, "S 2"]:
    """Return two numbers in [0, 1) for each stream at its position: the words of one hash."""

    def draw(seed, position):
        key = jax.random.fold_in(jax.random.key(seed, impl=IMPL), position)
        # 23 bits are the mantissa of a float32 from 1 on.
        bits = (jax.random.key_data(key) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32) - jnp.float32(1)

    return jax.vmap(draw)(seeds, positions)


def _bits(key: Key[Array, ""], count: int) -> UInt[Array, "count"]:
    """Return what `jax.random.bits` returns where threefry is partitionable."""
    counters = jnp.arange(count, dtype=jnp.uint32)
    words = jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(counters))
    return words[:, 0] ^ words[:, 1]
