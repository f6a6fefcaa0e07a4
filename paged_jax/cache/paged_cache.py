"""The paged KV cache as one value: the one place where pool, tables and directory change together.

    grow                    append new blocks to rows
    share                   let empty rows hold blocks that are there already
    replace_blocks          put a new block in place of one table entry
    exchange_rows           let rows become other rows, by reference counts
    release_rows            give back everything that rows hold
    release_passed_blocks   give back what fell below a window

Functions take a cache and return a new one. None of them touches a page.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import ceil_div, ragged_indices, read_before_write
from paged_jax.cache import block_pool, prefix_directory
from paged_jax.cache.block_pool import BlockPool
from paged_jax.cache.block_table import BlockTables, init_tables
from paged_jax.cache.pages import KVCache, init_pages
from paged_jax.cache.prefix_directory import PrefixDirectory, init_directory
from paged_jax.checks import show
from paged_jax.config import CacheConfig
from paged_jax.errors import ConfigError
from paged_jax.kv_group import first_live_blocks, releasing_groups

RELEASE_ROWS = 4  # rows released in one pass; few, because a pass costs this times the table width


class PagedCache(struct.PyTreeNode):
    """A paged KV cache: bookkeeping and storage, one value. Of `directory` None nothing is kept."""

    pool: BlockPool
    tables: BlockTables
    directory: PrefixDirectory | None
    kv: KVCache
    config: CacheConfig = struct.field(pytree_node=False)

    @property
    def books(self) -> "PagedCache":
        """The same without its pages: for parts of a step that move blocks, not their contents."""
        return self.replace(kv=KVCache((), ()))


def init_cache(config: CacheConfig) -> PagedCache:
    """Return an empty cache of those sizes. Raises ConfigError for what is no CacheConfig."""
    if not isinstance(config, CacheConfig):
        raise ConfigError(f"config={show(config)}: a CacheConfig is needed")
    return PagedCache(
        pool=block_pool.init_pool(config.num_blocks),
        tables=init_tables(config.num_groups, config.num_rows, config.max_blocks_per_row),
        directory=init_directory(config) if config.enable_prefix_caching else None,
        kv=init_pages(config),
        config=config,
    )


def with_empty_rows(cache: PagedCache, config: CacheConfig) -> PagedCache:
    """Return the same pool and pages with empty tables of other sizes, and without a directory.

    Blocks that rows of `cache` hold stay in use: its own tables keep them.
    """
    tables = init_tables(config.num_groups, config.num_rows, config.max_blocks_per_row)
    return cache.replace(tables=tables, directory=None, config=config)


def with_rows_of(cache: PagedCache, before: PagedCache) -> PagedCache:
    """Invert `with_empty_rows`: the pool and pages of `cache` with the rows that `before` has.

    What the directory of `before` knew may have been overwritten, so it is emptied.
    """
    directory = None if before.directory is None else prefix_directory.reset(before.directory)
    return before.replace(pool=cache.pool, kv=cache.kv, directory=directory)


# ---------------------------------------------------------------- take blocks from the queue


def is_head_live(cache: PagedCache, count: Int[Array, ""], max_count: int) -> Bool[Array, ""]:
    """Return whether `take_blocks` may take `count` blocks.

    Without a directory it always may: only prefix hits leave gaps in the queue.
    """
    if cache.directory is None:
        return jnp.ones_like(count, bool)
    return block_pool.is_head_live(cache.pool, count, max_count)


def compact_head(cache: PagedCache, count: Int[Array, ""], max_count: int) -> PagedCache:
    """Move `count` free blocks together at the queue's head, if there are as many."""
    if cache.directory is None:
        return cache
    return cache.replace(pool=block_pool.compact_head(cache.pool, count, max_count))


def take_blocks(
    cache: PagedCache, count: Int[Array, ""], max_count: int
) -> tuple[PagedCache, Int[Array, "max_count"]]:
    """Take `count` blocks from the queue's live head, 0 behind them, and evict their contents."""
    pool, blocks, _ = block_pool.pop_head(cache.pool, count, max_count)
    directory = cache.directory
    if directory is not None:
        directory = prefix_directory.evict(directory, blocks)
    return cache.replace(pool=pool, directory=directory), blocks


# ---------------------------------------------------------------- change pool and tables together


