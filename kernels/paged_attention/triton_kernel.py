"""The Pallas-Triton kernel of `triton.py`.

A program (`triton_program.py`) takes units of work in turn, and walks over each one's split of a
context in chunks of keys, with an online softmax.

Page ids are int32 and stay one coordinate of several: Pallas multiplies them out in 64 bits where
the pool takes more than 4 GiB (`wraps` in `dispatch.py` is where that comes too late).

What is held across the loop over the context takes registers from it: hence the volatile reads, the
order of the reads, and what is computed twice.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .scoring import LOG2_E, LOWEST
from .splits import for_each_unit
from .triton_program import (
    Blocking,
    Context,
    Lines,
    Refs,
    Static,
    Unit,
    broadcast,
    locate_context,
    locate_lines,
    locate_pieces,
)


class Keys(NamedTuple):
    """A chunk of keys: position, whether that is in the context, and place in the pages."""

    position: Array
    is_inside: Array
    place: tuple[Array, Array, Array]


class Loop(NamedTuple):
    """What the trips of the loop over a context share."""

    refs: Refs
    static: Static
    unit: Unit
    context: Context
    seq: Array
    position: Array
    row: Array
    query: list[Array]
    pieces: list[Array]
    factor: Array | float


class Sums(NamedTuple):
    """A softmax in progress, by line; scores are in units of log 2. `acc` is cut into pieces."""

    top: Array
    total: Array
    acc: tuple[Array, ...]


def run_program(*refs, static: Static, has_scale: tuple[bool, ...]) -> None:
    """Do the units of work of one program."""
    refs = Refs.of(refs, has_scale)

    def run(number, carry):
        _run_unit(refs, static, Unit.of(refs, number))
        return carry

    sizes = static.programs, refs.num_splits[0], refs.k.shape[2]
    for_each_unit(pl.program_id(0), *sizes, run, jnp.int32(0))


def _run_unit(refs: Refs, static: Static, unit: Unit) -> None:
    """Attend from the rows of a strip to one split of their context."""
    blocking, scoring = static.blocking, static.scoring
    pieces = blocking.pieces()
    lines = locate_lines(refs, unit, blocking)
    position = refs.positions[unit.strip]
    loop = Loop(
        refs=refs,
        static=static,
        unit=unit,
        seq=refs.seqs[unit.strip],
        position=position,
        row=lines.row,
        query=_read_query(refs, lines, pieces),
        pieces=pieces,
        context=locate_context(refs, unit, position, static),
        factor=scoring.scale * refs.k_scale[0] if _is_scalar(refs.k_scale) else scoring.scale,
    )
    sums = lax.fori_loop(0, loop.context.chunks, partial(_add_chunk, loop), _start_sums(blocking))
    factor, lse = _finish(sums, refs)
    # Read and computed again: what is held across the loop takes registers from it.
    lines = locate_lines(refs, unit, blocking)
    _write(sums.acc, factor, lse, refs, unit, lines, pieces)


def _read_query(refs: Refs, lines: Lines, pieces: list[Array]) -> list[Array]:
    at = lines.token[:, None], lines.head[:, None]
    places = locate_pieces(refs, lines.is_live, pieces, *at)
    return [pltriton.load(refs.q.at[place], mask=mask, other=0) for place, mask in places]


def _start_sums(blocking: Blocking) -> Sums:
    """Return the sums over no key."""
    lines, pieces = (blocking.size,), range(0, blocking.width, blocking.piece)
    top, total = jnp.full(lines, LOWEST, jnp.float32), jnp.zeros(lines, jnp.float32)
    return Sums(top, total, tuple(jnp.zeros((*lines, blocking.piece), jnp.float32) for _ in pieces))


def _add_chunk(loop: Loop, i, sums: Sums) -> Sums:
    """Add chunk i of the context to the sums."""
    keys = _locate_keys(loop, i)
    scores = _score(loop, keys)
    visible = _is_visible(loop, keys)
    scores = jnp.where(visible, scores * LOG2_E, LOWEST)
    top = jnp.maximum(sums.top, scores.max(1))
    weights = jnp.where(visible, jnp.exp2(scores - top[:, None]), 0.0)
    decay = jnp.exp2(sums.top - top)
    values = _read_values(loop, keys)
    narrow = weights.astype(loop.refs.q.dtype)
    acc = tuple(a * decay[:, None] + _dot(narrow, v) for a, v in zip(sums.acc, values, strict=True))
    return Sums(top, sums.total * decay + weights.sum(1), acc)


def _locate_keys(loop: Loop, i) -> Keys:
    """Locate the keys of chunk i in the pages, through the block table.

    Example, pages of 4, table [8, 3]: the keys 2 to 5 are at (8, 2), (8, 3), (3, 0) and (3, 1).
    """
    context, chunk, block_size = loop.context, loop.static.blocking.chunk, loop.refs.k.shape[1]
    keys = context.start + i * chunk + jnp.arange(chunk, dtype=jnp.int32)
    is_inside = (keys >= context.first_key) & (keys < context.end_key)
    column = jnp.where(is_inside, lax.div(keys, jnp.int32(block_size)), 0)
    entry = loop.refs.tables.at[broadcast(keys.shape, loop.seq, column)]
    block = pltriton.load(entry, mask=is_inside, other=0)
    offset = lax.rem(keys, jnp.int32(block_size))
    return Keys(keys, is_inside, (block, offset, loop.unit.kv_head))


def _score(loop: Loop, keys: Keys):
    """Return the scores of a chunk, [lines, L]."""
    k_scale, soft_cap = loop.refs.k_scale, loop.static.scoring.soft_cap
    ks = (_read(loop, loop.refs.k, keys, dims, loop.refs.q.dtype) for dims in loop.pieces)
    scores = sum(_dot(q, k.T) for q, k in zip(loop.query, ks, strict=True)) * loop.factor
    if k_scale is not None and not _is_scalar(k_scale):
        scores = scores * _read_scale(k_scale, keys)[None, :]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return scores


def _is_visible(loop: Loop, keys: Keys) -> Array:
    """Return which keys of a chunk each line sees, [lines, L]."""
    position, window = (loop.position + loop.row)[:, None], loop.static.scoring.window
    visible = (keys.position[None, :] <= position) & keys.is_inside[None, :]
    if window is not None:
        visible &= keys.position[None, :] > position - window
    return visible


def _read_values(loop: Loop, keys: Keys) -> Iterator[Array]:
    """Return the values of a chunk, a piece at a time. Each is read when it is asked for."""
    v, v_scale, dtype = loop.refs.v, loop.refs.v_scale, loop.refs.q.dtype
    if v_scale is None or _is_scalar(v_scale):
        return (_read(loop, v, keys, dims, dtype) for dims in loop.pieces)
    factors = _read_scale(v_scale, keys)[:, None]
    return (
        (_read(loop, v, keys, dims, jnp.float32) * factors).astype(dtype) for dims in loop.pieces
    )


def _read(loop: Loop, pages, keys: Keys, dims, dtype) -> Array:
    """Read [L, dims] numbers of the pages; 0 outside the context and past head_dim."""
    block, offset, kv_head = keys.place
    shape = (block.shape[0], dims.shape[0])
    place = broadcast(shape, block[:, None], offset[:, None], kv_head, dims[None, :])
    mask = keys.is_inside[:, None] & (dims < pages.shape[3])[None, :]
    if jnp.dtype(pages.dtype).itemsize > 1:
        return pltriton.load(pages.at[place], mask=mask, other=0).astype(dtype)
    # Pallas-Triton has no constant of an fp8 dtype to fill in.
    numbers = pltriton.load(pages.at[place], mask=mask)
    return jnp.where(mask, _widen(numbers, loop.static.has_fp8_conversion), 0).astype(dtype)


def _widen(x, has_fp8_conversion: bool) -> Array:
    """Convert int8 or fp8 to float32, exactly."""
    if x.dtype != jnp.float8_e4m3fn or has_fp8_conversion:
        return x.astype(jnp.float32)
    # No instruction before sm_89. Shifted into place the bits are a float16 with an exponent too
    # small by 8; 0x7f is NaN. Example: 1 is 0x38 = 0 0111 000, 0x1c00 is 0 00111 0... = 2^-8.
    bits = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    shifted = (bits & 0x7F) << 7 | (bits & -0x80) << 8
    wide = lax.bitcast_convert_type(shifted, jnp.float16) * jnp.float16(256)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, wide.astype(jnp.float32))


def _is_scalar(scale) -> bool:
    """Return whether a scale is one number for all pages; its reference is [1] then."""
    return scale is not None and len(scale.shape) == 1


def _read_scale(scale, keys: Keys) -> Array:
    block, offset, kv_head = keys.place
    place = broadcast(block.shape, block, offset, kv_head)
    return pltriton.load(scale.at[place], mask=keys.is_inside, other=0)


def _finish(sums: Sums, refs: Refs) -> tuple[Array, Array]:
    """Return the factor that makes means of the summed values, and the log-sum-exp, by line."""
    has_key = sums.total != 0  # true for NaN
    factor = 1 / jnp.where(has_key, sums.total, 1.0)
    if _is_scalar(refs.v_scale):
        factor = factor * refs.v_scale[0]
    lse = (sums.top + jnp.log2(jnp.where(has_key, sums.total, 1.0))) / LOG2_E
    return factor, jnp.where(has_key, lse, -jnp.inf)


def _write(acc, factor, lse, refs: Refs, unit: Unit, lines: Lines, pieces) -> None:
    """Write the means and the log-sum-exp of the live lines."""
    line = unit.line + jnp.arange(lines.row.shape[0], dtype=jnp.int32)
    place = broadcast(line.shape, unit.kv_head, line)
    pltriton.store(refs.lse.at[place], lse, mask=lines.is_live)
    places = locate_pieces(refs, lines.is_live, pieces, unit.kv_head, line[:, None])
    for a, (place, mask) in zip(acc, places, strict=True):
        pltriton.store(refs.out.at[place], a * factor[:, None], mask=mask)


def _dot(a, b) -> Array:
    """Multiply. HIGHEST keeps float32 from becoming TF32; it means nothing for narrower types."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
