"""What a program of the Triton kernel is: its sizes, operands, coordinates, lines and context.

A program takes the query rows of one tile, or of a part of it, for all query heads of one KV head:
a page is read once for the heads of its group. Its products have one line for each row and head,
[rows x heads of the group, D], padded to powers of two, which is what Triton computes on. Padding
is masked where it is read and where it is written.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .combine import share_of_context
from .scoring import Scoring


class Blocking(NamedTuple):
    """The sizes of a program, all static.

    Attributes:
        rows: query tokens.
        heads: query heads, padded to a power of two.
        width: head_dim, padded to a power of two.
        piece: the part of the width that one product takes.
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
        """Return the lines of the products; a matrix instruction wants 16."""
        return max(16, self.rows * self.heads)

    def parts(self, tile: int) -> int:
        """Return how many programs share a tile of `tile` query tokens."""
        return pl.cdiv(tile, self.rows)

    def pieces(self) -> list[Array]:
        """Return the dimensions of each piece: [0 to 31, 32 to 63] for width 64 in pieces of 32."""
        starts = range(0, self.width, self.piece)
        return [start + jnp.arange(self.piece, dtype=jnp.int32) for start in starts]


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands."""

    blocking: Blocking
    tile_size: int
    splits: int
    scoring: Scoring
    has_fp8_conversion: bool
    interpret: bool


class Refs(NamedTuple):
    """References to the operands and results; a scale is None where the pages have none."""

    tables: Any
    seqs: Any
    starts: Any
    counts: Any
    positions: Any
    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    out: Any
    lse: Any

    @classmethod
    def of(cls, refs: tuple, has_scale: tuple[bool, ...]) -> "Refs":
        """Return references that come in order, without those of the scales that there are not."""
        *operands, out, lse = refs
        scales = iter(operands[8:])
        k_scale, v_scale = (next(scales) if has else None for has in has_scale)
        return cls._make([*operands[:8], k_scale, v_scale, out, lse])


class Program(NamedTuple):
    """The coordinates of a program: its KV head, its split of the context, its part of a tile."""

    kv_head: Array
    split: Array
    tile: Array
    first_row: Array

    @classmethod
    def here(cls, static: Static) -> "Program":
        """Return the coordinates of the program that runs."""
        kv_head, split = pl.program_id(1), pl.program_id(2)
        parts = jnp.int32(static.blocking.parts(static.tile_size))
        tile = lax.div(pl.program_id(0), parts)
        first_row = lax.rem(pl.program_id(0), parts) * static.blocking.rows
        return cls(kv_head, split, tile, first_row)


class Lines(NamedTuple):
    """What each line of the products is for.

    Attributes:
        row: query row within the program.
        token: that row among the T flattened tokens.
        head: query head.
        is_live: whether there is such a row and head; the other lines are padding.
    """

    row: Array
    token: Array
    head: Array
    is_live: Array


class Context(NamedTuple):
    """The keys that some row of a program sees: `first_key` to `end_key - 1`.

    Its split of them begins at `start` and has so many `chunks`. Outside of the context nothing is
    read, so that a NaN there is 0 here.
    """

    first_key: Array
    end_key: Array
    start: Array
    chunks: Array


def locate_lines(refs: Refs, program: Program, blocking: Blocking) -> tuple[Array, Lines]:
    """Return how many rows the program has, and its lines.

    Example, 2 rows of 3 heads, padded to 4: row [0, 0, 0, 0, 1, 1, 1, 1], head of the group
    [0, 1, 2, 3, 0, 1, 2, 3], and the lines of head 3 are not live.
    """
    # Volatile, or the compiler would keep what it read before the loop.
    count, start = (
        pltriton.load(ref.at[program.tile], volatile=True) for ref in (refs.counts, refs.starts)
    )
    num_rows = jnp.minimum(count - program.first_row, blocking.rows)
    line = jnp.arange(blocking.size, dtype=jnp.int32)
    row, head = (op(line, jnp.int32(blocking.heads)) for op in (lax.div, lax.rem))
    group = refs.q.shape[1] // refs.k.shape[2]
    is_live = (row < num_rows) & (head < group)
    token, head = start + program.first_row + row, program.kv_head * group + head
    return num_rows, Lines(row, token, head, is_live)


def locate_pieces(refs: Refs, is_live: Array, pieces: list[Array], *at: Array) -> list:
    """Return for each piece of the lines its place in q or out, and which of its numbers exist."""
    head_dim = refs.q.shape[2]
    masks = [is_live[:, None] & (dims < head_dim)[None, :] for dims in pieces]
    return [
        (broadcast(mask.shape, *at, dims[None, :]), mask)
        for mask, dims in zip(masks, pieces, strict=True)
    ]


def share_context(position, num_rows, program: Program, static: Static, block_size) -> Context:
    """Return the context of the program's rows, from the window's first key to the last row's own.

    It is empty where there is no row.
    """
    window = static.scoring.window
    first_key = jnp.int32(0 if window is None else jnp.maximum(position - (window - 1), 0))
    end_key = jnp.where(num_rows > 0, position + num_rows, 0)
    sizes = static.splits, static.blocking.chunk, block_size
    start, chunks = share_of_context(first_key, end_key, program.split, *sizes)
    return Context(first_key, end_key, start, chunks)


def broadcast(shape: tuple[int, ...], *at) -> tuple[Array, ...]:
    """Broadcast coordinates to one shape, which Pallas-Triton asks for."""
    return tuple(jnp.broadcast_to(x, shape) for x in at)
