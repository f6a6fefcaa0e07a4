"""Paged attention in plain JAX, in two forms that are chosen when the program is lowered.

- On CPU, one tile at a time: each walks over its own context only, in chunks of blocks that stay in
  the cache.
- Elsewhere, all tiles at once: on GPU every trip of a loop is a round of launches, and every loop
  of unknown length waits for the host. So there is one loop over context chunks, as long
  as the longest tile's.

Both are an online softmax (`online_softmax.py`). The loops read the pages as invariants: nothing
here copies a page array.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Num

from .online_softmax import (
    Softmax,
    add_scores,
    add_values,
    dot,
    finish_softmax,
    pack_softmax,
    pad_values,
    start_softmax,
    sum_dtype,
    unpack_softmax,
)
from .plan import AttentionPlan, Items
from .scoring import LOWEST, Scales, Scoring, is_in_reach, is_visible
from .tiles import QueryTiles, Rows

# Not measured: a GPU was not at hand. Long, because each trip costs a host sync.
ALL_TILES_DECODE_CHUNK = 512
ALL_TILES_WIDE_CHUNK = 128

# Pages, and the scales of their numbers.
type Stored = tuple[Num[Array, "N B KV D"], Float[Array, "..."] | None]


def attend(
    q,
    k_pages,
    v_pages,
    plan: AttentionPlan,
    sinks,
    scales: Scales,
    scoring: Scoring,
    form: Callable | None = None,
):
    """Return (out[T, H, D], lse[T, H]) of `ragged_paged_attention`, of checked arguments.

    `form` None lets the platform choose. Tests pass `one_tile_at_a_time` or `all_tiles_at_once`:
    the form for GPUs has no other way to run on a CPU.
    """
    is_decode = plan.every.tiles.size == 1
    chunk_tokens = ALL_TILES_DECODE_CHUNK if is_decode else ALL_TILES_WIDE_CHUNK
    keys, values = (k_pages, scales.k), (v_pages, scales.v)
    return _attend(q, keys, values, plan, sinks, scoring, form, chunk_tokens)


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnums=(5, 6, 7))
def _attend(q, keys, values, plan: AttentionPlan, sinks, scoring: Scoring, form, chunk_tokens: int):
    args = (q, keys, values, plan, sinks)
    run = partial(_run_form, scoring=scoring, chunk_tokens=chunk_tokens)
    if form is not None:
        return run(*args, form=form)
    return lax.platform_dependent(
        *args,
        cpu=partial(run, form=one_tile_at_a_time),
        default=partial(run, form=all_tiles_at_once),
    )


def _run_form(q, keys, values, plan, sinks, *, scoring, chunk_tokens, form):
    softmax = form(q, keys, values, plan, scoring, chunk_tokens)
    return finish_softmax(softmax, sinks, plan.place.is_owned, q.dtype)


def one_tile_at_a_time(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """Attend with one flat loop over the chunks of the tiles' contexts, tile after tile.

    The CPU form. Padding costs nothing. A decoding sequence in a mixed batch must not pay for a
    whole tile: sequences with one query row have a loop of their own.
    """
    del chunk_tokens  # the plan has cut the contexts
    rows = _walk_rows(q, keys, values, plan, scoring)
    size = plan.every.tiles.size
    if size > 1:
        tiles = _walk_tiles(q, keys, values, plan, scoring)
        tiles = _by_token(tiles, plan.wide_place, size)
        rows = jnp.where(plan.single_place.is_owned[:, None, None], rows, tiles)
    softmax = unpack_softmax(rows)
    return softmax._replace(acc=softmax.acc[..., :-2])


def _walk(
    items: Items,
    queries: Float[Array, "P *rows X"],
    num_rows: tuple[int, ...],
    head_dim: int,
    step: Callable,
) -> Float[Array, "P *out"]:
    """Return the packed softmax [P, *num_rows, D + 2] of each tile over its items.

    `step(softmax, query, tile, item)` adds one item. The carry is one array, and a step has no
    scalar but the item's number: every kernel in here is compiled once a layer and launched once an
    item.
    """
    sums = jnp.full_like(queries, 0, shape=(queries.shape[0], *num_rows, head_dim + 2))
    # The start also of a tile without an item, which sees nothing.
    sums = jnp.where(jnp.arange(head_dim + 2) == head_dim + 1, LOWEST, sums)

    def body(i, carry):
        current, whole = carry
        tile = _at(items.tile, i)
        current = jnp.where(_at(items.is_first, i), sums[0], current)
        current = pack_softmax(step(unpack_softmax(current), _at(queries, tile), tile, i))
        return current, lax.dynamic_update_index_in_dim(whole, current, tile, 0)

    return lax.fori_loop(0, items.num_items, body, (sums[0], sums))[1]


def _walk_rows(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring
) -> Float[Array, "T H W"]:
    """Return the packed softmax of the sequences with one query row, by token.

    The heads' queries form a block diagonal in [H, KV * D]. So one product with K as [L, KV * D]
    scores all heads, and K needs no transpose. It multiplies (KV - 1) / KV zeros, which costs less.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = keys[0].shape[1:3]
    is_own = np.arange(num_heads)[:, None] // (num_heads // kv_heads) == np.arange(kv_heads)
    is_own, dtype, (tiles, items) = is_own[:, :, None], sum_dtype(q), plan.single
    row = jnp.clip(tiles.start, 0, q.shape[0] - 1)
    queries = _at(q, row).astype(dtype) * scoring.scale
    queries = jnp.where(is_own, queries[:, :, None], 0)
    queries = queries.reshape(-1, num_heads, kv_heads * head_dim)
    offsets = jnp.arange(items.blocks.shape[1] * block_size, dtype=jnp.int32)

    def step(softmax, query, tile, i):
        k, v = (_read(stored, _at(items.blocks, i), dtype) for stored in (keys, values))
        k, v = (x.reshape(-1, kv_heads * head_dim) for x in (k, v))
        key_positions = _at(items.first_key, i) + offsets
        visible = is_visible(_at(tiles.position, tile), key_positions, scoring)
        v = jnp.where(visible[:, None], v, 0)
        softmax, weights = add_scores(softmax, dot("hx,lx->hl", query, k), visible, scoring)
        summed = dot("hl,lx->hx", weights, v).reshape(num_heads, kv_heads, head_dim)
        return add_values(softmax, pad_values(jnp.where(is_own, summed, 0).sum(1)))

    return _at(_walk(items, queries, (num_heads,), head_dim, step), plan.single_place.tile)


