"""The pages: where K and V of every block are stored.

Groups of equal page shape draw on one pool and share the arrays by position in the group: with layers full, window, full,
window there are two arrays of each kind, and a block holds either two full layers or two window layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from paged_jax.arrays import ceil_div, read_before_write

COPY_BLOCKS = 8  # blocks copied in one pass


class KVCache(struct.PyTreeNode):
    """One pair of page arrays for each layer position."""

    k_pages: tuple[Float[Array, "N block_size kv_heads head_dim"], ...]
    v_pages: tuple[Float[Array, "N block_size kv_heads head_dim"], ...]


def init_pages(num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype) -> KVCache:
    """Zeroed pages; what they hold before a write never matters."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    pages = [tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2)]
    return KVCache(*pages)


class BlockCopies(NamedTuple):
    """Blocks whose pages are to be copied: the first `count` of C sources and targets."""

    source: Int[Array, "C"]
    target: Int[Array, "C"]
    count: Int[Array, ""]


def no_copies(most: int, like: Int[Array, ""]) -> BlockCopies:
    """Nothing to copy; `like` lends its sharding."""
    none = jnp.full_like(like, 0, shape=(most,))
    return BlockCopies(none, none, jnp.zeros_like(like))


def copy_pages(kv: KVCache, copies: BlockCopies) -> KVCache:
    """Copy those blocks in every layer, in place, some at a time; no source may be a target. Costs nothing where there is none."""

    def body(i, kv):
        offsets = i * COPY_BLOCKS + jnp.arange(COPY_BLOCKS, dtype=jnp.int32)
        given, at = offsets < copies.count, jnp.minimum(offsets, copies.source.shape[0] - 1)
        source = jnp.where(given, copies.source[at], 0)
        target = copies.target[at]

        def copy(pages):
            old, pages = read_before_write(pages, source)
            past = pages.shape[0]
            return pages.at[jnp.where(given, target, past)].set(old, mode="drop", wrap_negative_indices=False)

        return jax.tree.map(copy, kv)

    return jax.lax.fori_loop(0, ceil_div(copies.count, COPY_BLOCKS), body, kv)
