"""Copy-on-write: a row that is about to write into a block that others hold gets a copy of it.

Only the block of the first position that a row writes can be shared: what comes behind it is the
row's own. So there is at most one copy a row and group.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paged_jax.cache.paged_cache import PagedCache, replace_blocks
from paged_jax.cache.pages import BlockCopies


def written_blocks(
    cache: PagedCache, rows: Int[Array, "k"], first_written: Int[Array, "k"]
) -> Int[Array, "G k"]:
    """Return the block of the first position that each row writes, 0 where it has none yet."""
    return cache.tables.blocks[:, rows, _written_column(cache, first_written)]


def shared_writes(
    cache: PagedCache,
    rows: Int[Array, "k"],
    first_written: Int[Array, "k"],
    writes: Bool[Array, "k"],
) -> tuple[Bool[Array, "G k"], Int[Array, "G k"]]:
    """Return which rows are about to write into a block that others hold too, and the block.

    `first_written` is the first position that a row writes, `writes` whether it writes at all.
    """
    blocks = written_blocks(cache, rows, first_written)
    return writes[None] & (blocks != 0) & (cache.pool.ref_count[blocks] > 1), blocks


def copies_needed(
    cache: PagedCache,
    rows: Int[Array, "k"],
    first_written: Int[Array, "k"],
    writes: Bool[Array, "k"],
) -> Bool[Array, "G k"]:
    """Return which rows must get a copy of the block that they write into.

    Of k writers of a block with r references all copy if r > k, all but the last if r = k.

        rows 0 1 2 hold block 7: writers 0 1 -> both copy; writers 0 1 2 -> 0 and 1 copy
    """
    is_shared, blocks = shared_writes(cache, rows, first_written, writes)
    same = is_shared[:, :, None] & is_shared[:, None] & (blocks[:, :, None] == blocks[:, None])
    num_writers = jnp.sum(same, axis=2, dtype=jnp.int32)
    is_last = ~jnp.any(jnp.triu(same, 1), axis=2)
    return is_shared & ~(is_last & (cache.pool.ref_count[blocks] == num_writers))


def copy_on_write(
    cache: PagedCache,
    rows: Int[Array, "k"],
    first_written: Int[Array, "k"],
    copies: Bool[Array, "G k"],
) -> tuple[PagedCache, BlockCopies]:
    """Give each row in `copies` a block of its own in place of the shared one.

    The queue's head must be live. The pages are still to be copied (`pages.copy_pages`).
    """
    columns = _written_column(cache, first_written)
    cache, source, target, count = replace_blocks(cache, rows, columns, copies)
    return cache, BlockCopies(source, target, count)


def _written_column(cache: PagedCache, first_written: Int[Array, "k"]) -> Int[Array, "k"]:
    config = cache.config
    return jnp.minimum(first_written // config.block_size, config.max_blocks_per_row - 1)