def grow(
    cache: PagedCache,
    rows: Int[Array, "k"],
    need: Int[Array, "G k"],
    num_tokens: Int[Array, "k"],
    max_count: int,
) -> PagedCache:
    """Append `need` new blocks to each row's tables: row by row, within a row group by group.

    The caller has made sure that the blocks, `max_count` at most in all, are free and that the
    queue's head is live. A row out of range is padding and needs none. `num_tokens` is what the
    rows then have slots for.

        queue 4 5 6 7, rows 2 0, need [[1, 2]] -> row 2 gets 4, row 0 gets 5 6
    """
    num_groups = need.shape[0]
    cache, ids = take_blocks(cache, jnp.sum(need, dtype=jnp.int32), max_count)
    tables = cache.tables
    owner, rank, is_valid = ragged_indices(need.T.ravel(), max_count)
    place, group = owner // num_groups, owner % num_groups
    row = rows[place]
    have, num_blocks = read_before_write(tables.num_blocks, (group, row))
    column = jnp.where(is_valid, have + rank, tables.blocks.shape[2])
    groups = jnp.arange(num_groups, dtype=jnp.int32)[:, None]
    return cache.replace(
        tables=BlockTables(
            blocks=tables.blocks.at[group, row, column].set(ids, mode="drop"),
            num_blocks=num_blocks.at[groups, rows[None]].add(need, mode="drop"),
            num_tokens=tables.num_tokens.at[rows].max(num_tokens, mode="drop"),
        )
    )


def share(
    cache: PagedCache,
    rows: Int[Array, "k"],
    blocks: Int[Array, "G M"],
    num_blocks: Int[Array, "*broadcast"],
    num_tokens: Int[Array, ""],
    num_sharers: Int[Array, ""],
) -> PagedCache:
    """Let the first `num_sharers` of the rows, all empty, hold `blocks`. No page is copied."""
    tables = cache.tables
    is_sharer = jnp.arange(rows.shape[0], dtype=jnp.int32) < num_sharers
    target = jnp.where(is_sharer, rows, tables.num_rows)
    # Only a prefix hit can be of a free block.
    add = block_pool.add_references if cache.directory is None else block_pool.touch
    return cache.replace(
        pool=add(cache.pool, blocks.ravel(), num_sharers),
        tables=BlockTables(
            blocks=tables.blocks.at[:, target].set(blocks[:, None], mode="drop"),
            num_blocks=tables.num_blocks.at[:, target].set(num_blocks, mode="drop"),
            num_tokens=tables.num_tokens.at[target].set(num_tokens, mode="drop"),
        ),
    )


