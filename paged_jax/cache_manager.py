"""The one place where pool, tables and prefix directory change together: grow, share, copy on write, release.

Functions take a cache and return a new one.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax import block_pool, prefix_directory
from paged_jax.arrays import ceil_div, read_before_write, spread
from paged_jax.block_pool import BlockPool
from paged_jax.block_table import BlockTables, first_live_block, init_tables
from paged_jax.config import CacheConfig
from paged_jax.kv_cache import BlockCopies, KVCache, init_pages
from paged_jax.prefix_directory import PrefixDirectory, init_directory

RELEASE_ROWS = 4  # rows released in one vectorised pass; few, because a pass costs RELEASE_ROWS x table width


class PagedCache(struct.PyTreeNode):
    """A paged KV cache: bookkeeping and storage, one value."""

    pool: BlockPool
    tables: BlockTables
    directory: PrefixDirectory | None  # None: nothing is kept for later hits
    kv: KVCache

    @property
    def books(self) -> "PagedCache":
        """The same without its pages: for parts of a step that move blocks, not their contents."""
        return self.replace(kv=KVCache((), ()))


def init_cache(config: CacheConfig) -> PagedCache:
    """An empty cache."""
    directory = None
    if config.prefix_caching:
        directory = init_directory(config.num_blocks, config.block_size, config.num_groups, config.max_rows)
    return PagedCache(
        pool=block_pool.init_pool(config.num_blocks),
        tables=init_tables(config.num_groups, config.max_rows, config.max_blocks_per_row),
        directory=directory,
        kv=init_pages(
            config.num_layers,
            config.num_blocks,
            config.block_size,
            config.num_kv_heads,
            config.head_dim,
            config.dtype,
        ),
    )


def head_is_ready(cache: PagedCache, count: Int[Array, ""], most: int) -> Bool[Array, ""]:
    """Whether `take_ready` may take `count` blocks. It may where there is no directory: only hits leave gaps in the queue."""
    if cache.directory is None:
        return jnp.ones_like(count, bool)
    return block_pool.head_is_ready(cache.pool, count, most)


def make_ready(cache: PagedCache, count: Int[Array, ""], most: int) -> PagedCache:
    """Let `count` free blocks, `most` at most, stand together at the queue's head, if there are as many: `head_is_ready` then."""
    if cache.directory is None:
        return cache
    return cache.replace(pool=block_pool.make_ready(cache.pool, count, most))


def take_ready(cache: PagedCache, count: Int[Array, ""], most: int) -> tuple[PagedCache, Int[Array, "most"]]:
    """`count` blocks that stand ready at the queue's head, 0 behind them. What they held is forgotten."""
    pool, blocks, _ = block_pool.pop_ready(cache.pool, count, most)
    directory = cache.directory
    return cache.replace(
        pool=pool, directory=None if directory is None else prefix_directory.evict(directory, blocks)
    ), blocks


def grow(
    cache: PagedCache, rows: Int[Array, "k"], need: Int[Array, "G k"], num_tokens: Int[Array, "k"], most: int
) -> PagedCache:
    """Append `need` blocks to each row's tables, row by row and within a row group by group.

    The caller has made sure that the blocks, `most` at most in all, are free and stand ready at the queue's head. A row out
    of range is padding and needs none. `num_tokens` becomes what the rows have slots for.
    """
    groups = need.shape[0]
    cache, ids = take_ready(cache, jnp.sum(need), most)
    tables = cache.tables
    owner, rank, given = spread(need.T.ravel(), most)
    place, group = owner // groups, owner % groups
    row = rows[place]
    have, num_blocks = read_before_write(tables.num_blocks, (group, row))
    target = jnp.where(given, have + rank, tables.blocks.shape[2])
    each = jnp.arange(groups, dtype=jnp.int32)[:, None]
    return cache.replace(
        tables=BlockTables(
            blocks=tables.blocks.at[group, row, target].set(ids, mode="drop"),
            num_blocks=num_blocks.at[each, rows[None]].add(need, mode="drop"),
            num_tokens=tables.num_tokens.at[rows].max(num_tokens, mode="drop"),
        )
    )


def share(
    cache: PagedCache,
    rows: Int[Array, "k"],
    blocks: Int[Array, "G M"],
    num_blocks: Int[Array, "..."],
    num_tokens: Int[Array, ""],
    times: Int[Array, ""],
) -> PagedCache:
    """Let the first `times` of the rows, which are empty, hold `blocks`, whoever else does. No page is copied."""
    tables = cache.tables
    target = jnp.where(jnp.arange(rows.shape[0]) < times, rows, tables.num_rows)
    add = block_pool.refer if cache.directory is None else block_pool.touch  # only a hit can be of a free block
    return cache.replace(
        pool=add(cache.pool, blocks.ravel(), times),
        tables=BlockTables(
            blocks=tables.blocks.at[:, target].set(blocks[:, None], mode="drop"),
            num_blocks=tables.num_blocks.at[:, target].set(num_blocks, mode="drop"),
            num_tokens=tables.num_tokens.at[target].set(num_tokens, mode="drop"),
        ),
    )


