"""Paged attention in plain JAX, in two forms that are chosen when the program is lowered.

- On CPU, a few rows or one tile at a time (`xla_cpu.py`): each walks over its own context only, in
  chunks of blocks that stay in the cache.
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
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from .online_softmax import Softmax, add_scores, add_values, dot, finish_softmax, start_softmax
from .plan import AttentionPlan
from .reads import Stored, by_token, cut_rows, read
from .scoring import Scales, Scoring, is_in_reach, is_visible
from .tiles import QueryTiles
from .xla_cpu import few_rows_at_a_time

# Not measured: a GPU was not at hand. Long, because each trip costs a host sync.
ALL_TILES_DECODE_CHUNK = 512
ALL_TILES_WIDE_CHUNK = 128


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

    `form` None lets the platform choose. Tests pass `few_rows_at_a_time` or `all_tiles_at_once`:
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
        cpu=partial(run, form=few_rows_at_a_time),
        default=partial(run, form=all_tiles_at_once),
    )


def _run_form(q, keys, values, plan, sinks, *, scoring, chunk_tokens, form):
    softmax = form(q, keys, values, plan, scoring, chunk_tokens)
    return finish_softmax(softmax, sinks, plan.place.is_owned, q.dtype)


def all_tiles_at_once(
    q, keys: Stored, values: Stored, plan: AttentionPlan, scoring: Scoring, chunk_tokens: int
) -> Softmax:
    """Attend with every op over all tiles, and one loop over the context.

    The form for GPUs. The loop is as long as the longest tile's context.
    """
    block_size, kv_heads, head_dim = keys[0].shape[1:]
    tiles, first_block, end_block = plan.every
    rows = cut_rows(q, tiles, kv_heads)
    num_blocks = max(1, min(chunk_tokens // block_size, plan.tables.shape[1]))
    tokens = num_blocks * block_size

    def body(j, softmax):
        block = first_block + j * num_blocks
        ids = _read_tables(plan, block, num_blocks)
        k, v = (read(stored, ids, q.dtype) for stored in (keys, values))
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
    return Softmax(*(by_token(x, plan.place, tiles.size) for x in softmax))


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
