"""The one place where pool and tables change together: allocate, fork, release.

Public functions take a config, a cache and rows, and return a new cache and an `ok` flag; when not ok the cache is the old one.
They are jitted, can be called inside a `jit`, and expect distinct rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from paged_jax import block_pool
from paged_jax.arrays import ceil_div, read_before_write, spread
from paged_jax.block_pool import BlockPool
from paged_jax.block_table import BlockTables, first_live_block, init_tables, missing_blocks
from paged_jax.config import CacheConfig
from paged_jax.errors import ConfigError
from paged_jax.kv_cache import KVCache, init_pages

RELEASE_ROWS = 4  # rows released in one vectorised pass; few, because a pass costs RELEASE_ROWS x table width


class PagedCache(struct.PyTreeNode):
    """A paged KV cache: bookkeeping and storage, one value."""

    pool: BlockPool
    tables: BlockTables
    kv: KVCache


def init_cache(config: CacheConfig) -> PagedCache:
    """An empty cache."""
    return PagedCache(
        pool=block_pool.init_pool(config.num_blocks),
        tables=init_tables(config.num_groups, config.max_rows, config.max_blocks_per_row),
        kv=init_pages(
            config.num_layers,
            config.num_blocks,
            config.block_size,
            config.num_kv_heads,
            config.head_dim,
            config.dtype,
        ),
    )


# ---------------------------------------------------------------- the functional core, public


def allocate_slots(
    config: CacheConfig,
    cache: PagedCache,
    rows: Int[Array, "k"] | int,
    num_new_tokens: Int[Array, "k"] | int,
    *,
    reserved_blocks: Int[Array, ""] | int = 0,
    must_fit_tokens: Int[Array, "k"] | int = 0,
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Give each row slots for `num_new_tokens` more tokens: blocks on demand, all rows or none.

    Blocks are handed out row by row in the order given. `reserved_blocks` must stay free, and each row's `must_fit_tokens`
    would have to fit too, though only the new tokens are allocated (vLLM's full_sequence_must_fit).
    Not ok when the free blocks or the tables' width do not suffice. Raises ConfigError for a count below 1 or a row outside
    the table, where they are concrete.
    """
    rows, new = _concrete_rows(config, rows), jnp.atleast_1d(jnp.asarray(num_new_tokens, jnp.int32))
    if not isinstance(new, Tracer) and np.any(np.asarray(new) < 1):
        raise ConfigError(f"num_new_tokens={np.asarray(new).tolist()}: each row must ask for at least 1")
    if new.shape not in ((1,), rows.shape):
        raise ConfigError(
            f"num_new_tokens: shape {new.shape} for {rows.shape[0]} rows; one count, or one a row, is needed"
        )
    return _allocate(config, cache, rows, new, jnp.asarray(reserved_blocks), jnp.asarray(must_fit_tokens))


def fork(config: CacheConfig, cache: PagedCache, parent, children) -> tuple[PagedCache, Bool[Array, ""]]:
    """Let each child row share every block of `parent`, the partly filled last one too. No page is copied.

    Not ok when a child row is in use. Raises ConfigError for a row outside the table, where they are concrete.
    """
    return _fork(cache, _concrete_rows(config, parent)[0], _concrete_rows(config, children))