def _walk_tiles(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring
) -> Float[Array, "P KV GC W"]:
    """Return the packed softmax of the sequences with more query rows, by tile."""
    block_size, kv_heads, head_dim = keys[0].shape[1:]
    tiles, items = plan.wide
    queries = _cut_rows(q, tiles, kv_heads) * scoring.scale
    group = q.shape[1] // kv_heads
    offsets = jnp.arange(items.blocks.shape[1] * block_size, dtype=jnp.int32)

    def step(softmax, query, tile, i):
        ids = _at(items.blocks, i)
        k, v = (_read(stored, ids, queries.dtype) for stored in (keys, values))
        k, v = (x.reshape(-1, kv_heads, head_dim) for x in (k, v))
        key_positions, position = _at(items.first_key, i) + offsets, _at(tiles.position, tile)
        visible = is_visible((position + tiles.offsets)[:, None], key_positions[None], scoring)
        in_reach = is_in_reach(position, _at(tiles.num_rows, tile), key_positions, scoring)
        v = jnp.where(in_reach[:, None, None], v, 0)
        scores, visible = dot("krd,lkd->krl", query, k), jnp.tile(visible, (group, 1))
        softmax, weights = add_scores(softmax, scores, visible, scoring)
        return add_values(softmax, pad_values(dot("krl,lkd->krd", weights, v)))

    return _walk(items, queries, queries.shape[1:3], head_dim, step)


