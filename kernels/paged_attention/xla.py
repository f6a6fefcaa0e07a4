"""Paged attention in plain JAX, in two forms that are chosen when the program is lowered.

- On CPU, one tile at a time: each walks over its own context only, in chunks of blocks that stay in the cache.
- Elsewhere, all tiles at once: on GPU every trip of a loop is a round of launches, and every loop whose length depends
  on data waits for the host, so there is one loop over context chunks as long as the longest tile's.

Both are an online softmax. The loops read the pages as invariants: nothing here ever copies a page array.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from .plan import AttentionPlan, Items
from .scoring import LOWEST, NO_SCALES, Scales, Scoring
from .tiles import QueryTiles, Rows

# Not measured: a GPU was not at hand. Long, because each trip costs a host sync.
ALL_TILES_DECODE_CHUNK = 512
ALL_TILES_WIDE_CHUNK = 128


type Stored = tuple[Float[Array, "N B KV D"], Float[Array, "..."] | None]  # pages and the scales of their numbers


class Softmax(NamedTuple):
    """A softmax-weighted sum of values in progress."""

    max: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    acc: Float[Array, "*rows D"]


def attend(q, k_pages, v_pages, plan: AttentionPlan, sinks, scoring: Scoring, form=None, scales: Scales = NO_SCALES):
    """Attention as `ragged_paged_attention` defines it, of checked arguments: (out[T, H, D], lse f32[T, H]).

    `form` None lets the platform choose; `one_tile_at_a_time` or `all_tiles_at_once` is taken wherever it runs.
    """
    chunk_tokens = ALL_TILES_DECODE_CHUNK if plan.every.tiles.size == 1 else ALL_TILES_WIDE_CHUNK
    return _attend(q, (k_pages, scales.k), (v_pages, scales.v), plan, sinks, scoring, form, chunk_tokens)


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnums=(5, 6, 7))
def _attend(q, keys, values, plan: AttentionPlan, sinks, scoring: Scoring, form, chunk_tokens: int):
    def bind(form):
        return lambda q, keys, values, plan, sinks: _finish(
            form(q, keys, values, plan, scoring, chunk_tokens), sinks, plan.place.owned, q.dtype
        )

    args = (q, keys, values, plan, sinks)
    if form is not None:
        return bind(form)(*args)
    return lax.platform_dependent(*args, cpu=bind(one_tile_at_a_time), default=bind(all_tiles_at_once))


def one_tile_at_a_time(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """The CPU form: one flat loop over the chunks of the tiles' contexts, tile after tile. Padding costs nothing.

    A decoding sequence in a mixed batch must not pay for a whole tile: sequences with one query row have a loop of their own.
    """
    del chunk_tokens  # the plan has cut the contexts
    rows = _walk_rows(q, keys, values, plan, scoring)
    size = plan.every.tiles.size
    if size > 1:
        tiles = _by_token(_walk_tiles(q, keys, values, plan, scoring), plan.wide_place, size)
        rows = jnp.where(plan.single_place.owned[:, None, None], rows, tiles)
    return Softmax(rows[..., -1], rows[..., -2], rows[..., :-2])


def _walk(items: Items, queries: Float[Array, "P *rows X"], num_rows: tuple[int, ...], head_dim: int, step):
    """The sums [P, *num_rows, D + 2] (values, total, maximum) of each tile's items; `step(sums, query, tile, item)` adds one.

    One array and no scalars but the item's number: every kernel in here is compiled once a layer and launched once an item.
    """
    sums = jnp.full_like(queries, 0, shape=(queries.shape[0], *num_rows, head_dim + 2))
    # Also where no item begins: a tile that sees nothing.
    sums = jnp.where(jnp.arange(head_dim + 2) == head_dim + 1, LOWEST, sums)

    def body(i, carry):
        current, whole = carry
        tile = _at(items.tile, i)
        current = step(jnp.where(_at(items.starts, i), sums[0], current), _at(queries, tile), tile, i)
        return current, lax.dynamic_update_index_in_dim(whole, current, tile, 0)

    return lax.fori_loop(0, items.num_items, body, (sums[0], sums))[1]


def _add_chunk(sums, scores, visible, scoring: Scoring, weigh):
    """Take in the scores [*rows, L] of a chunk; `weigh` sums its values by [*rows, L] weights."""
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    scores = jnp.where(visible, scores, LOWEST)
    old = sums[..., -1:]
    top = jnp.maximum(old, scores.max(-1, keepdims=True))
    # A row that has seen no key gathers weights of 1: they count for nothing once it sees one, and `_finish` if it never does.
    weights, decay = jnp.exp(scores - top), jnp.exp(old - top)
    total = sums[..., -2:-1] * decay + weights.sum(-1, keepdims=True)
    # Not put side by side: XLA's CPU backend compiles each layer's concatenate anew, and a select once.
    column = jnp.arange(sums.shape[-1]) - (sums.shape[-1] - 2)
    values = sums * decay + jnp.pad(weigh(weights), ((0, 0),) * (sums.ndim - 1) + ((0, 2),))
    return jnp.where(column < 0, values, jnp.where(column == 0, total, top))


def _walk_rows(q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring) -> Float[Array, "T H D+2"]:
    """The sequences with one query row, by token.

    The heads' queries stand block-diagonally in [H, KV * D], so that one product with K as [L, KV * D] scores all heads and K
    needs no transpose; that it multiplies (KV - 1) / KV zeros costs less.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = keys[0].shape[1:3]
    own = np.arange(num_heads)[:, None] // (num_heads // kv_heads) == np.arange(kv_heads)
    own, wide, (tiles, items) = own[:, :, None], _sum_dtype(q), plan.single
    queries = _at(q, jnp.clip(tiles.start, 0, q.shape[0] - 1)).astype(wide) * scoring.scale
    queries = jnp.where(own, queries[:, :, None], 0).reshape(-1, num_heads, kv_heads * head_dim)
    offsets = jnp.arange(items.blocks.shape[1] * block_size, dtype=jnp.int32)

    def step(sums, query, tile, i):
        k, v = (_read(stored, _at(items.blocks, i), wide) for stored in (keys, values))
        visible = _visible(_at(tiles.position, tile), _at(items.first_key, i) + offsets, scoring)
        scores = _dot("hx,lx->hl", query, k.reshape(-1, kv_heads * head_dim))

        v = jnp.where(visible[:, None], v.reshape(-1, kv_heads * head_dim), 0)

        def weigh(weights):
            summed = _dot("hl,lx->hx", weights, v).reshape(num_heads, kv_heads, head_dim)
            return jnp.where(own, summed, 0).sum(1)

        return _add_chunk(sums, scores, visible, scoring, weigh)

    return _at(_walk(items, queries, (num_heads,), head_dim, step), plan.single_place.tile)


