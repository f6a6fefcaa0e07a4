"""What a program of the Mosaic GPU kernel is: its sizes, operands, shared memory and context.

A program is one warpgroup. It takes the query rows of one tile, or of a part of it, for all query
heads of one KV head, and its split of the context: a page is read once for the heads of its group.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .combine import share_of_context
from .scoring import Scoring

ROWS = 64  # of a WGMMA
CHUNK = 64  # tokens of context in one trip of the loop
RING = 4  # chunks of K and V in shared memory; one of them is being read


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands.

    Attributes:
        rows: query tokens of a program.
        heads: query heads of a program, padded to a power of two.
        parts: programs that share a tile.
        splits: programs that share a context.
    """

    rows: int
    heads: int
    parts: int
    splits: int
    scoring: Scoring
    interpret: plgpu.InterpretGPUParams | None

    @property
    def size(self) -> int:
        """Return the rows that are read and written; shared memory is laid out in eights."""
        return pl.cdiv(self.rows * self.heads, 8) * 8


class Refs(NamedTuple):
    """References to the operands and results, in global memory."""

    tables: Any
    seqs: Any
    counts: Any
    positions: Any
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


class Program(NamedTuple):
    """What a program attends from and to.

    Its queries are at `position` and the positions after it. The keys that some of them sees are
    `first_key` to `end_key - 1`; the program's split of them begins at `start`, in the block
    `first_block` of its sequence, and has so many `chunks`.
    """

    number: Array
    kv_head: Array
    split: Array
    seq: Array
    position: Array
    first_key: Array | int
    end_key: Array
    start: Array
    chunks: Array
    first_block: Array
    last_block: Array


class Kernel(NamedTuple):
    """What the steps of a kernel share."""

    refs: Refs
    smem: Scratch
    static: Static
    program: Program


def scratch_types(block_size: int, head_dim: int, dtype, partial_dtype) -> dict[str, Any]:
    """Return the types of `Scratch`, by name."""
    pages = CHUNK // block_size  # each arrives on its own
    ready = partial(plgpu.Barrier, num_arrivals=pages, num_barriers=RING)
    return Scratch(
        q=_tiled((ROWS, head_dim), dtype),
        k=_tiled((RING, CHUNK, head_dim), dtype),
        v=_tiled((RING, CHUNK, head_dim), dtype),
        weights=_tiled((2, ROWS, CHUNK), dtype),
        out=_tiled((ROWS, head_dim), partial_dtype),
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


def share_context(position, num_rows, split, static: Static, block_size: int) -> tuple:
    """Return the fields of `Program` from `first_key` on.

    Example, rows 130 and 131, no window, pages of 16, 2 splits, split 1: 3 chunks, of which the
    first split takes 2. Keys 0 to 131, start 128, 1 chunk, blocks 8 to 8.
    """
    window = static.scoring.window
    end_key = position + num_rows
    first_key = 0 if window is None else jnp.maximum(position - (window - 1), 0)
    last_block = lax.div(end_key - 1, jnp.int32(block_size))
    sizes = static.splits, CHUNK, block_size
    start, chunks = share_of_context(jnp.int32(first_key), end_key, split, *sizes)
    first_block = lax.div(start, jnp.int32(block_size))
    return first_key, end_key, start, chunks, first_block, last_block
