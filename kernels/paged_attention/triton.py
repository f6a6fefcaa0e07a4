"""Paged attention as a Pallas-Triton kernel: any CUDA GPU from sm_80 on, any head size and page size, any KV dtype.

Pallas-Triton is deprecated upstream (jax 0.11 on). Nothing but `dispatch.py` and `api.py` knows this file, so that it can go in
one commit.

A program takes the query rows of one tile, or of a part of it, for all query heads of one KV head: a page is read once for the
heads of its group. The rows stand as [rows x heads of the group, D], padded to powers of two, which is what Triton computes on;
padding is masked where it is read and where it is written.

Page ids are int32 and stay one coordinate of several: Pallas multiplies them out in 64 bits where the pool takes more than 4 GiB
(`dispatch.TRITON_WRAPS` tells where that comes too late).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from . import dispatch
from .combine import combine, num_splits, share_of_context
from .plan import AttentionPlan
from .scoring import LOG2_E, LOWEST, NO_SCALES, Scales, Scoring

RESIDENT = 2  # programs on a multiprocessor


class Blocking(NamedTuple):
    """The sizes of a program, all static.

    Attributes:
        rows: query tokens.
        heads: query heads, padded to a power of two.
        width: head_dim, padded to a power of two.
        piece: of the width, what one product takes.
        chunk: tokens of context in one trip of the loop.
        num_warps, num_stages: as Triton means them.
    """

    rows: int
    heads: int
    width: int
    piece: int
    chunk: int
    num_warps: int
    num_stages: int

    @property
    def size(self) -> int:
        """Rows of the products; a matrix instruction wants 16."""
        return max(16, self.rows * self.heads)

    def parts(self, tile: int) -> int:
        """How many programs share a tile of `tile` query tokens."""
        return -(-tile // self.rows)

    @property
    def pieces(self) -> range:
        """The first of the dimensions of each piece."""
        return range(0, self.width, self.piece)


def choose_blocking(tile: int, group: int, head_dim: int, q_dtype, kv_dtype, device_kind: str | None) -> Blocking:
    """The sizes for tiles of `tile` tokens. Bounds come from registers: no combination that the tests compile spills."""
    heads, width = pl.next_power_of_2(group), max(16, pl.next_power_of_2(head_dim))
    if jnp.dtype(q_dtype).itemsize > 2:
        # Products of float32 have no matrix instruction here: a thread holds its operands' whole summed axis in registers.
        # The sizes are those that were found to leave no spills: ptxas would rather spill one number than run fewer programs.
        rows = max(1, min(tile, 16 // heads))
        num_warps = 4 if width <= 128 else 8
        if kv_dtype != q_dtype:
            return Blocking(rows, heads, width, min(width, 32), 16, num_warps, 1)
        stages = 2 if device_kind is None or dispatch.is_hopper(device_kind) else 3
        return Blocking(rows, heads, width, 16, 16, num_warps, stages)
    rows = max(1, min(tile, max(16, 8192 // width) // heads))
    # Numbers of one byte are converted on the way, which takes threads.
    large = rows * heads * width > 4096 or width > 128 or jnp.dtype(kv_dtype).itemsize == 1
    return Blocking(rows, heads, width, width, 64 if width <= 128 else 32, 8 if large else 4, 3 if width <= 128 else 2)


def attend(
    q, k_pages, v_pages, plan: AttentionPlan, sinks, scoring: Scoring, scales: Scales = NO_SCALES, interpret=False
):
    """Attention as `ragged_paged_attention` defines it, of checked arguments: (out[T, H, D], lse f32[T, H])."""
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_pages.shape[1:3]
    tiles = plan.every.tiles
    device_kind = dispatch.target_device_kind()
    group = num_heads // kv_heads
    blocking = choose_blocking(tiles.size, group, head_dim, q.dtype, k_pages.dtype, device_kind)
    programs = tiles.seq.shape[0] * blocking.parts(tiles.size)
    splits = num_splits(programs * kv_heads, plan.tables.shape[1] * block_size, blocking.chunk, RESIDENT)
    converts_fp8 = dispatch.converts_fp8(device_kind)
    static = Static(blocking, splits, scoring, converts_fp8, bool(interpret))
    return _attend(q, k_pages, v_pages, plan, sinks, scales, static)


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands."""

    blocking: Blocking
    splits: int
    scoring: Scoring
    converts_fp8: bool
    interpret: bool


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames="static")
def _attend(q, k_pages, v_pages, plan: AttentionPlan, sinks, scales: Scales, static: Static):
    num_tokens, num_heads, head_dim = q.shape
    tiles, blocking, splits = plan.every.tiles, static.blocking, static.splits
    programs = tiles.seq.shape[0] * blocking.parts(tiles.size)
    partial_dtype = q.dtype if splits == 1 and sinks is None else jnp.float32
    like = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    out, lse = pl.pallas_call(
        partial(_kernel, tile_size=tiles.size, static=static, scaled=tuple(x is not None for x in scales)),
        grid=(programs, k_pages.shape[2], splits),
        out_shape=(
            like((splits, num_tokens, num_heads, head_dim), partial_dtype),
            like((splits, num_tokens, num_heads), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=blocking.num_warps, num_stages=blocking.num_stages),
        interpret=static.interpret,
        name="paged_attention",
    )(
        *(plan.tables, tiles.seq, tiles.start, tiles.num_rows, tiles.position, q, k_pages, v_pages),
        *(jnp.asarray(x, jnp.float32).reshape(x.shape or (1,)) for x in scales if x is not None),
    )
    return combine(out, lse, sinks, plan.place.owned, q.dtype)


def _kernel(tables, seqs, starts, counts, positions, q_ref, k_ref, v_ref, *refs, tile_size, static, scaled):
    """One program; `refs` are the scales that there are, then out and lse."""
    blocking, scoring = static.blocking, static.scoring
    parts = blocking.parts(tile_size)
    *scale_refs, out_ref, lse_ref = refs
    scale_refs = iter(scale_refs)
    k_scale, v_scale = (next(scale_refs) if there else None for there in scaled)
    kv_head, split = pl.program_id(1), pl.program_id(2)
    tile = lax.div(pl.program_id(0), jnp.int32(parts))
    first_row = lax.rem(pl.program_id(0), jnp.int32(parts)) * blocking.rows
    group, head_dim, dtype = q_ref.shape[1] // k_ref.shape[2], q_ref.shape[2], q_ref.dtype

    pieces = [first + jnp.arange(blocking.piece, dtype=jnp.int32) for first in blocking.pieces]

    def locate():
        """How many rows the program has; of each line of the products its row, token and head, and whether it has one."""
        # Volatile, or the compiler would keep what it read before the loop.
        count, start = (pltriton.load(x.at[tile], volatile=True) for x in (counts, starts))
        num_rows = jnp.minimum(count - first_row, blocking.rows)
        lines = jnp.arange(blocking.size, dtype=jnp.int32)
        row, head = (op(lines, jnp.int32(blocking.heads)) for op in (lax.div, lax.rem))
        live = (row < num_rows) & (head < group)
        return num_rows, row, start + first_row + row, kv_head * group + head, live

    def each_piece(live, *at):
        """For each piece of the lines its place in q or out, and which of its numbers there are."""
        masks = [live[:, None] & (dims < head_dim)[None, :] for dims in pieces]
        return [(_index(mask.shape, *at, dims[None, :]), mask) for mask, dims in zip(masks, pieces, strict=True)]

    num_rows, row, token, head, live = locate()
    seq, position = seqs[tile], positions[tile] + first_row
    places = each_piece(live, token[:, None], head[:, None])
    query = [pltriton.load(q_ref.at[place], mask=mask, other=0) for place, mask in places]

    read = partial(_read, converts_fp8=static.converts_fp8)
    first_key, end_key = _context(position, num_rows, scoring)
    start, chunks = share_of_context(first_key, end_key, split, static.splits, blocking.chunk, k_ref.shape[1])
    factor = scoring.scale if k_scale is None or len(k_scale.shape) > 1 else scoring.scale * k_scale[0]

    def step(i, sums):
        top, total, acc = sums
        keys = start + i * blocking.chunk + jnp.arange(blocking.chunk, dtype=jnp.int32)
        within = (keys >= first_key) & (keys < end_key)
        column = jnp.where(within, lax.div(keys, jnp.int32(k_ref.shape[1])), 0)
        block = pltriton.load(tables.at[_index(keys.shape, seq, column)], mask=within, other=0)
        offset = lax.rem(keys, jnp.int32(k_ref.shape[1]))
        at = (block, offset, kv_head)

        # What lies outside the context is never read, so NaN there is 0 here.
        ks = (read(k_ref, at, within, dims, dtype) for dims in pieces)
        scores = sum(_dot(q, k.T) for q, k in zip(query, ks, strict=True)) * factor
        if k_scale is not None and len(k_scale.shape) > 1:
            scores = scores * _read_scale(k_scale, at, within)[None, :]
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
        visible = (keys[None, :] <= (position + row)[:, None]) & within[None, :]
        if scoring.window is not None:
            visible &= keys[None, :] > (position + row)[:, None] - scoring.window
        scores = jnp.where(visible, scores * LOG2_E, LOWEST)

        raised = jnp.maximum(top, scores.max(1))
        weights = jnp.where(visible, jnp.exp2(scores - raised[:, None]), 0.0)
        decay = jnp.exp2(top - raised)
        if v_scale is not None and len(v_scale.shape) > 1:
            factors = _read_scale(v_scale, at, within)[:, None]
            vs = ((read(v_ref, at, within, dims, jnp.float32) * factors).astype(dtype) for dims in pieces)
        else:
            vs = (read(v_ref, at, within, dims, dtype) for dims in pieces)
        narrow = weights.astype(dtype)
        acc = tuple(a * decay[:, None] + _dot(narrow, v) for a, v in zip(acc, vs, strict=True))
        return raised, total * decay + weights.sum(1), acc

    rows = (blocking.size,)
    empty = jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32)
    empty = *empty, tuple(jnp.zeros((*rows, blocking.piece), jnp.float32) for _ in pieces)
    top, total, acc = lax.fori_loop(0, chunks, step, empty)

    seen = total != 0  # also NaN
    factor = 1 / jnp.where(seen, total, 1.0)
    if v_scale is not None and len(v_scale.shape) == 1:
        factor = factor * v_scale[0]
    lse = jnp.where(seen, (top + jnp.log2(jnp.where(seen, total, 1.0))) / LOG2_E, -jnp.inf)
    # Read and computed again: what is held across the loop takes registers from it.
    _, _, token, head, live = locate()
    pltriton.store(lse_ref.at[_index(live.shape, split, token, head)], lse, mask=live)
    for a, (place, mask) in zip(acc, each_piece(live, split, token[:, None], head[:, None]), strict=True):
        pltriton.store(out_ref.at[place], (a * factor[:, None]).astype(out_ref.dtype), mask=mask)