def all_tiles_at_once(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """Attend with every op over all tiles, and one loop over the context.

    The form for GPUs. The loop is as long as the longest tile's context.
    """
    block_size, kv_heads, head_dim = keys[0].shape[1:]
    tiles, first_block, end_block = plan.every
    rows = _cut_rows(q, tiles, kv_heads)
    num_blocks = max(1, min(chunk_tokens // block_size, plan.tables.shape[1]))
    tokens = num_blocks * block_size

    def body(j, softmax):
        block = first_block + j * num_blocks
        ids = _read_tables(plan, block, num_blocks)
        k, v = (_read(stored, ids, q.dtype) for stored in (keys, values))
        k, v = (x.reshape(-1, tokens, kv_heads, head_dim) for x in (k, v))
        key_positions = block[:, None] * block_size + jnp.arange(tokens, dtype=jnp.int32)[None]
        visible = _visible_to_tiles(tiles, key_positions, scoring)
        in_reach = is_in_reach(
            tiles.position[:, None], tiles.num_rows[:, None], key_positions, scoring
        )
        v = jnp.where(in_reach[:, :, None, None], v, 0)
        scores = dot("nkrd,nlkd->nkrl", rows.astype(k.dtype), k) * scoring.scale
        visible = jnp.tile(visible, (1, q.shape[1] // kv_heads, 1))[:, None]
        softmax, weights = add_scores(softmax, scores, visible, scoring)
        return add_values(softmax, dot("nkrl,nlkd->nkrd", weights.astype(v.dtype), v))

    trips = pl.cdiv(end_block - first_block, jnp.int32(num_blocks)).max()
    softmax = lax.fori_loop(0, trips, body, start_softmax(rows))
    return Softmax(*(_by_token(x, plan.place, tiles.size) for x in softmax))


def _read_tables(plan: AttentionPlan, block, num_blocks: int) -> Int[Array, "P blocks"]:
    """Return the ids of each tile's next `num_blocks` blocks; past the table those of its end."""
    column = block[:, None] + jnp.arange(num_blocks, dtype=jnp.int32)[None]
    column = jnp.minimum(column, plan.tables.shape[1] - 1)
    return plan.tables[plan.every.tiles.seq[:, None], column]


def _visible_to_tiles(tiles: QueryTiles, key_positions, scoring: Scoring) -> Bool[Array, "P C L"]:
    """Return which of its keys [P, L] each row of a tile sees."""
    position = tiles.position[:, None] + tiles.offsets[None]
    is_row = tiles.offsets[None] < tiles.num_rows[:, None]
    visible = is_visible(position[:, :, None], key_positions[:, None], scoring)
    return visible & is_row[:, :, None]


def _cut_rows(q, tiles: QueryTiles, kv_heads: int) -> Float[Array, "P KV GC D"]:
    """Cut out the query rows of each tile, by KV head, then by head of its group, then by row."""
    row = jnp.minimum(tiles.start[:, None] + tiles.offsets[None], q.shape[0] - 1)
    rows = q[jnp.maximum(row, 0)].astype(sum_dtype(q))
    rows = rows.reshape(*row.shape, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    return rows.transpose(0, 2, 3, 1, 4).reshape(row.shape[0], kv_heads, -1, q.shape[2])


def _by_token(x, place: Rows, size: int):
    """Gather [T, H, ...] from [P, KV, G * C, ...], which is by tile."""
    x = x.reshape(*x.shape[:2], -1, size, *x.shape[3:])[place.tile, :, :, place.offset]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _read(stored: Stored, ids, dtype):
    """Gather the numbers of the blocks `ids` in `dtype`. The plan's ids are inside the pool."""
    pages, scale = stored
    numbers = _at(pages, ids)
    if scale is None:
        return numbers.astype(dtype)
    factor = _at(scale, ids)[..., None] if scale.ndim else scale
    return (numbers.astype(jnp.float32) * factor).astype(dtype)


def _at(x, index):
    """Return `x[index]` of an index inside.

    Without the wrap of negative ones a sixth less is compiled for each layer.
    """
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
