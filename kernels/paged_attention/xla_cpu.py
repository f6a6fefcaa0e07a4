"""Paged attention in plain JAX for CPUs: loops over chunks of context that stay in the cache.

What counts is how fast the pages are read, and that takes care in what XLA is given:

- LLVM unrolls an inner loop of up to 64 numbers that only copies, and then copies them one by one.
  A loop that does arithmetic becomes vectors. So keys and values are read negated, which is exact;
  a gather took 28 us of what took 48.
- For the same reason the exponentials are taken of a flat array: 3 us of 17.
- The gather writes KV heads before tokens, as the products want them. Otherwise they are transposed
  once more.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .online_softmax import (
    Softmax,
    add_scores,
    add_values,
    dot,
    pack_softmax,
    pad_values,
    sum_dtype,
    unpack_softmax,
)
from .plan import AttentionPlan
from .reads import Stored, at, by_token, cut_rows, read
from .scoring import LOWEST, Scoring, is_in_reach, is_visible


def few_rows_at_a_time(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """Attend with one flat loop over the chunks of the tiles' contexts, tile after tile.

    Padding costs little. A decoding sequence in a mixed batch must not pay for a whole tile:
    sequences with one query row have a loop of their own, a group of them at a time.
    """
    del chunk_tokens  # the plan has cut the contexts
    rows = _walk_rows(q, keys, values, plan, scoring)
    size = plan.every.tiles.size
    if size > 1:
        tiles = _walk_tiles(q, keys, values, plan, scoring)
        tiles = by_token(tiles, plan.wide_place, size)
        rows = jnp.where(plan.single_place.is_owned[:, None, None], rows, tiles)
    softmax = unpack_softmax(rows)
    return softmax._replace(acc=softmax.acc[..., :-2])


def _walk(
    num_items,
    place: Array,
    queries: Float[Array, "P *rows D"],
    step: Callable,
) -> Float[Array, "P *rows D+2"]:
    """Return the packed softmax of each of P tiles or groups over its items.

    `step(softmax, queries, place, item)` adds one item, which is of the tile `place[item]`. The
    carry is one array: every kernel in here is compiled once a layer and launched once an item.
    """
    width = queries.shape[-1] + 2
    sums = jnp.full_like(queries, 0, shape=(*queries.shape[:-1], width))
    # The start also of a tile without an item, which sees nothing.
    sums = jnp.where(jnp.arange(width) == width - 1, LOWEST, sums)

    def body(i, sums):
        here = at(place, i)
        softmax = step(unpack_softmax(at(sums, here)), at(queries, here), here, i)
        return lax.dynamic_update_index_in_dim(sums, pack_softmax(softmax), here, 0)

    return lax.fori_loop(0, num_items, body, sums)


def _walk_rows(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring
) -> Float[Array, "T H W"]:
    """Return the packed softmax of the sequences with one query row, by token."""
    (num_heads, head_dim), kv_heads, groups = q.shape[1:], keys[0].shape[2], plan.single
    row = jnp.clip(groups.start, 0, q.shape[0] - 1)
    queries = at(q, row).astype(sum_dtype(q)) * -scoring.scale
    queries = queries.reshape(*row.shape, kv_heads, num_heads // kv_heads, head_dim)
    offsets = jnp.arange(groups.blocks.shape[2] * keys[0].shape[1], dtype=jnp.int32)

    def step(softmax, query, group, i):
        ids = at(groups.blocks, i)
        k, v = (-_by_head(read(stored, ids, queries.dtype)) for stored in (keys, values))
        key_positions = at(groups.first_key, i)[:, None] + offsets
        visible = is_visible(at(groups.position, group)[:, None], key_positions, scoring)
        visible = visible[:, None, :, None]
        v = jnp.where(visible, v, 0)
        scores, visible = dot("gkrd,gkld->gkrl", query, k), visible.swapaxes(2, 3)
        softmax, weights = add_scores(softmax, scores, visible, scoring, _exp)
        return add_values(softmax, pad_values(-dot("gkrl,gkld->gkrd", weights, v)))

    sums = _walk(groups.num_items, groups.group, queries, step)
    return at(sums.reshape(-1, num_heads, head_dim + 2), plan.single_place.tile)


def _walk_tiles(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring
) -> Float[Array, "P KV GC W"]:
    """Return the packed softmax of the sequences with more query rows, by tile."""
    block_size, kv_heads = keys[0].shape[1:3]
    tiles, items = plan.wide
    queries = cut_rows(q, tiles, kv_heads) * -scoring.scale
    group = q.shape[1] // kv_heads
    offsets = jnp.arange(items.blocks.shape[1] * block_size, dtype=jnp.int32)

    def step(softmax, query, tile, i):
        ids = at(items.blocks, i)
        k, v = (-_by_head(read(stored, ids, queries.dtype)) for stored in (keys, values))
        key_positions, position = at(items.first_key, i) + offsets, at(tiles.position, tile)
        visible = is_visible((position + tiles.offsets)[:, None], key_positions[None], scoring)
        in_reach = is_in_reach(position, at(tiles.num_rows, tile), key_positions, scoring)
        v = jnp.where(in_reach[:, None], v, 0)
        scores, visible = dot("krd,kld->krl", query, k), jnp.tile(visible, (group, 1))
        softmax, weights = add_scores(softmax, scores, visible, scoring)
        return add_values(softmax, pad_values(-dot("krl,kld->krd", weights, v)))

    return _walk(items.num_items, items.tile, queries, step)


def _by_head(pages: Float[Array, "*tiles blocks B KV D"]) -> Float[Array, "*tiles KV blocks*B D"]:
    """Put KV heads before tokens."""
    *tiles, blocks, block_size, kv_heads, head_dim = pages.shape
    by_head = jnp.moveaxis(pages, -2, -4)
    return by_head.reshape(*tiles, kv_heads, blocks * block_size, head_dim)


def _exp(x):
    """Return exp(x), by a kernel over a flat array."""
    return jnp.exp(lax.optimization_barrier(x.reshape(-1))).reshape(x.shape)
