"""What a program of the Mosaic GPU kernel is: its sizes, operands, shared memory, units of work.

A program is one warpgroup. It takes units in turn: the query rows of a strip, for all query heads
of one KV head, and a split of their context. So a page is read once for the heads of its group.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .scoring import Scoring
from .splits import LINE_GROUP, locate_in_work

ROWS = 64  # of a WGMMA
CHUNK = 64  # tokens of context in one trip of the loop
RING = 4  # chunks of K and V in shared memory; one of them is being read


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands.

    Attributes:
        rows: query tokens of a strip.
        heads: query heads of a KV head, padded to a power of two.
        programs: programs in all.
        num_lines: lines of results of a KV head.
    """

    rows: int
    heads: int
    programs: int
    num_lines: int
    scoring: Scoring
    interpret: plgpu.InterpretGPUParams | None

    @property
    def size(self) -> int:
        """Return the lines of a strip, in whole groups."""
        return pl.cdiv(self.rows * self.heads, LINE_GROUP) * LINE_GROUP


class Refs(NamedTuple):
    """References to the operands and results, in global memory."""

    tables: Any
    seqs: Any
    counts: Any
    positions: Any
    strips: Any
    split_starts: Any
    split_ends: Any
    first_lines: Any
    num_splits: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


class Scratch(NamedTuple):
    """References to shared memory and barriers; K and V are rings of chunks with a barrier each."""

    q: Any
    k: Any
    v: Any
    weights: Any
    out: Any
    lse: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any


class Unit(NamedTuple):
    """A unit of work: a KV head, and a split of what the rows of a strip see.

    Its queries are at `position` and the positions after it. The keys that some of them sees are
    `first_key` to `end_key - 1`; the first of its `chunks` begins at `start`, and of the chunks
    `whole_begin` to `whole_end - 1` every row sees every key. Its `groups` of lines in the results
    begin with `first_group`. `column` and `last_column` are the places of its first and
    last block in the table.
    """

    strip: Array
    kv_head: Array
    seq: Array
    position: Array
    first_key: Array | int
    end_key: Array
    start: Array
    chunks: Array
    whole_begin: Array
    whole_end: Array
    column: Array
    last_column: Array
    first_group: Array
    groups: Array


class Kernel(NamedTuple):
    """What the steps of a kernel share."""

    refs: Refs
    smem: Scratch
    static: Static
    unit: Unit


def scratch_types(block_size: int, head_dim: int, dtype) -> dict[str, Any]:
    """Return the types of `Scratch`, by name."""
    pages = CHUNK // block_size  # each arrives on its own
    ready = partial(plgpu.Barrier, num_arrivals=pages, num_barriers=RING)
    return Scratch(
        q=_tiled((ROWS, head_dim), dtype),
        k=_tiled((RING, CHUNK, head_dim), dtype),
        v=_tiled((RING, CHUNK, head_dim), dtype),
        weights=_tiled((2, ROWS, CHUNK), dtype),
        out=_tiled((ROWS, head_dim), jnp.float32),
        lse=plgpu.SMEM((ROWS,), jnp.float32),
        q_ready=plgpu.Barrier(),
        k_ready=ready(),
        v_ready=ready(),
    )._asdict()


def _tiled(shape: tuple[int, ...], dtype):
    """Return shared memory in the layout that TMA writes and WGMMA reads without bank conflicts."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def locate_unit(number, refs: Refs, static: Static) -> Unit:
    """Return the unit of a number; KV heads come first.

    Example, rows 130 and 131, no window, pages of 16, a split from key 128 on, 4 heads: keys 128 to
    131, 1 chunk, columns 8 to 8, 1 group of lines.
    """
    block_size = jnp.int32(refs.k.shape[1])
    split, kv_head = locate_in_work(number, refs.k.shape[2])
    strip, start, end_key = (
        ref[split] for ref in (refs.strips, refs.split_starts, refs.split_ends)
    )
    position, window = refs.positions[strip], static.scoring.window
    first_key = 0 if window is None else jnp.maximum(position - (window - 1), 0)
    count, chunks = refs.counts[strip], pl.cdiv(end_key - start, jnp.int32(CHUNK))
    whole_begin = jnp.int32(0)
    if window is not None:  # the last row's window begins last
        before = position + count - window - start
        whole_begin = jnp.minimum(
            lax.div(jnp.maximum(before, 0) + (CHUNK - 1), jnp.int32(CHUNK)), chunks
        )
    seen_by_all = jnp.maximum(jnp.minimum(end_key, position + 1) - start, 0)
    return Unit(
        strip=strip,
        kv_head=kv_head,
        seq=refs.seqs[strip],
        position=position,
        first_key=first_key,
        end_key=end_key,
        start=start,
        chunks=chunks,
        whole_begin=whole_begin,
        whole_end=jnp.maximum(lax.div(seen_by_all, jnp.int32(CHUNK)), whole_begin),
        column=lax.div(start, block_size),
        last_column=lax.div(end_key - 1, block_size),
        first_group=lax.div(refs.first_lines[split], jnp.int32(LINE_GROUP)),
        groups=pl.cdiv(count * static.heads, jnp.int32(LINE_GROUP)),
    )