def _walk_tiles(q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring) -> Float[Array, "P KV GC D+2"]:
    """The sequences with more query rows, by tile."""
    block_size, kv_heads, head_dim = keys[0].shape[1:]
    tiles, items = plan.wide
    queries = _cut_rows(q, tiles, kv_heads) * scoring.scale
    group = q.shape[1] // kv_heads
    offsets = jnp.arange(items.blocks.shape[1] * block_size, dtype=jnp.int32)

    def step(sums, query, tile, i):
        k, v = (_read(stored, _at(items.blocks, i), queries.dtype) for stored in (keys, values))
        k, v = (x.reshape(-1, kv_heads, head_dim) for x in (k, v))
        key_positions, position = _at(items.first_key, i) + offsets, _at(tiles.position, tile)
        visible = _visible((position + tiles.offsets)[:, None], key_positions, scoring)
        v = jnp.where(_in_reach(position, _at(tiles.num_rows, tile), key_positions, scoring)[:, None, None], v, 0)
        scores = _dot("krd,lkd->krl", query, k)
        visible = jnp.tile(visible, (group, 1))
        return _add_chunk(sums, scores, visible, scoring, lambda p: _dot("krl,lkd->krd", p, v))

    return _walk(items, queries, queries.shape[1:3], head_dim, step)


