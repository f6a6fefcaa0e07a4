"""What a program of the Mosaic GPU kernel is: its sizes, operands, shared memory, units of work.

A program is a warpgroup that loads (`mosaic_gpu_producer.py`) and one or two that multiply, 64
lines each. It takes units in turn: the query rows of a strip, for all query heads of one KV head,
and a split of their context. So a page is read once for the heads of its group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .scoring import Scoring
from .splits import LINE_GROUP, for_each_unit, locate_in_work

ROWS = 64  # of a WGMMA, which one consumer issues
CHUNK = 64  # tokens of context in one trip of the loop


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands.

    Attributes:
        rows: query tokens of a strip.
        heads: query heads of a KV head, padded to a power of two.
        programs: programs in all.
        num_lines: lines of results of a KV head.
        head_dim: numbers of a key; 64 or 128.
    """

    rows: int
    heads: int
    programs: int
    num_lines: int
    head_dim: int
    scoring: Scoring
    interpret: plgpu.InterpretGPUParams | None

    @property
    def size(self) -> int:
        """Return the lines of a strip, in whole groups."""
        return pl.cdiv(self.rows * self.heads, LINE_GROUP) * LINE_GROUP

    @property
    def consumers(self) -> int:
        """Return the warpgroups that multiply."""
        return pl.cdiv(self.size, ROWS)

    @property
    def ring(self) -> int:
        """Return the chunks of K and V that fit shared memory: 128 KB, or 96 of two consumers.

        Example: head_dim 64 -> 8, 128 -> 4; with two consumers 6 and 3.
        """
        return (5 - self.consumers) * (128 // self.head_dim)

    @property
    def query_slots(self) -> int:
        """Return how many units have their queries in shared memory. With two consumers it is full.

        The queries of a unit are free once its last scores are there, before its values are.
        """
        return 3 - self.consumers

    @property
    def part(self) -> int:
        """Return the columns of a product with values, and of results on their way, at once.

        With two consumers there are no registers and no shared memory for more.
        """
        return self.head_dim if self.consumers == 1 else 64


def strip_rows(tile: int, heads: int, block_size: int, scoring: Scoring) -> int:
    """Return the query tokens of a strip of a tile: of 128 lines, or of 64.

    Copies of many small pages and a soft cap take registers that two consumers do not leave.

    Example, a tile of 32 tokens, 4 heads, pages of 16, no soft cap: 32, so 128 lines.
    """
    has_two = tile > 1 and block_size >= 16 and scoring.soft_cap is None
    return min(tile, ROWS * (1 + has_two) // heads)


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
    """References to shared memory and barriers.

    Queries, K and V are rings. Of each place one barrier says that a copy has arrived, and one
    that all consumers are done with it. `v_clean` says that values nobody sees were cleared.
    """

    q: Any
    k: Any
    v: Any
    weights: Any
    out: Any
    lse: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    v_clean: Any


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
    first_key: Array
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


class Place(NamedTuple):
    """How many units and chunks of context a program has had before: places in the rings."""

    unit: Array
    chunk: Array


def scratch_types(block_size: int, dtype, static: Static) -> dict[str, Any]:
    """Return the types of `Scratch`, by name."""
    consumers, ring, slots = static.consumers, static.ring, static.query_slots
    head_dim = static.head_dim
    barriers = partial(plgpu.Barrier, num_barriers=ring)
    pages = CHUNK // block_size  # each arrives on its own
    return Scratch(
        q=_tiled((slots, consumers, ROWS, head_dim), dtype),
        k=_tiled((ring, CHUNK, head_dim), dtype),
        v=_tiled((ring, CHUNK, head_dim), dtype),
        weights=_tiled((consumers, 2, ROWS, CHUNK), dtype),
        out=_tiled((consumers, ROWS, static.part), jnp.float32),
        lse=plgpu.SMEM((consumers, ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
        q_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
        k_ready=barriers(num_arrivals=pages),
        k_free=barriers(num_arrivals=consumers),
        v_ready=barriers(num_arrivals=pages),
        v_free=barriers(num_arrivals=consumers),
        v_clean=barriers(),
    )._asdict()


def in_ring(number, size: int) -> Array:
    """Return the place of an item in a ring: item 5 of a ring of 4 -> 1."""
    return lax.rem(number, jnp.int32(size))


def walk_units(kernel: Kernel, run: Callable[[Unit, Place], None]) -> None:
    """Call `run` for the units of this program, with their places in the rings."""
    refs, _, static = kernel

    def run_next(number, place):
        unit = locate_unit(number, refs, static)
        run(unit, place)
        return Place(place.unit + 1, place.chunk + unit.chunks)

    sizes = static.programs, refs.num_splits[0], refs.k.shape[2]
    start = Place(jnp.int32(0), jnp.int32(0))
    for_each_unit(lax.axis_index("program"), *sizes, run_next, start)


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
    first_key = jnp.maximum(position - (window - 1), 0) if window is not None else jnp.int32(0)
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
