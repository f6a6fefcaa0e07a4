"""The pages: where K and V of every block are stored.

Groups of equal page shape draw on one pool and share the arrays by position in the group: with
layers full, window, full, window there are two arrays of each kind, and a block holds either two
full layers or two window layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from paged_jax.arrays import ceil_div, read_before_write
from paged_jax.config import CacheConfig

COPY_BLOCKS = 8  # blocks copied in one pass


class KVCache(struct.PyTreeNode):
    """One pair of page arrays for each layer position."""

    k_pages: tuple[Float[Array, "N block_size kv_heads head_dim"], ...]
    v_pages: tuple[Float[Array, "N block_size kv_heads head_dim"], ...]


def init_pages(config: CacheConfig) -> KVCache:
    """Return zeroed pages; what they hold before a write never matters."""
    shape = (config.num_blocks, config.block_size, config.num_kv_heads, config.head_dim)

    def zeros():
        return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))

    return KVCache(zeros(), zeros())


class BlockCopies(NamedTuple):
    """Blocks of which the pages are to be copied: the first `count` of C sources and targets."""

    source: Int[Array, "C"]
    target: Int[Array, "C"]
    count: Int[Array, ""]


def no_copies(max_count: int, like: Int[Array, ""]) -> BlockCopies:
    """Return an empty list of copies; `like` lends its sharding."""
    none = jnp.full_like(like, 0, shape=(max_count,))
    return BlockCopies(none, none, jnp.zeros_like(like))


def copy_pages(kv: KVCache, copies: BlockCopies) -> KVCache:
    """Copy those blocks in every layer, in place, `COPY_BLOCKS` in a pass.

    No source may be a target. It costs nothing where there is none.
    """

    def copy_some(i, kv):
        offsets = i * COPY_BLOCKS + jnp.arange(COPY_BLOCKS, dtype=jnp.int32)
        is_valid = offsets < copies.count
        at = jnp.minimum(offsets, copies.source.shape[0] - 1)
        source = jnp.where(is_valid, copies.source[at], 0)
        target = copies.target[at]

        def copy(pages):
            old, pages = read_before_write(pages, source)
            place = jnp.where(is_valid, target, pages.shape[0])
            return pages.at[place].set(old, mode="drop", wrap_negative_indices=False)

        return jax.tree.map(copy, kv)

    return jax.lax.fori_loop(0, ceil_div(copies.count, COPY_BLOCKS), copy_some, kv)
