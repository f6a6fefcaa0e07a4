"""What the layers of a decoder share: query tiles, the blocks each tile sees, and a safe table."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, Integer

from .checks import AnyArray, check_index, check_size, check_window, to_int32
from .items import Items, RowGroups, Walk, group_rows, list_items
from .tiles import QueryTiles, Rows, cut_tiles, locate_rows, max_tiles, query_lengths, tile_size

# Tokens of context that one trip of a CPU loop over tiles reads. On two cores with AVX2 (9 query
# heads, 3 KV heads, head_dim 64, block 16) 128 was best or near it.
TILE_CHUNK = 128


class Planned(NamedTuple):
    """What a plan is for; all of it static."""

    num_tokens: int
    num_seqs: int
    table_width: int
    num_blocks: int
    block_size: int
    window: int | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionPlan:
    """Computed once a step for each block table and window; each implementation uses a part of it.

    Attributes:
        tables: the block tables, every id inside the pool.
        every: all sequences in tiles of C rows; C is 1 where one token a sequence is the rule.
        wide: the sequences with more than one query row in tiles of C rows, and their items.
        rows: the sequences with one query row, a tile each. All rows where C is 1.
        single: these in groups.
        place, wide_place, row_place, single_place: where each token is in those tiles.
        planned: what the plan was made for.
    """

    tables: Int[Array, "S M"]
    every: Walk
    wide: tuple[QueryTiles, Items]
    rows: QueryTiles
    single: RowGroups
    place: Rows
    wide_place: Rows
    row_place: Rows
    single_place: Rows
    planned: Planned = field(metadata=dict(static=True))


class _Sequences(NamedTuple):
    """The lengths and tables of the sequences, clamped to the arrays, and what they are for."""

    cu_q_lens: Int[Array, "S+1"]
    kv_lens: Int[Array, "S"]
    tables: Int[Array, "S M"]
    planned: Planned

    def walk(self, q_lens: Int[Array, "S"], size: int, bound: int) -> Walk:
        """Cut the sequences with `q_lens > 0` into `bound` tiles of `size` rows or fewer.

        Example: rows 15 to 18, blocks of 4, window 8: keys 8 to 18, first_block 2, end_block 5.
        """
        planned, block_size = self.planned, jnp.int32(self.planned.block_size)
        tiles = cut_tiles(q_lens, self.cu_q_lens, self.kv_lens, size, bound)
        if planned.window is None:
            first_key = jnp.zeros_like(tiles.position)
        else:
            first_key = jnp.maximum(tiles.position - (planned.window - 1), 0)
        end = pl.cdiv(tiles.position + tiles.num_rows, jnp.int32(planned.block_size))
        end = jnp.where(tiles.num_rows > 0, end, 0)
        return Walk(tiles, lax.div(first_key, block_size), end)


def plan_attention(
    num_tokens: int,
    kv_lens: Integer[AnyArray, "S"],
    block_tables: Integer[AnyArray, "S M"],
    cu_q_lens: Integer[AnyArray, "S+1"],
    num_seqs: Integer[AnyArray, "..."] | int,
    *,
    num_blocks: int,
    block_size: int,
    window: int | None,
) -> AttentionPlan:
    """Plan the attention of T = `num_tokens` flattened tokens.

    The arguments mean what they mean to `ragged_paged_attention`. Row numbers, lengths and block
    ids that point outside the arrays are clamped here, for all implementations.

    Raises:
        ValueError, TypeError: an argument is not as `ragged_paged_attention` takes it, or a size
            is not positive.
    """
    check_index(kv_lens, block_tables, cu_q_lens, num_seqs)
    check_size("num_tokens", num_tokens)
    check_size("num_blocks", num_blocks)
    check_size("block_size", block_size)
    check_window(window)
    seqs, width = block_tables.shape
    planned = Planned(num_tokens, seqs, width, num_blocks, block_size, window)
    num_seqs = to_int32(num_seqs).reshape(())
    cu_q_lens = jnp.clip(to_int32(cu_q_lens), 0, num_tokens)
    kv_lens = jnp.clip(to_int32(kv_lens), 0, block_tables.shape[1] * block_size)
    tables = jnp.clip(to_int32(block_tables), 0, num_blocks - 1)
    size = tile_size(num_tokens, kv_lens.shape[0])
    q_lens = query_lengths(cu_q_lens, num_seqs)
    many = jnp.where(q_lens > 1, q_lens, 0)
    one = q_lens if size == 1 else (q_lens == 1).astype(jnp.int32)
    sequences = _Sequences(cu_q_lens, kv_lens, tables, planned)
    bound = max_tiles(num_tokens, seqs, size)
    wide = sequences.walk(many, size, bound)
    rows = sequences.walk(one, 1, min(num_tokens, seqs))
    single = group_rows(rows, tables, block_size)
    row_place = locate_rows(num_tokens, one, cu_q_lens, 1)
    return AttentionPlan(
        tables=tables,
        every=sequences.walk(q_lens, size, bound),
        wide=(wide.tiles, list_items(wide, tables, block_size, TILE_CHUNK)),
        rows=rows.tiles,
        single=single,
        place=locate_rows(num_tokens, q_lens, cu_q_lens, size),
        wide_place=locate_rows(num_tokens, many, cu_q_lens, size),
        row_place=row_place,
        single_place=row_place._replace(tile=single.rank[row_place.tile]),
        planned=planned,
    )
