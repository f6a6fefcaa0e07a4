"""Writing new K and V into the pages."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Integer, Num

from .paged_attention.checks import AnyArray, check_write, to_int32


def write_kv(
    k_pages: Num[AnyArray, "N B KV D"],
    v_pages: Num[AnyArray, "N B KV E"],
    k: Num[AnyArray, "T KV D"],
    v: Num[AnyArray, "T KV E"],
    slots: Integer[AnyArray, "T"],
) -> tuple[Num[Array, "N B KV D"], Num[Array, "N B KV E"]]:
    """Write token t's K and V to slot `slots[t]` = block * B + offset of the pages.

    The pages are written in place where they are donated. A slot below 0 or from N * B on is
    dropped: that is how padding is written. No two tokens may name one slot.

    Example, B = 4: slots [13, -1, 20] write block 3 offset 1, nothing, and block 5 offset 0.

    Raises:
        ValueError: an array has the wrong shape.
        TypeError: K or V has another dtype than its pages, or the slots are not integers.
    """
    check_write(k_pages, v_pages, k, v, slots)
    slots, block_size = to_int32(slots), jnp.int32(k_pages.shape[1])
    # Two coordinates, never a flattened page: a pool may hold more than 2^31 numbers. Division
    # rounds towards zero, so a negative slot has a negative coordinate. Without the wrap that is
    # outside, like the slots from N * B on.
    at = (lax.div(slots, block_size), lax.rem(slots, block_size))
    return _scatter(k_pages, at, k), _scatter(v_pages, at, v)


def _scatter(pages, at, new) -> Array:
    return jnp.asarray(pages).at[at].set(new, mode="drop", wrap_negative_indices=False)
