"""Writing new K and V into the pages."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .paged_attention.checks import check_ranks, to_int32


def write_kv(
    k_pages: Float[Array, "N B KV D"],
    v_pages: Float[Array, "N B KV D"],
    k: Float[Array, "T KV D"],
    v: Float[Array, "T KV D"],
    slots: Int[Array, "T"],
) -> tuple[Float[Array, "N B KV D"], Float[Array, "N B KV D"]]:
    """Write token t's K and V to slot `slots[t]` = block * B + offset of the pages; in place where they are donated.

    A slot below 0 or from N * B on is dropped: that is how padding is written. No two tokens may name one slot.

    Raises:
        ValueError: an array has the wrong shape.
        TypeError: K or V has another dtype than its pages, or the slots are not integers.
    """
    layout = "[N, block_size, kv_heads, head_dim]"
    check_ranks(k_pages=(k_pages, layout), v_pages=(v_pages, layout), slots=(slots, "[T]"))
    check_ranks(k=(k, "[T, kv_heads, head_dim]"), v=(v, "[T, kv_heads, head_dim]"))
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"v_pages has shape {v_pages.shape}; expected {k_pages.shape[:3]} and a head_dim, as k_pages")
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"slots has dtype {slots.dtype}; expected an integer dtype")
    for name, new, pages in (("k", k, k_pages), ("v", v, v_pages)):
        expected = (slots.shape[0], *pages.shape[2:])
        if new.shape != expected:
            raise ValueError(f"{name} has shape {new.shape}; expected {expected} to match slots and {name}_pages")
        if new.dtype != pages.dtype:
            raise TypeError(f"{name} has dtype {new.dtype}; expected {pages.dtype}, the dtype of {name}_pages")

    slots, block_size = to_int32(slots), jnp.int32(k_pages.shape[1])
    # Two coordinates, never a flattened page: a pool may hold more than 2^31 numbers. Rounded to zero, a negative slot has a
    # negative coordinate, and without the wrap that is outside, like the slots from N * B on.
    at = (lax.div(slots, block_size), lax.rem(slots, block_size))

    def put(pages, new):
        return jnp.asarray(pages).at[at].set(new, mode="drop", wrap_negative_indices=False)

    return put(k_pages, k), put(v_pages, v)
