"""The cache by hand: `allocate_slots`, `fork` and `free` on rows of a `PagedCache`.

They take a config, a cache and rows, and return a new cache and an `ok` flag; when not ok the cache is the old one. They are
jitted, can be called inside a `jit`, and expect distinct rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import read_before_write
from paged_jax.block_table import BlockTables, missing_blocks
from paged_jax.cache_manager import PagedCache, copies_needed, copy_on_write, grow, make_ready, release_rows, share
from paged_jax.config import CacheConfig
from paged_jax.errors import ConfigError
from paged_jax.kv_cache import copy_pages


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

    Blocks are handed out row by row in the order given. A row whose last block is partly filled and shared first gets a copy of
    its own, pages included, counted among the blocks that must fit. `reserved_blocks` must stay free, and each row's
    `must_fit_tokens` would have to fit too, though only the new tokens are allocated (vLLM's full_sequence_must_fit).
    Not ok when the free blocks or the tables' width do not suffice. Raises ConfigError for a count below 1 or a row outside
    the table, where they are concrete.
    """
    _check_fits(config, cache)
    rows, new = _concrete_rows(config, rows), _counts("num_new_tokens", num_new_tokens, 1)
    reserved, must_fit = _counts("reserved_blocks", reserved_blocks, 0), _counts("must_fit_tokens", must_fit_tokens, 0)
    if reserved.shape != (1,) or must_fit.shape not in ((1,), rows.shape):
        raise ConfigError(
            f"reserved_blocks, must_fit_tokens: shapes {reserved.shape} and {must_fit.shape} for {rows.shape[0]} rows; one count, "
            "and one, or one a row, are needed"
        )
    if new.shape not in ((1,), rows.shape):
        raise ConfigError(
            f"num_new_tokens: shape {new.shape} for {rows.shape[0]} rows; one count, or one a row, is needed"
        )
    return _allocate(config, cache, rows, new, reserved[0], must_fit)


def fork(config: CacheConfig, cache: PagedCache, parent, children) -> tuple[PagedCache, Bool[Array, ""]]:
    """Let each child row share every block of `parent`, the partly filled last one too. No page is copied.

    Not ok when a child row is in use. Raises ConfigError for a row outside the table, where they are concrete.
    """
    _check_fits(config, cache)
    parents = _concrete_rows(config, parent)
    if parents.shape != (1,):
        raise ConfigError(f"parent={parent!r:.80}: one row is needed, got {parents.shape[0]}")
    return _fork(cache, parents[0], _concrete_rows(config, children))


