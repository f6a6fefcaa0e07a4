"""Paged attention in plain JAX for CPUs: loops over chunks of context that stay in the cache.

What counts is how fast the pages are read, and that takes care in what XLA is given:

- LLVM unrolls an inner loop of up to 64 numbers that only copies, and then copies them one by one.
  A loop that does arithmetic becomes vectors. So keys and values are read negated, which is exact;
  a gather took 28 us of what took 48.
- For the same reason the exponentials are taken of a flat array: 3 us of 17.
- The gather writes KV heads before tokens where the products want them so. Otherwise they are
  transposed once more.
"""

from functools import partial

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
from .reads import Stored, at, read
from .row_products import SameForAll, by_head, choose_products
from .scoring import LOWEST, Scoring, is_in_reach, is_visible

UNROLLED = 64  # the longest inner loop that LLVM unrolls
NEVER = 2**30  # a key's position that no query sees


def few_rows_at_a_time(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """Attend with loops over the chunks of the tiles' contexts, tile after tile.

    Padding costs little. A decoding sequence in a mixed batch must not pay for a whole tile:
    sequences with one query row have loops of their own, a group of them at a time.
    """
    del chunk_tokens  # the plan has cut the contexts
    rows = _walk_rows(q, keys, values, plan, scoring)
    if plan.every.tiles.size > 1:
        tiles = _walk_tiles(q, keys, values, plan, scoring)
        rows = jnp.where(plan.single_place.is_owned[:, None, None], rows, tiles)
    softmax = unpack_softmax(rows)
    return softmax._replace(acc=softmax.acc[..., :-2])


def _start(queries: Float[Array, "*rows X"], head_dim: int) -> Float[Array, "*rows W"]:
    """Return the packed softmax of rows that have seen nothing.

    One array is the carry of a loop: its kernels are compiled once, and launched once an item.
    """
    width = head_dim + 2
    # With the barrier it is made when it is needed, and not for all layers at the step's start.
    zero, _ = lax.optimization_barrier((jnp.zeros_like(queries, shape=()), queries))
    sums = jnp.full_like(queries, zero, shape=(*queries.shape[:-1], width))
    return jnp.where(jnp.arange(width) == width - 1, LOWEST, sums)


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

    def attend(products, query, before, ids, visible):
        k, v = (-products.arrange(read(stored, ids, dtype)) for stored in (keys, values))
        visible, has_value = products.spread(visible)
        scores = products.score(query, k)
        softmax, weights = add_scores(unpack_softmax(before), scores, visible, scoring, exp)
        v = jnp.where(has_value, v, 0)
        return pack_softmax(add_values(softmax, pad_values(-products.weigh(weights, v))))

    def step(i, sums):
        group, ids = at(groups.group, i), at(groups.blocks, i)
        key_positions = at(groups.first_key, i)[:, None] + offsets[None]
        visible = is_visible(at(groups.position, group)[:, None], key_positions, scoring)
        args = at(queries, group), at(sums, group), ids, visible
        if row.shape[1] == 1:
            rows = attend(products, *args)
        else:
            forms = partial(attend, SameForAll(kv_heads)), partial(attend, products)
            rows = lax.cond(at(groups.is_shared, i), *forms, *args)
        return lax.dynamic_update_index_in_dim(sums, rows, group, 0)

    sums = lax.fori_loop(0, groups.num_items, step, _start(queries, head_dim))
    return at(sums.reshape(-1, num_heads, head_dim + 2), plan.single_place.tile)


def _walk_tiles(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring
) -> Float[Array, "T H W"]:
    """Return the packed softmax of the sequences with more query rows, by token.

    One trip adds an item of each share. Past the end of its share it repeats the last, unseen.
    """
    (num_tokens, num_heads, head_dim), (block_size, kv_heads) = q.shape, keys[0].shape[1:3]
    (tiles, items), size = plan.wide, plan.every.tiles.size
    first, end = items.shares.first_item[:-1], items.shares.first_item[1:]
    last = jnp.maximum(end - 1, 0)  # the first shares may be empty
    # By head, so that a tile is a slice. The last tile may end past the last token.
    queries = q.astype(sum_dtype(q)).swapaxes(0, 1) * -scoring.scale
    queries = jnp.pad(queries, ((0, 0), (0, size), (0, 0)))
    offsets = jnp.arange(items.blocks.shape[1] * block_size, dtype=jnp.int32)

    def cut(x, start):
        rows = lax.dynamic_slice_in_dim(x, start, size, 1, allow_negative_indices=False)
        return rows.reshape(kv_heads, -1, x.shape[2])

    def trip(i, parts):
        item = jnp.minimum(first + i, last)
        tile, ids = at(items.tile, item), at(items.blocks, item)
        start, num_rows = at(tiles.start, tile), at(tiles.num_rows, tile)[:, None]
        k, v = (-by_head(read(stored, ids, queries.dtype)) for stored in (keys, values))
        key_positions = at(items.first_key, item)[:, None] + offsets[None]
        key_positions = jnp.where((first + i >= end)[:, None], NEVER, key_positions)
        position = at(tiles.position, tile)[:, None]
        rows = (position + tiles.offsets[None])[..., None]
        visible = is_visible(rows, key_positions[:, None], scoring)
        visible = jnp.tile(visible, (1, num_heads // kv_heads, 1))[:, None]
        in_reach = is_in_reach(position, num_rows, key_positions, scoring)
        v = jnp.where(in_reach[:, None, :, None], v, 0)
        query = jnp.stack([cut(queries, start[w]) for w in range(len(parts))])
        before = jnp.stack([cut(part, start[w]) for w, part in enumerate(parts)])
        scores = dot("wkrd,wkld->wkrl", query, k)
        softmax, weights = add_scores(unpack_softmax(before), scores, visible, scoring)
        softmax = add_values(softmax, pad_values(-dot("wkrl,wkld->wkrd", weights, v)))
        # Past the tile's rows lie those of the next one.
        is_own = (tiles.offsets[None] < num_rows)[:, None, :, None]
        by_row = (len(parts), num_heads, size, head_dim + 2)
        rows = jnp.where(is_own, pack_softmax(softmax).reshape(by_row), before.reshape(by_row))
        return [
            lax.dynamic_update_slice_in_dim(part, rows[w], start[w], 1)
            for w, part in enumerate(parts)
        ]

    parts = [_start(queries, head_dim)] * last.shape[0]
    parts = lax.fori_loop(0, (end - first).max(), trip, parts)
    sums, *others = [x.swapaxes(0, 1)[:num_tokens] for x in parts]
    tile = plan.wide_place.tile[:, None, None]
    for w, part in enumerate(others, 1):
        sums = jnp.where(tile >= items.shares.first_tile[w], part, sums)
    return sums


def _exp(x):
    """Return exp(x), by a kernel over a flat array."""
    return jnp.exp(lax.optimization_barrier(x.reshape(-1))).reshape(x.shape)
