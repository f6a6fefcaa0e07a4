"""Paged attention in plain JAX, in two forms that are chosen when the program is lowered.

- On CPU, one tile at a time: each tile walks over its own context only, in chunks of blocks that stay in the cache.
- Elsewhere, all tiles at once: on GPU every trip of a loop is a round of launches, and every loop whose length depends
  on data waits for the host, so there is one loop over context chunks as long as the longest tile's.

Both are an online softmax. The loops read the pages as invariants: nothing here ever copies a page array.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .tiles import QueryTiles, cut_tiles, locate_rows, max_tiles, query_lengths, tile_size

# Tokens of context that a loop trip reads. Best of many runs, ms a layer, on two busy cores with AVX2 (9 query heads,
# 3 KV heads, head_dim 64, block 16):
#
#   rows x context       chunk 32     64    128    256    512   all tiles at once
#   16 x 256                  4.0    2.8    2.7    2.6    3.9     7.3
#   64 x 256                 19.1   12.9    9.8    9.4   13.3      55
#   64 x 512                 41.5   31.4   23.9   21.7   18.3      64
#   63 x 40 and 1 x 512       3.5    2.7    3.3    5.0   11.3      48
#
# The two products with their gathers (16 to 21 GFLOP/s) are most of it. One loop over (row, chunk) items, several a
# trip, did not pay for its merging of partial sums: 8 items of 64 tokens took 28 % less at 64 x 256, 4 % more at
# 64 x 512 and 50 % more at 1 x 256; 4 items of 128 took 10 % less, 10 % less and 39 % more. A prompt of 512 in tiles of
# 16, 32, 64, 128 rows: 8.0, 7.0, 6.2, 5.8; 32 because a short prompt would leave most of a larger tile empty.
DECODE_CHUNK = 128
WIDE_CHUNK = 128
# Not measured: a GPU was not at hand. Long, because each trip costs a host sync.
ALL_TILES_DECODE_CHUNK = 512
ALL_TILES_WIDE_CHUNK = 128

LOWEST = -1e30  # a running maximum's start: finite, so that a row which has seen no key makes no inf - inf


class Scoring(NamedTuple):
    """How a query and a key make a score. `window` and `soft_cap` are static."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Pages(NamedTuple):
    """The K and V pages and the table that finds a sequence's."""

    k: Float[Array, "N B KV D"]
    v: Float[Array, "N B KV D"]
    tables: Int[Array, "S M"]

    @property
    def block_size(self) -> int:
        """Token positions of a block."""
        return self.k.shape[1]

    def chunk(self, seq, first_block, num_blocks: int):
        """K and V [..., L, KV, D] of `num_blocks` blocks of sequences `seq` from `first_block` on.

        A table entry past the table, or an id past the pool, is read as the nearest one: the caller masks those.
        """
        column = jnp.minimum(first_block[..., None] + jnp.arange(num_blocks), self.tables.shape[1] - 1)
        ids = jnp.clip(self.tables[seq[..., None], column], 0, self.k.shape[0] - 1)
        tokens = num_blocks * self.block_size
        read = lambda x: x.at[ids].get(mode="promise_in_bounds").reshape(*ids.shape[:-1], tokens, *x.shape[2:])  # noqa: E731
        return read(self.k), read(self.v)


class Softmax(NamedTuple):
    """A softmax-weighted sum of values in progress."""

    max: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    acc: Float[Array, "*rows D"]


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames=("scoring", "form"))
def attend(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks, scoring: Scoring, form=None):
    """Attention as `ragged_paged_attention` defines it, of checked arguments: (out[T, H, D], lse f32[T, H]).

    `form` None lets the platform choose; `one_tile_at_a_time` or `all_tiles_at_once` is taken wherever it runs.
    """

    def bind(form):
        return lambda q, *rest: form(q, *rest, scoring)

    args = (q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks)
    if form is not None:
        return bind(form)(*args)
    return lax.platform_dependent(*args, cpu=bind(one_tile_at_a_time), default=bind(all_tiles_at_once))


