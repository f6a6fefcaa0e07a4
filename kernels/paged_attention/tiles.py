"""Query tiles: the flattened tokens cut into tiles of up to C consecutive tokens of one sequence.

Everything here is compares, sums and gathers on small arrays: no search loop, few kernels. It is
equal for every layer of a decoder, so XLA computes it once a step.

The examples below share one batch: three sequences with 5, 0 and 1 query tokens, that is
cu_q_lens [0, 5, 5, 6], of 20, 7 and 9 tokens, in tiles of C = 4.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from ..running_sum import running_sum

WIDE_TILE = 32


class QueryTiles(NamedTuple):
    """P tiles, of which the first `num_tiles` are real; the others have no rows.

    Attributes:
        seq: sequence of each tile.
        start: first row of each tile among the T flattened tokens.
        num_rows: rows of each tile, 1 to C; 0 in a tile that is not real.
        position: position in its sequence of each tile's first row.
        num_tiles: number of real tiles.
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
        """Return C."""
        return self.offsets.shape[0]


class Rows(NamedTuple):
    """For each of the T flattened tokens its tile, its offset there, and if a sequence owns it."""

    tile: Int[Array, "T"]
    offset: Int[Array, "T"]
    is_owned: Bool[Array, "T"]


def tile_size(num_tokens: int, num_seqs: int) -> int:
    """Return C for T tokens of at most S sequences.

    It is 1 where one token a sequence is the rule (decode), else WIDE_TILE.
    """
    return 1 if num_tokens <= num_seqs else WIDE_TILE


def max_tiles(num_tokens: int, num_seqs: int, size: int) -> int:
    """Return the most tiles that T tokens of S sequences can need.

    Each sequence wastes at most C - 1 rows of its last tile.

    Example: 6 tokens of 3 sequences -> (6 + 3 * 3) // 4 = 3.
    """
    return min(num_tokens, (num_tokens + num_seqs * (size - 1)) // size)


def query_lengths(cu_q_lens: Int[Array, "E"], num_seqs: Int[Array, ""]) -> Int[Array, "E-1"]:
    """Return the query tokens of each sequence; 0 from `num_seqs` on, whatever `cu_q_lens` holds.

    Example: cu_q_lens [0, 5, 5, 6, 99], 3 sequences -> [5, 0, 1, 0].
    """
    is_live = jnp.arange(cu_q_lens.shape[0] - 1, dtype=jnp.int32) < num_seqs
    return jnp.where(is_live, jnp.maximum(cu_q_lens[1:] - cu_q_lens[:-1], 0), 0)


def cut_tiles(
    q_lens: Int[Array, "S"],
    cu_q_lens: Int[Array, "S+1"],
    kv_lens: Int[Array, "S"],
    size: int,
    bound: int,
) -> QueryTiles:
    """Cut the sequences with `q_lens > 0` into tiles of `size` rows, `bound` at most, in row order.

    Example: seq [0, 0, 2], start [0, 4, 5], num_rows [4, 1, 1], position [15, 19, 8].
    """
    counts = pl.cdiv(q_lens, jnp.int32(size))
    ends = running_sum(counts)
    tile = jnp.arange(bound, dtype=jnp.int32)
    # The sequence of a tile is the number of sequences that have ended before it.
    num_ended = (tile[:, None] >= ends[None]).sum(1, dtype=jnp.int32)
    seq = jnp.minimum(num_ended, q_lens.shape[0] - 1)
    first_row = (tile - (ends - counts)[seq]) * size  # from the sequence's first query token
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


def locate_rows(
    num_tokens: int, q_lens: Int[Array, "S"], cu_q_lens: Int[Array, "S+1"], size: int
) -> Rows:
    """Locate each flattened token in the tiles that `cut_tiles` makes of the same lengths.

    Example: tile [0, 0, 0, 0, 1, 2], offset [0, 1, 2, 3, 0, 0].
    """
    counts = pl.cdiv(q_lens, jnp.int32(size))
    first_tile = running_sum(counts) - counts
    starts = cu_q_lens[:-1]
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    owns = (row[:, None] >= starts[None]) & (row[:, None] < (starts + q_lens)[None])
    seq = lax.argmax(owns, 1, jnp.int32)
    in_seq = row - starts[seq]
    return Rows(
        first_tile[seq] + lax.div(in_seq, jnp.int32(size)),
        lax.rem(in_seq, jnp.int32(size)),
        owns.any(1),
    )
