"""Query tiles: the flattened tokens cut into tiles of up to C consecutive tokens of one sequence.

All of it is compares, sums and gathers on small arrays: no search loop, few kernels, and equal for every layer of a
decoder, so XLA computes it once a step.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

WIDE_TILE = 32


class QueryTiles(NamedTuple):
    """Up to `seq.shape[0]` tiles, of which the first `num_tiles` are real; the others have no rows.

    Attributes:
        seq: sequence of each tile.
        start: first row of each tile among the T flattened tokens.
        num_rows: rows of each tile, 1 to C; 0 in a tile that is not real.
        position: position in its sequence of each tile's first row.
        num_tiles: how many tiles are real.
        offsets: 0 to C - 1.
    """

    seq: Int[Array, "P"]
    start: Int[Array, "P"]
    num_rows: Int[Array, "P"]
    position: Int[Array, "P"]
    num_tiles: Int[Array, ""]
    offsets: Int[Array, "C"]

    @property
    def size(self) -> int:
        """C."""
        return self.offsets.shape[0]


class Rows(NamedTuple):
    """For each of the T flattened tokens: the tile it stands in, where in it, and whether any sequence owns it."""

    tile: Int[Array, "T"]
    offset: Int[Array, "T"]
    owned: Bool[Array, "T"]


def tile_size(num_tokens: int, num_seqs: int) -> int:
    """C for T tokens of at most S sequences: 1 where one token a sequence is the rule (decode), else WIDE_TILE."""
    return 1 if num_tokens <= num_seqs else WIDE_TILE


def max_tiles(num_tokens: int, num_seqs: int, size: int) -> int:
    """Most tiles that T tokens of S sequences can need: each sequence wastes at most C - 1 rows of its last tile."""
    return min(num_tokens, (num_tokens + num_seqs * (size - 1)) // size)


def query_lengths(cu_q_lens: Int[Array, "S+1"], num_seqs: Int[Array, ""]) -> Int[Array, "S"]:
    """Query tokens of each sequence; 0 at and past `num_seqs`, whatever stands in `cu_q_lens` there."""
    live = jnp.arange(cu_q_lens.shape[0] - 1, dtype=jnp.int32) < num_seqs
    return jnp.where(live, jnp.maximum(cu_q_lens[1:] - cu_q_lens[:-1], 0), 0)


def cut_tiles(
    q_lens: Int[Array, "S"], cu_q_lens: Int[Array, "S+1"], kv_lens: Int[Array, "S"], size: int, bound: int
) -> QueryTiles:
    """Cut the sequences with `q_lens > 0` into tiles of `size` rows, at most `bound` of them, in row order."""
    counts = lax.div(q_lens + (size - 1), jnp.int32(size))
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    tile = jnp.arange(bound, dtype=jnp.int32)
    seq = jnp.minimum((tile[:, None] >= ends).sum(1, dtype=jnp.int32), q_lens.shape[0] - 1)
    first_row = (tile - (ends - counts)[seq]) * size  # counted from the sequence's first query token
    num_tiles = ends[-1]
    num_rows = jnp.where(tile < num_tiles, jnp.minimum(q_lens[seq] - first_row, size), 0)
    return QueryTiles(
        seq,
        cu_q_lens[seq] + first_row,
        num_rows,
        (kv_lens - q_lens)[seq] + first_row,
        num_tiles,
        jnp.arange(size, dtype=jnp.int32),
    )


def locate_rows(num_tokens: int, q_lens: Int[Array, "S"], cu_q_lens: Int[Array, "S+1"], size: int) -> Rows:
    """Where each flattened token stands in the tiles that `cut_tiles` makes of the same lengths."""
    counts = lax.div(q_lens + (size - 1), jnp.int32(size))
    first_tile = jnp.cumsum(counts, dtype=jnp.int32) - counts
    starts = cu_q_lens[:-1]
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = (row[:, None] >= starts) & (row[:, None] < starts + q_lens)
    seq = lax.argmax(owner, 1, jnp.int32)
    within = row - starts[seq]
    return Rows(first_tile[seq] + lax.div(within, jnp.int32(size)), lax.rem(within, jnp.int32(size)), owner.any(1))