def free(config: CacheConfig, cache: PagedCache, rows) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release the blocks of each row, the first row first, each from its last block to its first. An empty row is passed over.

    Not ok, and nothing released, when a block has fewer references than that. Raises ConfigError for a row outside the
    table, where they are concrete.
    """
    return _free(cache, _concrete_rows(config, rows))


def _concrete_rows(config: CacheConfig, rows) -> Int[Array, "k"]:
    rows = jnp.atleast_1d(jnp.asarray(rows, jnp.int32))
    if not isinstance(rows, Tracer):
        listed = np.asarray(rows).tolist()
        if any(not 0 <= row < config.max_rows for row in listed):
            raise ConfigError(f"rows={listed}: each must be from 0 to {config.max_rows - 1}")
        if len(set(listed)) < len(listed):
            raise ConfigError(f"rows={listed}: each row may be named once")
    return rows


@partial(jax.jit, static_argnums=0)
def _allocate(config: CacheConfig, cache: PagedCache, rows, new, reserved_blocks, must_fit):
    tables, width = cache.tables, config.max_blocks_per_row
    target = tables.num_tokens[rows] + new
    need = missing_blocks(tables, rows, target, config.block_size)
    whole = missing_blocks(tables, rows, jnp.maximum(target, must_fit), config.block_size)
    ok = (
        (jnp.sum(whole) <= cache.pool.num_free - reserved_blocks)
        & jnp.all(new <= width * config.block_size - tables.num_tokens[rows])
        & _are_rows(tables, rows)
    )
    need = jnp.where(ok, need, 0)
    most = min(need.size * width, config.num_blocks)
    pool = block_pool.make_ready(cache.pool, jnp.sum(need), most)
    pool, tables = grow(pool, tables, rows, need, jnp.where(ok, target, tables.num_tokens[rows]), most)
    return cache.replace(pool=pool, tables=tables), ok


@jax.jit
def _fork(cache: PagedCache, parent, children):
    tables = cache.tables
    ok = jnp.all(tables.num_tokens[children] == 0) & jnp.all(tables.num_blocks[:, children] == 0)
    ok = ok & jnp.all(children != parent) & _are_rows(tables, children) & _are_rows(tables, parent)
    shared, blocks = read_before_write(tables.blocks, (slice(None), parent))
    target = jnp.where(ok, children, tables.num_rows)
    times = jnp.where(ok, jnp.int32(children.shape[0]), 0)
    tables = BlockTables(
        blocks=blocks.at[:, target].set(shared[:, None], mode="drop"),
        num_blocks=tables.num_blocks.at[:, target].set(tables.num_blocks[:, parent][:, None], mode="drop"),
        num_tokens=tables.num_tokens.at[target].set(tables.num_tokens[parent], mode="drop"),
    )
    return cache.replace(pool=block_pool.touch(cache.pool, shared.ravel(), times), tables=tables), ok


def _are_rows(tables: BlockTables, rows) -> Bool[Array, ""]:
    return jnp.all((rows >= 0) & (rows < tables.num_rows))


@jax.jit
def _free(cache: PagedCache, rows):
    repeated = jnp.any(jnp.tril(rows[:, None] == rows[None], -1), axis=1)
    rows = jnp.where(repeated, cache.tables.num_rows, rows)
    pool, tables, ok = release_rows(cache.pool, cache.tables, rows, jnp.int32(rows.shape[0]))
    old = (cache.pool, cache.tables)
    pool, tables = jax.tree.map(lambda new, old: jnp.where(ok, new, old), (pool, tables), old)
    return cache.replace(pool=pool, tables=tables), ok


# ---------------------------------------------------------------- what the step calls


def grow(
    pool: BlockPool,
    tables: BlockTables,
    rows: Int[Array, "k"],
    need: Int[Array, "G k"],
    num_tokens: Int[Array, "k"],
    most: int,
) -> tuple[BlockPool, BlockTables]:
    """Append `need` blocks to each row's tables, row by row and within a row group by group.

    The caller has made sure that the blocks, `most` at most in all, are free and stand ready at the queue's head. A row out
    of range is padding and needs none. `num_tokens` becomes what the rows have slots for.
    """
    groups = need.shape[0]
    pool, ids, _ = block_pool.pop_ready(pool, jnp.sum(need), most)
    owner, rank, given = spread(need.T.ravel(), most)
    place, group = owner // groups, owner % groups
    row = rows[place]
    have, num_blocks = read_before_write(tables.num_blocks, (group, row))
    target = jnp.where(given, have + rank, tables.blocks.shape[2])
    each = jnp.arange(groups, dtype=jnp.int32)[:, None]
    return pool, BlockTables(
        blocks=tables.blocks.at[group, row, target].set(ids, mode="drop"),
        num_blocks=num_blocks.at[each, rows[None]].add(need, mode="drop"),
        num_tokens=tables.num_tokens.at[rows].max(num_tokens, mode="drop"),
    )


def release_rows(
    pool: BlockPool, tables: BlockTables, rows: Int[Array, "k"], count: Int[Array, ""]
) -> tuple[BlockPool, BlockTables, Bool[Array, ""]]:
    """Release all blocks of the first `count` rows named, a few rows at a time."""

    def release_some(i, carry):
        pool, tables, ok = carry
        offsets = i * RELEASE_ROWS + jnp.arange(RELEASE_ROWS, dtype=jnp.int32)
        some = jnp.where(offsets < count, rows[jnp.minimum(offsets, rows.shape[0] - 1)], tables.num_rows)
        held = jnp.where(some < tables.num_rows, tables.num_blocks[:, some], 0)
        pool, tables, released = release_columns(pool, tables, some, held)
        tables = tables.replace(
            num_blocks=tables.num_blocks.at[:, some].set(0, mode="drop"),
            num_tokens=tables.num_tokens.at[some].set(0, mode="drop"),
        )
        return pool, tables, ok & released

    # Counted by ones: on jax 0.11.2 a loop by RELEASE_ROWS to a constant count below that was compiled to no trip at all.
    start = (pool, tables, jnp.ones_like(count, bool))
    return jax.lax.fori_loop(0, ceil_div(count, RELEASE_ROWS), release_some, start)


def release_columns(
    pool: BlockPool, tables: BlockTables, rows: Int[Array, "k"], num_blocks: Int[Array, "G k"]
) -> tuple[BlockPool, BlockTables, Bool[Array, ""]]:
    """Release the first `num_blocks` entries of each row's tables, from the last group's last entry on, and leave nulls there."""
    groups, k = num_blocks.shape
    column = jnp.arange(tables.blocks.shape[2], dtype=jnp.int32)
    blocks, table = read_before_write(tables.blocks, (slice(None), rows))
    inside = column < num_blocks[..., None]
    by_row = jnp.moveaxis(jnp.where(inside, blocks, 0), 1, 0).reshape(k, -1)
    pool, ok = block_pool.release(pool, by_row, jnp.zeros_like(by_row, bool))
    each = jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    target = jnp.where(inside & ok, column, column.shape[0])
    return pool, tables.replace(blocks=table.at[each, rows[None, :, None], target].set(0, mode="drop")), ok


def release_below_window(
    config: CacheConfig,
    pool: BlockPool,
    tables: BlockTables,
    rows: Int[Array, "k"],
    before: Int[Array, "k"],
    after: Int[Array, "k"],
    max_tokens: int,
) -> tuple[BlockPool, BlockTables]:
    """Release, in the sliding-window groups, the whole blocks that fell below the window as `before` computed tokens became
    `after`, which are `max_tokens` more at most in all rows together."""
    sliding = [(g, window) for g, window in enumerate(config.windows) if window is not None]
    if not sliding:
        return pool, tables
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
    # Block by block in table order: what is released later stands in front of it, as when whole rows are.
    blocks = jnp.where(given, blocks, 0)[:, None]
    pool, _ = block_pool.release(pool, blocks, jnp.zeros_like(blocks, bool))
    return pool, tables.replace(blocks=table.at[at].set(0, mode="drop"))


def blocks_begun(num_tokens: int, num_rows: int, block_size: int) -> int:
    """Most blocks that `num_tokens` tokens in a row begin or complete, when they are divided among `num_rows` rows."""
    return min(num_tokens, num_tokens // block_size + num_rows)


def admission_blocks(config: CacheConfig, num_tokens: Int[Array, ""], max_chunk: int) -> Int[Array, ""]:
    """Blocks that must be free before a sequence of `num_tokens` is admitted: all of it, whole, in full-attention groups; what a
    window and one chunk of `max_chunk` tokens can hold at once in sliding-window groups."""
    whole = ceil_div(num_tokens, config.block_size)
    return sum(
        (
            whole if window is None else jnp.minimum(whole, ceil_div(window - 1 + max_chunk, config.block_size) + 1)
            for window in config.windows
        ),
        start=jnp.zeros_like(num_tokens),
    )