def all_tiles_at_once(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """The form for GPUs: every op over all tiles, and one loop over the context, as long as the longest tile's."""
    block_size, kv_heads, head_dim = keys[0].shape[1:]
    tiles, first, end = plan.every.tiles, plan.every.first_block, plan.every.end_block
    rows = _cut_rows(q, tiles, kv_heads)
    group = q.shape[1] // kv_heads
    positions = tiles.position[:, None] + tiles.offsets
    counts = tiles.offsets < tiles.num_rows[:, None]

    width = plan.tables.shape[1]
    num_blocks = max(1, min(chunk_tokens // block_size, width))
    trips = lax.div(end - first + (num_blocks - 1), jnp.int32(num_blocks)).max()

    def body(j, softmax):
        block = first + j * num_blocks
        column = jnp.minimum(block[:, None] + jnp.arange(num_blocks, dtype=jnp.int32), width - 1)
        ids = plan.tables[tiles.seq[:, None], column]
        tokens = num_blocks * block_size
        k, v = (_read(stored, ids, q.dtype).reshape(-1, tokens, kv_heads, head_dim) for stored in (keys, values))
        key_positions = block[:, None] * block_size + jnp.arange(tokens, dtype=jnp.int32)
        visible = _visible(positions[:, :, None], key_positions[:, None], scoring) & counts[:, :, None]
        reach = _in_reach(tiles.position[:, None], tiles.num_rows[:, None], key_positions, scoring)
        v = jnp.where(reach[:, :, None, None], v, 0)
        scores = _dot("nkrd,nlkd->nkrl", rows.astype(k.dtype), k) * scoring.scale
        visible = jnp.tile(visible, (1, group, 1))[:, None]
        return _update(softmax, scores, visible, scoring, lambda p: _dot("nkrl,nlkd->nkrd", p.astype(v.dtype), v))

    sums = lax.fori_loop(0, trips, body, _empty(rows))
    return Softmax(*(_by_token(x, plan.place, tiles.size) for x in sums))


def _cut_rows(q, tiles: QueryTiles, kv_heads: int) -> Float[Array, "P KV GC D"]:
    """The query rows of each tile, by KV head, then by head of its group, then by row."""
    row = jnp.minimum(tiles.start[:, None] + tiles.offsets, q.shape[0] - 1)
    rows = q[jnp.maximum(row, 0)].astype(_sum_dtype(q))
    rows = rows.reshape(*row.shape, kv_heads, q.shape[1] // kv_heads, q.shape[2]).transpose(0, 2, 3, 1, 4)
    return rows.reshape(row.shape[0], kv_heads, -1, q.shape[2])


def _by_token(x, place: Rows, size: int):
    """What stands by tile, [P, KV, G * C, ...], as [T, H, ...]."""
    x = x.reshape(*x.shape[:2], -1, size, *x.shape[3:])[place.tile, :, :, place.offset]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _read(stored: Stored, ids, dtype):
    """The numbers of the blocks `ids`, in `dtype`."""
    # The plan's ids are inside the pool.
    pages, scale = stored
    numbers = _at(pages, ids)
    if scale is None:
        return numbers.astype(dtype)
    factor = _at(scale, ids)[..., None] if scale.ndim else scale
    return (numbers.astype(jnp.float32) * factor).astype(dtype)


def _at(x, index):
    """`x[index]` of an index inside. Without the wrap of a negative one a sixth less is compiled for each layer."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _visible(position, key_positions, scoring: Scoring) -> Bool[Array, "..."]:
    visible = key_positions <= position
    return visible if scoring.window is None else visible & (key_positions > position - scoring.window)


def _in_reach(position, num_rows, keys, scoring: Scoring) -> Bool[Array, "..."]:
    """Whether any of `num_rows` queries from `position` on sees the key; a value that none sees may be NaN, and 0 * NaN is NaN."""
    reach = keys < position + num_rows
    return reach if scoring.window is None else reach & (keys > position - scoring.window)


def _sum_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _dot(spec: str, a, b):
    # HIGHEST: float32 stays float32 on a GPU, not TF32. It means nothing for bfloat16.
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=_sum_dtype(a))


def _empty(queries: Float[Array, "*rows D"]) -> Softmax:
    # From an operand, not from constants, so that the loop's carry has the operand's sharding.
    acc = jnp.zeros_like(queries, dtype=_sum_dtype(queries))
    return Softmax(jnp.full_like(acc[..., 0], LOWEST), jnp.zeros_like(acc[..., 0]), acc)


def _update(softmax: Softmax, scores, visible, scoring: Scoring, weigh) -> Softmax:
    """Take in the scores [*rows, L] of a chunk; `weigh` sums its values by [*rows, L] weights."""
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    scores = jnp.where(visible, scores, LOWEST)
    top = jnp.maximum(softmax.max, scores.max(-1))
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0)
    decay = jnp.exp(softmax.max - top)
    return Softmax(top, softmax.total * decay + weights.sum(-1), softmax.acc * decay[..., None] + weigh(weights))


def _finish(softmax: Softmax, sinks: Float[Array, "H"] | None, owned, dtype):
    """(out[T, H, D], lse[T, H]); 0 and -inf where no key was seen or no sequence owns the row."""
    top, total, acc = softmax
    seen = ~(top <= LOWEST) & owned[:, None]  # NaN has been seen
    if sinks is not None:
        sinks = sinks.astype(top.dtype)
        raised = jnp.maximum(top, sinks)
        decay = jnp.exp(top - raised)
        top, total, acc = raised, total * decay + jnp.exp(sinks - raised), acc * decay[..., None]
    total = jnp.where(seen, total, 1)
    out = jnp.where(seen[..., None], acc / total[..., None], 0)
    return out.astype(dtype), jnp.where(seen, top + jnp.log(total), -jnp.inf)