def free(config: CacheConfig, cache: PagedCache, rows) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release the blocks of each row, the first row first, each from its last block to its first. An empty row is passed over.

    Not ok, and nothing released, when a block has fewer references than that. Raises ConfigError for a row outside the
    table, where they are concrete.
    """
    _check_fits(config, cache)
    return _free(cache, _concrete_rows(config, rows))


def _concrete_rows(config: CacheConfig, rows) -> Int[Array, "k"]:
    rows = _integers("rows", rows)
    if not isinstance(rows, Tracer):
        listed = rows.tolist()
        if any(not 0 <= row < config.max_rows for row in listed):
            raise ConfigError(f"rows={listed}: each must be from 0 to {config.max_rows - 1}")
        if len(set(listed)) < len(listed):
            raise ConfigError(f"rows={listed}: each row may be named once")
    return jnp.asarray(rows, jnp.int32)


def _counts(name: str, values, least: int) -> Int[Array, "k"]:
    """Counts that are at least `least`, where they are concrete; what does not fit 32 bits is more than any pool has."""
    values = _integers(name, values)
    if isinstance(values, Tracer):
        return values.astype(jnp.int32)
    if np.any(values < least):
        raise ConfigError(f"{name}={values.tolist()}: must be at least {least}")
    return jnp.asarray(np.minimum(values, 2**30), jnp.int32)


def _integers(name: str, values) -> Any:
    """One dimension of integers, on the host where they are concrete."""
    if not isinstance(values, Tracer):
        values = np.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.ndim > 1 or values.size == 0:
        raise ConfigError(f"{name}={values!r:.80}: an int, or a row of ints, is needed")
    return values.reshape(-1)


def _check_fits(config: CacheConfig, cache: PagedCache) -> None:
    """Raise ConfigError where the cache was not made with these sizes."""
    has = (cache.pool.num_blocks, *cache.tables.blocks.shape)
    needs = (config.num_blocks, config.num_groups, config.max_rows, config.max_blocks_per_row)
    if has != needs or any(pages.shape[1] != config.block_size for pages in cache.kv.k_pages):
        raise ConfigError(
            f"config: is for blocks, groups, rows and table columns {needs}, the cache has {has}, or other blocks"
        )


@partial(jax.jit, static_argnums=0)
def _allocate(config: CacheConfig, cache: PagedCache, rows, new, reserved_blocks, must_fit):
    tables, width = cache.tables, config.max_blocks_per_row
    have, most = tables.num_tokens[rows], width * config.block_size
    # Clipped, so that no sum of theirs wraps.
    asked, must_fit = jnp.minimum(new, most + 1), jnp.minimum(must_fit, config.num_slots + 1)
    need = missing_blocks(tables, rows, have + asked, config.block_size)
    whole = jnp.maximum(have + asked, must_fit)
    whole = missing_blocks(tables, rows, whole, config.block_size)
    copies = copies_needed(config, cache, rows, have, jnp.ones_like(rows, bool))
    ok = (
        (jnp.sum(whole) + jnp.sum(copies) <= cache.pool.num_free - jnp.clip(reserved_blocks, 0, config.num_blocks))
        & jnp.all((new > 0) & (new <= most - have))
        & _are_rows(tables, rows)
        & ~jnp.any(_are_repeated(rows))
    )
    need, copies = jnp.where(ok, need, 0), copies & ok
    widest = min(need.size * width, config.num_blocks)
    count = jnp.sum(need) + jnp.sum(copies, dtype=jnp.int32)
    cache = make_ready(cache, count, min(widest + need.size, config.num_blocks))
    cache, pages = copy_on_write(config, cache, rows, have, copies)
    cache = grow(cache, rows, need, jnp.where(ok, have + new, have), widest)
    return cache.replace(kv=copy_pages(cache.kv, pages)), ok


@jax.jit
def _fork(cache: PagedCache, parent, children):
    tables = cache.tables
    ok = jnp.all(tables.num_tokens[children] == 0) & jnp.all(tables.num_blocks[:, children] == 0)
    ok &= ~jnp.any(_are_repeated(children))
    ok = ok & jnp.all(children != parent) & _are_rows(tables, children) & _are_rows(tables, parent)
    shared, blocks = read_before_write(tables.blocks, (slice(None), parent))
    cache = cache.replace(tables=tables.replace(blocks=blocks))
    times = jnp.where(ok, jnp.int32(children.shape[0]), 0)
    counts = tables.num_blocks[:, parent][:, None]
    return share(cache, children, shared, counts, tables.num_tokens[parent], times), ok


def _are_rows(tables: BlockTables, rows) -> Bool[Array, ""]:
    return jnp.all((rows >= 0) & (rows < tables.num_rows))


def _are_repeated(rows: Int[Array, "k"]) -> Bool[Array, "k"]:
    """Which are named before them."""
    return jnp.any(jnp.tril(rows[:, None] == rows[None], -1), axis=1)


@jax.jit
def _free(cache: PagedCache, rows):
    rows = jnp.where(_are_repeated(rows), cache.tables.num_rows, rows)
    books = cache.books
    after, ok = release_rows(books, rows, jnp.int32(rows.shape[0]))
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, books).replace(kv=cache.kv), ok
