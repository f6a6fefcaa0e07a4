"""What a program of the Triton kernel is: its sizes, operands, units of work, lines and context.

A program takes units in turn: the query rows of a strip, for all query heads of one KV head, and a
split of their context. So a page is read once for the heads of its group. Its products have one
line for each row and head, [rows x heads of the group, D], padded to powers of two, which is what
Triton computes on. Padding is masked where it is read and where it is written.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from .scoring import Scoring
from .splits import locate_in_work


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

    def pieces(self) -> list[Array]:
        """Return the dimensions of each piece: [0 to 31, 32 to 63] for width 64 in pieces of 32."""
        starts = range(0, self.width, self.piece)
        return [start + jnp.arange(self.piece, dtype=jnp.int32) for start in starts]


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands."""

    blocking: Blocking
    programs: int
    num_lines: int
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
    strips: Any
    split_starts: Any
    split_ends: Any
    first_lines: Any
    num_splits: Any
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
        scales = iter(operands[13:])
        k_scale, v_scale = (next(scales) if has else None for has in has_scale)
        return cls._make([*operands[:13], k_scale, v_scale, out, lse])


class Unit(NamedTuple):
    """A unit of work: a KV head and a split. `strip` has its rows, `line` is its first result."""

    kv_head: Array
    split: Array
    strip: Array
    line: Array

    @classmethod
    def of(cls, refs: Refs, number) -> "Unit":
        """Return the unit of a number; KV heads come first."""
        split, kv_head = locate_in_work(number, refs.k.shape[2])
        # Volatile, or the compiler would keep what it read before the loop.
        strip, line = (
            pltriton.load(ref.at[split], volatile=True) for ref in (refs.strips, refs.first_lines)
        )
        return cls(kv_head, split, strip, line)


class Lines(NamedTuple):
    """What each line of the products is for.

    Attributes:
        row: query row within the strip.
        token: that row among the T flattened tokens.
        head: query head.
        is_live: whether there is such a row and head; the other lines are padding.
    """

    row: Array
    token: Array
    head: Array
    is_live: Array


class Context(NamedTuple):
    """The keys of a split that some row of its strip sees: `first_key` to `end_key - 1`.

    The first chunk begins at `start`. Outside of the context nothing is read, so that a NaN there
    is 0 here.
    """

    first_key: Array
    end_key: Array
    start: Array
    chunks: Array


def locate_lines(refs: Refs, unit: Unit, blocking: Blocking) -> Lines:
    """Return the lines of a unit.

    Example, 2 rows of 3 heads, padded to 4: row [0, 0, 0, 0, 1, 1, 1, 1], head of the group
    [0, 1, 2, 3, 0, 1, 2, 3], and the lines of head 3 are not live.
    """
    # Volatile, or the compiler would keep what it read before the loop.
    num_rows, start = (
        pltriton.load(ref.at[unit.strip], volatile=True) for ref in (refs.counts, refs.starts)
    )
    line = jnp.arange(blocking.size, dtype=jnp.int32)
    row, head = (op(line, jnp.int32(blocking.heads)) for op in (lax.div, lax.rem))
    group = refs.q.shape[1] // refs.k.shape[2]
    is_live = (row < num_rows) & (head < group)
    return Lines(row, start + row, unit.kv_head * group + head, is_live)


def locate_pieces(refs: Refs, is_live: Array, pieces: list[Array], *at: Array) -> list:
    """Return for each piece of the lines its place in q or out, and which of its numbers exist."""
    head_dim = refs.q.shape[2]
    masks = [is_live[:, None] & (dims < head_dim)[None, :] for dims in pieces]
    return [
        (broadcast(mask.shape, *at, dims[None, :]), mask)
        for mask, dims in zip(masks, pieces, strict=True)
    ]


def locate_context(refs: Refs, unit: Unit, position, static: Static) -> Context:
    """Return the context of a unit's rows, the first of which is at `position`."""
    window = static.scoring.window
    first_key = jnp.int32(0 if window is None else jnp.maximum(position - (window - 1), 0))
    start, end_key = refs.split_starts[unit.split], refs.split_ends[unit.split]
    chunks = pl.cdiv(end_key - start, jnp.int32(static.blocking.chunk))
    return Context(jnp.maximum(first_key, start), end_key, start, chunks)


def broadcast(shape: tuple[int, ...], *at) -> tuple[Array, ...]:
    """Broadcast coordinates to one shape, which Pallas-Triton asks for."""
    return tuple(jnp.broadcast_to(x, shape) for x in at)
