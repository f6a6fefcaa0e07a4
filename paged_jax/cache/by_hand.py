"""The cache by hand: `allocate_slots`, `fork` and `free` on rows of a `PagedCache`.

They take a cache and rows, and return a new cache and an `ok` flag. When not ok the cache is the
old one. They are jitted, can be called inside a `jit`, and expect distinct rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import read_before_write, vary_with
from paged_jax.cache.block_table import BlockTables, missing_blocks
from paged_jax.cache.copy_on_write import copies_needed, copy_on_write
from paged_jax.cache.paged_cache import PagedCache, compact_head, grow, release_rows, share
from paged_jax.cache.pages import copy_pages
from paged_jax.checks import MOST, show
from paged_jax.errors import ConfigError

type Ints = int | np.integer | np.ndarray | Array | Sequence[int]  # a scalar or one dimension


def allocate_slots(
    cache: PagedCache,
    rows: Ints,
    num_new_tokens: Ints,
    *,
    reserved_blocks: Ints = 0,
    must_fit_tokens: Ints = 0,
) -> tuple[PagedCache, Bool[Array, ""]]:
    """Give each row slots for more tokens: blocks on demand, all rows or none.

    Blocks are handed out row by row in the order given. A row whose last block is partly filled and
    shared first gets a copy of its own, pages included, counted among the blocks that must fit.

    Args:
        rows: an int, or ints [k].
        num_new_tokens: an int, or ints [k].
        reserved_blocks: an int; as many blocks must stay free.
        must_fit_tokens: an int, or ints [k]; as many tokens of each row would have to fit too,
            though only the new ones are allocated (vLLM's full_sequence_must_fit).

    Not ok when the free blocks or the tables' columns do not suffice. Raises ConfigError for a
    count below 1 or a row outside the table, where they are concrete.
    """
    _check_cache(cache)
    rows, new = _concrete_rows(cache, rows), _counts("num_new_tokens", num_new_tokens, 1)
    reserved = _counts("reserved_blocks", reserved_blocks, 0)
    must_fit = _counts("must_fit_tokens", must_fit_tokens, 0)
    if reserved.shape != (1,) or must_fit.shape not in ((1,), rows.shape):
        raise ConfigError(
            f"reserved_blocks, must_fit_tokens: shapes {reserved.shape} and {must_fit.shape} for "
            f"{rows.shape[0]} rows; one count, and one, or one a row, are needed"
        )
    if new.shape not in ((1,), rows.shape):
        raise ConfigError(
            f"num_new_tokens: shape {new.shape} for {rows.shape[0]} rows; one count, or one a row, "
            "is needed"
        )
    new, must_fit = (jnp.broadcast_to(x, rows.shape) for x in (new, must_fit))
    return _allocate(cache, rows, new, reserved[0], must_fit)


def fork(cache: PagedCache, parent: Ints, children: Ints) -> tuple[PagedCache, Bool[Array, ""]]:
    """Let each child row share every block of `parent`, the partly filled last one too.

    `parent` is an int, `children` an int or ints [k]. No page is copied. Not ok when a child row is
    in use. Raises ConfigError for a row outside the table, where they are concrete.
    """
    _check_cache(cache)
    parents = _concrete_rows(cache, parent)
    if parents.shape != (1,):
        raise ConfigError(f"parent={show(parent)}: one row is needed, got {parents.shape[0]}")
    return _fork(cache, parents[0], _concrete_rows(cache, children))


def free(cache: PagedCache, rows: Ints) -> tuple[PagedCache, Bool[Array, ""]]:
    """Release the blocks of each row: the first row first, each from its last block to its first.

    `rows` is an int, or ints [k]. An empty row is skipped. Not ok, and nothing released, when a
    block has fewer references than that. Raises ConfigError for a row outside the table, where they
    are concrete.
    """
    _check_cache(cache)
    return _free(cache, _concrete_rows(cache, rows))


# ---------------------------------------------------------------- arguments


def _check_cache(cache: object) -> None:
    if not isinstance(cache, PagedCache):
        raise ConfigError(f"cache={show(cache)}: a PagedCache of `init_cache` is needed")


def _concrete_rows(cache: PagedCache, rows: Any) -> Int[Array, "k"]:
    """Return row numbers, checked where they are concrete."""
    rows, num_rows = _integers("rows", rows), cache.config.num_rows
    if not isinstance(rows, Tracer):
        listed = rows.tolist()
        if any(not 0 <= row < num_rows for row in listed):
            raise ConfigError(f"rows={listed}: each must be from 0 to {num_rows - 1}")
        if len(set(listed)) < len(listed):
            raise ConfigError(f"rows={listed}: each row may be named once")
    rows = rows.astype(np.int32)
    return jax.device_put(rows) if isinstance(rows, np.ndarray) else rows


def _counts(name: str, values: Any, least: int) -> Int[Array, "k"]:
    """Return counts, checked where they are concrete.

    What does not fit 32 bits becomes `MOST`, which is more than any pool has.
    """
    values = _integers(name, values)
    if isinstance(values, Tracer):
        return values.astype(jnp.int32)
    if np.any(values < least):
        raise ConfigError(f"{name}={values.tolist()}: must be at least {least}")
    return jax.device_put(np.asarray([min(value, MOST) for value in values.tolist()], np.int32))


def _integers(name: str, values: Any) -> Any:
    """Return one dimension of integers, as NumPy's where they are concrete."""
    if not isinstance(values, Tracer):
        try:
            values = np.asarray(values)
        except (TypeError, ValueError) as error:  # rows of several lengths, or no numbers
            raise ConfigError(f"{name}={show(values)}: a row of ints is needed") from error
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    if not is_integer or values.ndim > 1 or values.size == 0:
        raise ConfigError(f"{name}={show(values)}: an int, or a row of ints, is needed")
    return values.reshape(-1)


# ---------------------------------------------------------------- programs


@jax.jit
def _allocate(
    cache: PagedCache,
    rows: Int[Array, "k"],
    new: Int[Array, "k"],
    reserved_blocks: Int[Array, ""],
    must_fit: Int[Array, "k"],
) -> tuple[PagedCache, Bool[Array, ""]]:
    cache = vary_with(cache, (cache, rows, new, reserved_blocks, must_fit))
    config, tables = cache.config, cache.tables
    have, max_tokens = tables.num_tokens[rows], config.max_tokens_per_row
    # Clamped, so that no count wraps.
    asked = jnp.minimum(new, max_tokens + 1)
    must_fit = jnp.minimum(must_fit, config.num_slots + 1)
    need = missing_blocks(tables, rows, have + asked, config.block_size)
    whole = jnp.maximum(have + asked, must_fit)
    whole = missing_blocks(tables, rows, whole, config.block_size)
    copies = copies_needed(cache, rows, have, jnp.ones_like(rows, bool))
    available = cache.pool.num_free - jnp.clip(reserved_blocks, 0, config.num_blocks)
    ok = (
        (jnp.sum(whole, dtype=jnp.float32) < 2**30)  # the sum of ints does not wrap
        & (jnp.sum(whole, dtype=jnp.int32) + jnp.sum(copies, dtype=jnp.int32) <= available)
        & jnp.all((new > 0) & (new <= max_tokens - have))
        & _are_rows(tables, rows)
        & ~jnp.any(_are_repeated(rows))
    )
    need, copies = jnp.where(ok, need, 0), copies & ok
    max_need = min(need.size * config.max_blocks_per_row, config.num_blocks)
    count = jnp.sum(need, dtype=jnp.int32) + jnp.sum(copies, dtype=jnp.int32)
    cache = compact_head(cache, count, min(max_need + need.size, config.num_blocks))
    cache, pages = copy_on_write(cache, rows, have, copies)
    cache = grow(cache, rows, need, jnp.where(ok, have + new, have), max_need)
    return cache.replace(kv=copy_pages(cache.kv, pages)), ok


@jax.jit
def _fork(
    cache: PagedCache, parent: Int[Array, ""], children: Int[Array, "k"]
) -> tuple[PagedCache, Bool[Array, ""]]:
    cache = vary_with(cache, (cache, parent, children))
    tables = cache.tables
    is_empty = jnp.all(tables.num_tokens[children] == 0)
    is_empty &= jnp.all(tables.num_blocks[:, children] == 0)
    ok = is_empty & ~jnp.any(_are_repeated(children)) & jnp.all(children != parent)
    ok = ok & _are_rows(tables, children) & _are_rows(tables, parent)
    shared, blocks = read_before_write(tables.blocks, (slice(None), parent))
    cache = cache.replace(tables=tables.replace(blocks=blocks))
    num_sharers = jnp.where(ok, jnp.int32(children.shape[0]), 0)
    counts = tables.num_blocks[:, parent][:, None]
    return share(cache, children, shared, counts, tables.num_tokens[parent], num_sharers), ok


@jax.jit
def _free(cache: PagedCache, rows: Int[Array, "k"]) -> tuple[PagedCache, Bool[Array, ""]]:
    cache = vary_with(cache, (cache, rows))
    rows = jnp.where(_are_repeated(rows), cache.tables.num_rows, rows)
    books = cache.books
    after, ok = release_rows(books, rows, jnp.int32(rows.shape[0]))
    after = jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, books)
    return after.replace(kv=cache.kv), ok


def _are_rows(tables: BlockTables, rows: Int[Array, "*k"]) -> Bool[Array, ""]:
    return jnp.all((rows >= 0) & (rows < tables.num_rows))


def _are_repeated(rows: Int[Array, "k"]) -> Bool[Array, "k"]:
    """Return which rows stand a second time. 4 2 4 -> F F T."""
    return jnp.any(jnp.tril(rows[:, None] == rows[None], -1), axis=1)
