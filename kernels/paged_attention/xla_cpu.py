"""Paged attention in plain JAX for CPUs: loops over chunks of context that stay in the cache.

What counts is how fast the pages are read, and that takes care in what XLA is given:

- LLVM unrolls an inner loop of up to 64 numbers that only copies, and then copies them one by one.
  A loop that does arithmetic becomes vectors. So keys and values are read negated, which is exact;
  a gather took 28 us of what took 48.
- For the same reason the exponentials are taken of a flat array: 3 us of 17.
- The gather writes KV heads before tokens where the products want them so. Otherwise they are
  transposed once more.
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
from .row_products import by_head, choose_products
from .scoring import LOWEST, Scoring, is_in_reach, is_visible

UNROLLED = 64  # the longest inner loop that LLVM unrolls


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
    queries: Float[Array, "P *rows X"],
    head_dim: int,
    step: Callable,
) -> Float[Array, "P *rows W"]:
    """Return the packed softmax of each of P tiles or groups over its items.

    `step(softmax, queries, place, item)` adds one item, which is of the tile `place[item]`. The
    carry is one array: every kernel in here is compiled once a layer and launched once an item.
    """
    width = head_dim + 2
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
    (num_heads, head_dim), (block_size, kv_heads) = q.shape[1:], keys[0].shape[1:3]
    groups, dtype = plan.single, sum_dtype(q)
    row = jnp.clip(groups.start, 0, q.shape[0] - 1)
    products = choose_products(kv_heads, row.shape[1])
    queries = products.lay_out(at(q, row).astype(dtype) * -scoring.scale)
    tokens = groups.blocks.shape[2] * block_size
    offsets = jnp.arange(tokens, dtype=jnp.int32)
    exp = _exp if tokens <= UNROLLED else jnp.exp

    def step(softmax, query, group, i):
        ids = at(groups.blocks, i)
        k, v = (-products.arrange(read(stored, ids, dtype)) for stored in (keys, values))
        key_positions = at(groups.first_key, i)[:, None] + offsets[None]
        visible = is_visible(at(groups.position, group)[:, None], key_positions, scoring)
        visible, has_value = products.spread(visible)
        scores = products.score(query, k)
        softmax, weights = add_scores(softmax, scores, visible, scoring, exp)
        v = jnp.where(has_value, v, 0)
        return add_values(softmax, pad_values(-products.weigh(weights, v)))

    sums = _walk(groups.num_items, groups.group, queries, head_dim, step)
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
        k, v = (-by_head(read(stored, ids, queries.dtype)) for stored in (keys, values))
        key_positions, position = at(items.first_key, i) + offsets, at(tiles.position, tile)
        visible = is_visible((position + tiles.offsets)[:, None], key_positions[None], scoring)
        in_reach = is_in_reach(position, at(tiles.num_rows, tile), key_positions, scoring)
        v = jnp.where(in_reach[:, None], v, 0)
        scores, visible = dot("krd,kld->krl", query, k), jnp.tile(visible, (group, 1))
        softmax, weights = add_scores(softmax, scores, visible, scoring)
        return add_values(softmax, pad_values(-dot("krl,kld->krd", weights, v)))

    return _walk(items.num_items, items.tile, queries, q.shape[2], step)


def _exp(x):
    """Return exp(x), by a kernel over a flat array."""
    return jnp.exp(lax.optimization_barrier(x.reshape(-1))).reshape(x.shape)