def exchange_rows(
    cache: PagedCache, rows: Int[Array, "w"], parent: Int[Array, "w"], live: Bool[Array, "w"]
) -> PagedCache:
    """Row i becomes what row `parent[i]` of them was, where `live`, else empty: by reference counts, no page is copied.

    Rows out of range are padding. What no row holds any more is released, row after row.
    """
    tables, at = cache.tables, jnp.minimum(rows, cache.tables.num_rows - 1)
    inside, live = rows < tables.num_rows, live & (rows < tables.num_rows)
    old, blocks = read_before_write(tables.blocks, (slice(None), at))
    old = jnp.where(inside[:, None], old, 0)
    new = jnp.where(live[:, None], old[:, parent], 0)
    pool = block_pool.refer(cache.pool, new)
    by_row = jnp.moveaxis(old, 1, 0).reshape(rows.shape[0], -1)
    pool, _ = block_pool.release(pool, by_row, _is_registered(cache, by_row))
    counts, tokens = jnp.where(live, tables.num_blocks[:, at[parent]], 0), tables.num_tokens[at[parent]]
    tables = BlockTables(
        blocks=blocks.at[:, rows].set(new, mode="drop"),
        num_blocks=tables.num_blocks.at[:, rows].set(counts, mode="drop"),
        num_tokens=tables.num_tokens.at[rows].set(jnp.where(live, tokens, 0), mode="drop"),
    )
    directory = cache.directory
    if directory is not None:
        known = (x[at[parent]] for x in (directory.num_registered, directory.last_id, directory.prefix_hash))
        directory = prefix_directory.start_rows(directory, rows, *known)
    return cache.replace(pool=pool, tables=tables, directory=directory)