def one_tile_at_a_time(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks, scoring):
    """The CPU form: a loop over the real tiles, each over its own context. Padding costs nothing."""
    num_tokens = q.shape[0]
    pages = Pages(k_pages, v_pages, block_tables)
    size = tile_size(num_tokens, kv_lens.shape[0])
    q_lens = query_lengths(num_tokens, cu_q_lens, num_seqs)

    # The last tile of a sequence writes zeros over the rows after its own, which later tiles then write, and past the
    # last row of all; hence the order of the two loops and the padding.
    padded = q if size == 1 else jnp.pad(q, ((0, size - 1), (0, 0), (0, 0)))
    out = jnp.zeros_like(padded)
    lse = jnp.full_like(padded[..., 0], -jnp.inf, dtype=_sum_dtype(q))

    def walk(tiles: QueryTiles, size, attend_tile, out_and_lse):
        def body(i, out_and_lse):
            start = tiles.start[i]
            rows = lax.dynamic_slice_in_dim(padded, start, size)
            new = attend_tile(rows, pages, tiles.seq[i], tiles.position[i], tiles.num_rows[i], sinks, scoring)
            return tuple(
                lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, 0)
                for whole, part in zip(out_and_lse, new, strict=True)
            )

        return lax.fori_loop(0, tiles.num_tiles, body, out_and_lse)

    single = q_lens
    if size > 1:  # a decoding sequence in a mixed batch must not pay for a whole tile
        wide = jnp.where(q_lens > 1, q_lens, 0)
        single = jnp.where(q_lens == 1, 1, 0)
        tiles = cut_tiles(wide, cu_q_lens, kv_lens, size, max_tiles(num_tokens, kv_lens.shape[0], size))
        out, lse = walk(tiles, size, _attend_wide_tile, (out, lse))
    bound = num_tokens if size == 1 else kv_lens.shape[0]
    out, lse = walk(cut_tiles(single, cu_q_lens, kv_lens, 1, bound), 1, _attend_row, (out, lse))
    return out[:num_tokens], lse[:num_tokens]


def _attend_row(q, pages: Pages, seq, position, num_rows, sinks, scoring: Scoring):
    """One query row [1, H, D]. The heads' queries stand block-diagonally in [H, KV * D], so that one product with K as
    [L, KV * D] scores all heads and K needs no transpose; that it multiplies (KV - 1) / KV zeros costs less."""
    del num_rows
    _, num_heads, head_dim = q.shape
    kv_heads = pages.k.shape[2]
    group = num_heads // kv_heads
    own = jnp.arange(num_heads)[:, None] // group == jnp.arange(kv_heads)  # [H, KV]
    scaled = q[0].astype(_sum_dtype(q)) * scoring.scale
    spread = jnp.where(own[:, :, None], scaled[:, None], 0).reshape(num_heads, kv_heads * head_dim)

    def step(softmax, k, v, key_positions):
        k, v = (x.reshape(-1, kv_heads * head_dim).astype(spread.dtype) for x in (k, v))
        visible = _visible(position, key_positions, scoring)
        scores = _dot("hx,lx->hl", spread, k)
        v = jnp.where(visible[:, None], v, 0)
        return _update(softmax, scores, visible, scoring, lambda p: _dot("hl,lx->hx", p, v))

    softmax = _scan_context(pages, seq, position, position + 1, _empty(spread), DECODE_CHUNK, scoring, step)
    acc = softmax.acc.reshape(num_heads, kv_heads, head_dim)
    acc = jnp.where(own[:, :, None], acc, 0).sum(1)
    out, lse = _finish(softmax._replace(acc=acc), sinks)
    return out[None], lse[None]


def _attend_wide_tile(q, pages: Pages, seq, position, num_rows, sinks, scoring: Scoring):
    """C query rows [C, H, D] of one sequence, of which the first `num_rows` count; the others give 0 and -inf."""
    size, num_heads, head_dim = q.shape
    kv_heads = pages.k.shape[2]
    group = num_heads // kv_heads
    scaled = (q.astype(_sum_dtype(q)) * scoring.scale).reshape(size, kv_heads, group, head_dim)
    rows = scaled.transpose(1, 2, 0, 3).reshape(kv_heads, group * size, head_dim)
    offsets = jnp.arange(size)

    def step(softmax, k, v, key_positions):
        k, v = k.astype(rows.dtype), v.astype(rows.dtype)
        visible = _visible((position + offsets)[:, None], key_positions, scoring) & (offsets < num_rows)[:, None]
        v = jnp.where((key_positions < position + num_rows)[:, None, None], v, 0)
        scores = _dot("krd,lkd->krl", rows, k)
        return _update(softmax, scores, jnp.tile(visible, (group, 1)), scoring, lambda p: _dot("krl,lkd->krd", p, v))

    softmax = _scan_context(pages, seq, position, position + num_rows, _empty(rows), WIDE_CHUNK, scoring, step)
    by_row = lambda x: jnp.moveaxis(x.reshape(kv_heads, group, size, *x.shape[2:]), 2, 0)  # noqa: E731
    softmax = Softmax(*(by_row(x).reshape(size, num_heads, *x.shape[2:]) for x in softmax))
    return _finish(softmax, sinks)