def replace_blocks(
    cache: PagedCache,
    rows: Int[Array, "k"],
    columns: Int[Array, "k"],
    is_chosen: Bool[Array, "G k"],
) -> tuple[PagedCache, Int[Array, "G*k"], Int[Array, "G*k"], Int[Array, ""]]:
    """Put a new block in place of the entry of each chosen group and row, which others hold too.

    Row by row, within a row group by group. The queue's head must be live. Returns the blocks that
    were replaced and the new ones, N behind them, and their number.
    """
    num_groups, max_count = is_chosen.shape[0], is_chosen.size
    chosen = is_chosen.T.ravel()
    entry = jnp.arange(max_count, dtype=jnp.int32)
    row, group = rows[entry // num_groups], entry % num_groups
    column = columns[entry // num_groups]
    rank = jnp.cumsum(chosen, dtype=jnp.int32) - 1
    count = jnp.sum(chosen, dtype=jnp.int32)
    cache, ids = take_blocks(cache, count, max_count)
    old, blocks = read_before_write(cache.tables.blocks, (group, row, column))
    new = ids[jnp.maximum(rank, 0)]
    pool, past = cache.pool, cache.pool.num_blocks
    target = jnp.where(chosen, row, cache.tables.num_rows)
    cache = cache.replace(
        pool=block_pool.drop_shared_references(pool, jnp.where(chosen, old, 0)),
        tables=cache.tables.replace(blocks=blocks.at[group, target, column].set(new, mode="drop")),
    )
    place = jnp.where(chosen, rank, max_count)
    old, new = (
        jnp.full(max_count, past, jnp.int32).at[place].set(x, mode="drop") for x in (old, new)
    )
    return cache, old, new, count


def exchange_rows(
    cache: PagedCache,
    rows: Int[Array, "w"],
    parent: Int[Array, "w"],
    is_live: Bool[Array, "w"],
) -> PagedCache:
    """Let row i become what row `parent[i]` of them was, where it is live, else empty.

    This happens by reference counts: no page is copied. Rows out of range are padding. Blocks that
    no row holds any more are released, row after row.

        rows 4 5 with blocks [1, 2] and [1, 3], parent 1 1 -> [1, 3] and [1, 3], block 2 is free
    """
    tables, at = cache.tables, jnp.minimum(rows, cache.tables.num_rows - 1)
    is_inside = rows < tables.num_rows
    is_live = is_live & is_inside
    old, blocks = read_before_write(tables.blocks, (slice(None), at))
    old = jnp.where(is_inside[:, None], old, 0)
    new = jnp.where(is_live[:, None], old[:, parent], 0)
    pool = block_pool.add_references(cache.pool, new)
    by_row = jnp.moveaxis(old, 1, 0).reshape(rows.shape[0], -1)
    pool, _ = block_pool.release(pool, by_row, _is_kept(cache, by_row))
    counts = jnp.where(is_live, tables.num_blocks[:, at[parent]], 0)
    tokens = jnp.where(is_live, tables.num_tokens[at[parent]], 0)
    tables = BlockTables(
        blocks=blocks.at[:, rows].set(new, mode="drop"),
        num_blocks=tables.num_blocks.at[:, rows].set(counts, mode="drop"),
        num_tokens=tables.num_tokens.at[rows].set(tokens, mode="drop"),
    )
    directory = cache.directory
    if directory is not None:
        known = (directory.num_registered, directory.last_id, directory.prefix_hash)
        directory = prefix_directory.start_rows(directory, rows, *(x[at[parent]] for x in known))
    return cache.replace(pool=pool, tables=tables, directory=directory)


# ---------------------------------------------------------------- give back


def release_rows(
    cache: PagedCache, rows: Int[Array, "k"], count: Int[Array, ""]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release all blocks of the first `count` rows, a few rows at a time."""

    def release_some(i, carry):
        cache, ok = carry
        tables = cache.tables
        offsets = i * RELEASE_ROWS + jnp.arange(RELEASE_ROWS, dtype=jnp.int32)
        some = rows[jnp.minimum(offsets, rows.shape[0] - 1)]
        some = jnp.where(offsets < count, some, tables.num_rows)
        num_held = jnp.where(some < tables.num_rows, tables.num_blocks[:, some], 0)
        cache, is_released = _release_columns(cache, some, num_held)
        tables = cache.tables
        tables = tables.replace(
            num_blocks=tables.num_blocks.at[:, some].set(0, mode="drop"),
            num_tokens=tables.num_tokens.at[some].set(0, mode="drop"),
        )
        return cache.replace(tables=tables), ok & is_released

    # Counted by ones: on jax 0.11.2 a loop by RELEASE_ROWS to a constant count below that was
    # compiled to no trip at all.
    start = (cache, jnp.ones_like(cache.pool.head, bool))
    return jax.lax.fori_loop(0, ceil_div(count, RELEASE_ROWS), release_some, start)


def release_passed_blocks(
    cache: PagedCache,
    rows: Int[Array, "k"],
    before: Int[Array, "k"],
    after: Int[Array, "k"],
    max_tokens: int,
) -> PagedCache:
    """Release the blocks that no query reads any more as `before` computed tokens became `after`.

    All rows together compute `max_tokens` at most. The blocks are released as one long table, from
    its end.

        block_size 2, window 4, tokens 5 -> 7: table 0 2 3 4 -> 0 0 3 4, block 2 is free
    """
    config, tables = cache.config, cache.tables
    releasing = releasing_groups(config.groups)
    if not releasing:
        return cache
    groups, num = tuple(config.groups[g] for g in releasing), len(releasing)
    low, high = (first_live_blocks(groups, x, config.block_size).T for x in (before, after))
    sizes = (max_tokens, rows.shape[0], config.block_size)
    max_count = sum(group.max_passed_blocks(*sizes) for group in groups)
    owner, rank, is_valid = ragged_indices((high - low).ravel(), max_count)
    group = jnp.asarray(releasing, jnp.int32)[owner % num]
    row, column = rows[owner // num], low.ravel()[owner] + rank
    at = (group, row, jnp.where(is_valid, column, tables.blocks.shape[2]))
    blocks, table = read_before_write(tables.blocks, at)
    blocks = jnp.where(is_valid, blocks, 0)[None]
    pool, _ = block_pool.release(cache.pool, blocks, _is_kept(cache, blocks))
    tables = tables.replace(blocks=table.at[at].set(0, mode="drop"))
    return cache.replace(pool=pool, tables=tables)


def _release_columns(
    cache: PagedCache, rows: Int[Array, "k"], num_blocks: Int[Array, "G k"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release the first `num_blocks` entries of each row's tables and leave nulls there.

    The order is from the last group's last entry on.
    """
    num_groups, k = num_blocks.shape
    tables = cache.tables
    column = jnp.arange(tables.blocks.shape[2], dtype=jnp.int32)
    blocks, table = read_before_write(tables.blocks, (slice(None), rows))
    is_inside = column[None, None] < num_blocks[..., None]
    by_row = jnp.moveaxis(jnp.where(is_inside, blocks, 0), 1, 0).reshape(k, -1)
    pool, ok = block_pool.release(cache.pool, by_row, _is_kept(cache, by_row))
    groups = jnp.arange(num_groups, dtype=jnp.int32)[:, None, None]
    target = jnp.where(is_inside & ok, column, column.shape[0])
    table = table.at[groups, rows[None, :, None], target].set(0, mode="drop")
    return cache.replace(pool=pool, tables=tables.replace(blocks=table)), ok


def _is_kept(cache: PagedCache, blocks: Int[Array, "rows columns"]) -> Bool[Array, "rows columns"]:
    """Return whether a released block goes to the tail of the queue: its content may be hit."""
    if cache.directory is None:
        return jnp.zeros_like(blocks, bool)
    return prefix_directory.is_registered(cache.directory, blocks)