def _written_column(config: CacheConfig, first_written: Int[Array, "k"]) -> Int[Array, "k"]:
    return jnp.minimum(first_written // config.block_size, config.max_blocks_per_row - 1)


def shared_writes(
    config: CacheConfig, cache: PagedCache, rows: Int[Array, "k"], first_written: Int[Array, "k"], writes
) -> tuple[Bool[Array, "G k"], Int[Array, "G k"]]:
    """Which rows are about to write into a block that others hold too, and into which.

    Only the block of the first position that a row writes can be shared: what comes behind it is the row's own.
    """
    blocks = cache.tables.blocks[:, rows, _written_column(config, first_written)]
    return writes & (blocks != 0) & (cache.pool.ref_count[blocks] > 1), blocks


def copies_needed(
    config: CacheConfig, cache: PagedCache, rows: Int[Array, "k"], first_written: Int[Array, "k"], writes
) -> Bool[Array, "G k"]:
    """Which rows get a copy of the block that they write into: of k writers of a block with r references, all if r > k, all but
    the last if r = k."""
    shared, blocks = shared_writes(config, cache, rows, first_written, writes)
    same = shared[:, :, None] & shared[:, None] & (blocks[:, :, None] == blocks[:, None])
    writers = jnp.sum(same, axis=2, dtype=jnp.int32)
    is_last = ~jnp.any(jnp.triu(same, 1), axis=2)
    return shared & ~(is_last & (cache.pool.ref_count[blocks] == writers))


def copy_on_write(
    config: CacheConfig, cache: PagedCache, rows: Int[Array, "k"], first_written: Int[Array, "k"], copies
) -> tuple[PagedCache, BlockCopies]:
    """Give each row that `copies` names a block of its own in place of a shared one, row by row, within a row by group.

    The caller has made sure that the blocks stand ready at the queue's head. The pages are still to be copied.
    """
    groups, most = copies.shape[0], copies.size
    chosen = copies.T.ravel()
    entry = jnp.arange(most, dtype=jnp.int32)
    row, group = rows[entry // groups], entry % groups
    column = _written_column(config, first_written)[entry // groups]
    rank, count = jnp.cumsum(chosen, dtype=jnp.int32) - 1, jnp.sum(chosen, dtype=jnp.int32)
    cache, ids = take_ready(cache, count, most)
    old, blocks = read_before_write(cache.tables.blocks, (group, row, column))
    new = ids[jnp.maximum(rank, 0)]
    place = jnp.where(chosen, rank, most)
    pool = cache.pool
    cache = cache.replace(
        pool=pool.replace(ref_count=pool.ref_count.at[jnp.where(chosen, old, pool.num_blocks)].add(-1, mode="drop")),
        tables=cache.tables.replace(
            blocks=blocks.at[group, jnp.where(chosen, row, cache.tables.num_rows), column].set(new, mode="drop")
        ),
    )
    source, target = (jnp.full(most, pool.num_blocks).at[place].set(x, mode="drop") for x in (old, new))
    return cache, BlockCopies(source, target, count)


def release_rows(cache: PagedCache, rows: Int[Array, "k"], count: Int[Array, ""]) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release all blocks of the first `count` rows named, a few rows at a time."""

    def release_some(i, carry):
        cache, ok = carry
        tables = cache.tables
        offsets = i * RELEASE_ROWS + jnp.arange(RELEASE_ROWS, dtype=jnp.int32)
        some = jnp.where(offsets < count, rows[jnp.minimum(offsets, rows.shape[0] - 1)], tables.num_rows)
        held = jnp.where(some < tables.num_rows, tables.num_blocks[:, some], 0)
        cache, released = release_columns(cache, some, held)
        tables = cache.tables
        tables = tables.replace(
            num_blocks=tables.num_blocks.at[:, some].set(0, mode="drop"),
            num_tokens=tables.num_tokens.at[some].set(0, mode="drop"),
        )
        return cache.replace(tables=tables), ok & released

    # Counted by ones: on jax 0.11.2 a loop by RELEASE_ROWS to a constant count below that was compiled to no trip at all.
    start = (cache, jnp.ones_like(count, bool))
    return jax.lax.fori_loop(0, ceil_div(count, RELEASE_ROWS), release_some, start)


def release_columns(
    cache: PagedCache, rows: Int[Array, "k"], num_blocks: Int[Array, "G k"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release the first `num_blocks` entries of each row's tables, from the last group's last entry on, and leave nulls there."""
    groups, k = num_blocks.shape
    tables = cache.tables
    column = jnp.arange(tables.blocks.shape[2], dtype=jnp.int32)
    blocks, table = read_before_write(tables.blocks, (slice(None), rows))
    inside = column < num_blocks[..., None]
    by_row = jnp.moveaxis(jnp.where(inside, blocks, 0), 1, 0).reshape(k, -1)
    pool, ok = block_pool.release(cache.pool, by_row, _is_registered(cache, by_row))
    each = jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    target = jnp.where(inside & ok, column, column.shape[0])
    tables = tables.replace(blocks=table.at[each, rows[None, :, None], target].set(0, mode="drop"))
    return cache.replace(pool=pool, tables=tables), ok


def _is_registered(cache: PagedCache, blocks: Int[Array, "rows columns"]) -> Bool[Array, "rows columns"]:
    """Whether a block has content worth keeping: then it goes to the tail of the free queue."""
    if cache.directory is None:
        return jnp.zeros_like(blocks, bool)
    return cache.directory.content_id[blocks] != prefix_directory.NO_ID


def release_below_window(
    config: CacheConfig,
    cache: PagedCache,
    rows: Int[Array, "k"],
    before: Int[Array, "k"],
    after: Int[Array, "k"],
    max_tokens: int,
) -> PagedCache:
    """Release, in the sliding-window groups, the whole blocks that fell below the window as `before` computed tokens became
    `after`, which are `max_tokens` more at most in all rows together: those of all rows as one long table, from its end."""
    sliding = [(g, window) for g, window in enumerate(config.windows) if window is not None]
    if not sliding:
        return cache
    tables = cache.tables
    low, high = (
        jnp.stack([first_live_block(tokens, window, config.block_size) for _, window in sliding], axis=1)
        for tokens in (before, after)
    )
    most = len(sliding) * blocks_begun(max_tokens, rows.shape[0], config.block_size)
    owner, rank, given = spread((high - low).ravel(), most)
    group = jnp.asarray([g for g, _ in sliding], jnp.int32)[owner % len(sliding)]
    row, column = rows[owner // len(sliding)], low.ravel()[owner] + rank
    at = (group, row, jnp.where(given, column, tables.blocks.shape[2]))
    blocks, table = read_before_write(tables.blocks, at)
    blocks = jnp.where(given, blocks, 0)[None]
    pool, _ = block_pool.release(cache.pool, blocks, _is_registered(cache, blocks))
    return cache.replace(pool=pool, tables=tables.replace(blocks=table.at[at].set(0, mode="drop")))


def blocks_begun(num_tokens: int, num_rows: int, block_size: int) -> int:
    """Most blocks that `num_tokens` tokens in a row begin or complete, when they are divided among `num_rows` rows."""
    return min(num_tokens, num_tokens // block_size + num_rows)


def admission_blocks(config: CacheConfig, num_tokens: Int[Array, ""], max_chunk: int) -> Int[Array, ""]:
    """Blocks that must be free before a sequence of `num_tokens` is admitted: all of it, whole, in full-attention groups; what a
    window and one chunk of `max_chunk` tokens can hold at once in sliding-window groups."""
    whole = ceil_div(num_tokens, config.block_size)
    return sum(
        (
            whole if window is None else jnp.minimum(whole, config.window_blocks(window, max_chunk))
            for window in config.windows
        ),
        start=jnp.zeros_like(num_tokens),
    )