def _scan_context(pages: Pages, seq, first_query, end, softmax, chunk_tokens, scoring: Scoring, step):
    """Run `step` over the chunks of one tile's context: from the block where its first row's window begins to `end`."""
    num_blocks = max(1, min(chunk_tokens // pages.block_size, pages.tables.shape[1]))
    tokens = num_blocks * pages.block_size
    first_block = _first_key(first_query, scoring) // pages.block_size
    end = jnp.minimum(end, pages.tables.shape[1] * pages.block_size)
    trips = (end - first_block * pages.block_size + tokens - 1) // tokens

    def body(j, softmax):
        block = first_block + j * num_blocks
        k, v = pages.chunk(seq, block, num_blocks)
        return step(softmax, k, v, block * pages.block_size + jnp.arange(tokens))

    return lax.fori_loop(0, trips, body, softmax)


def all_tiles_at_once(q, k_pages, v_pages, kv_lens, block_tables, cu_q_lens, num_seqs, sinks, scoring):
    """The form for GPUs: every op over all tiles, and one loop over the context, as long as the longest tile's."""
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    group = num_heads // kv_heads
    pages = Pages(k_pages, v_pages, block_tables)
    size = tile_size(num_tokens, kv_lens.shape[0])
    q_lens = query_lengths(num_tokens, cu_q_lens, num_seqs)
    tiles = cut_tiles(q_lens, cu_q_lens, kv_lens, size, max_tiles(num_tokens, kv_lens.shape[0], size))
    place = locate_rows(num_tokens, q_lens, cu_q_lens, size)
    num_tiles = tiles.seq.shape[0]

    offsets = jnp.arange(size)
    rows = q[jnp.clip(tiles.start[:, None] + offsets, 0, num_tokens - 1)]
    rows = rows.reshape(num_tiles, size, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(num_tiles, kv_heads, group * size, head_dim)
    positions = tiles.position[:, None] + offsets
    counts = offsets < tiles.num_rows[:, None]
    end = tiles.position + tiles.num_rows

    num_blocks = (ALL_TILES_DECODE_CHUNK if size == 1 else ALL_TILES_WIDE_CHUNK) // pages.block_size
    num_blocks = max(1, min(num_blocks, block_tables.shape[1]))
    tokens = num_blocks * pages.block_size
    first_block = _first_key(tiles.position, scoring) // pages.block_size
    limit = jnp.minimum(end, block_tables.shape[1] * pages.block_size)
    trips = jnp.where(tiles.num_rows > 0, (limit - first_block * pages.block_size + tokens - 1) // tokens, 0).max()

    def body(j, softmax):
        block = first_block + j * num_blocks
        k, v = pages.chunk(tiles.seq, block, num_blocks)
        key_positions = block[:, None] * pages.block_size + jnp.arange(tokens)
        visible = _visible(positions[:, :, None], key_positions[:, None], scoring) & counts[:, :, None]
        v = jnp.where((key_positions < end[:, None])[:, :, None, None], v, 0)
        scores = _dot("nkrd,nlkd->nkrl", rows, k) * scoring.scale
        visible = jnp.tile(visible, (1, group, 1))[:, None]
        return _update(softmax, scores, visible, scoring, lambda p: _dot("nkrl,nlkd->nkrd", p.astype(v.dtype), v))

    softmax = lax.fori_loop(0, trips, body, _empty(rows))
    by_token = lambda x: x.reshape(num_tiles, kv_heads, group, size, *x.shape[3:])[place.tile, :, :, place.offset]  # noqa: E731
    softmax = Softmax(*(by_token(x).reshape(num_tokens, num_heads, *x.shape[3:]) for x in softmax))
    out, lse = _finish(softmax, sinks)
    owned = place.owned[:, None]
    return jnp.where(owned[..., None], out, 0).astype(q.dtype), jnp.where(owned, lse, -jnp.inf)


def _first_key(position, scoring: Scoring):
    return jnp.zeros_like(position) if scoring.window is None else jnp.maximum(position - scoring.window + 1, 0)


def _visible(position, key_positions, scoring: Scoring) -> Bool[Array, "..."]:
    visible = key_positions <= position
    return visible if scoring.window is None else visible & (key_positions > position - scoring.window)


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


def _finish(softmax: Softmax, sinks: Float[Array, "H"] | None):
    """(out[*rows, H, D], lse[*rows, H]) of [*rows, H] sums; 0 and -inf where no key was seen."""
    top, total, acc = softmax
    seen = total > 0
    if sinks is not None:
        sinks = sinks.astype(top.dtype)
        raised = jnp.maximum(top, sinks)
        decay = jnp.exp(top - raised)
        top, total, acc = raised, total * decay + jnp.exp(sinks - raised), acc * decay[..., None]
    total = jnp.where(seen, total, 1)
    out = jnp.where(seen[..., None], acc / total[..., None], 0)
    return out, jnp.where(seen, top + jnp.log(total), -jnp.inf)