def _context(position, num_rows, scoring: Scoring):
    """The keys that some row of the tile sees: from the window's first to the last row's own; none where there is no row."""
    first = 0 if scoring.window is None else jnp.maximum(position - (scoring.window - 1), 0)
    return jnp.int32(first), jnp.where(num_rows > 0, position + num_rows, 0)


def _index(shape: tuple[int, ...], *at):
    """Every coordinate of every element: Pallas-Triton takes index arrays of one shape."""
    return tuple(jnp.broadcast_to(x, shape) for x in at)


def _read(pages, at, within, dims, dtype, converts_fp8: bool):
    """The [L, dims] numbers of one KV head at L places of the pages, 0 outside the context and past head_dim."""
    block, offset, kv_head = at
    place = _index((block.shape[0], dims.shape[0]), block[:, None], offset[:, None], kv_head, dims[None, :])
    mask = within[:, None] & (dims < pages.shape[3])[None, :]
    if jnp.dtype(pages.dtype).itemsize > 1:
        return pltriton.load(pages.at[place], mask=mask, other=0).astype(dtype)
    # Pallas-Triton has no constant of an fp8 dtype to fill in.
    return jnp.where(mask, _widen(pltriton.load(pages.at[place], mask=mask), converts_fp8), 0).astype(dtype)


def _widen(x, converts_fp8: bool):
    """int8 or fp8 as float32, exactly."""
    if x.dtype != jnp.float8_e4m3fn or converts_fp8:
        return x.astype(jnp.float32)
    # No instruction before sm_89. Shifted into place the bits are a float16 whose exponent is too small by 8; 0x7f is NaN.
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    wide = lax.bitcast_convert_type((bits & 0x7F) << 7 | (bits & -0x80) << 8, jnp.float16) * jnp.float16(256)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, wide.astype(jnp.float32))


def _read_scale(scales, at, within):
    block, offset, kv_head = at
    return pltriton.load(scales.at[_index(block.shape, block, offset, kv_head)], mask=within, other=0)


def _dot(a, b):
    # HIGHEST: float32 stays float32, not TF32. It means nothing for narrower types.
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
