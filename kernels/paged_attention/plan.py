"""What the layers of a decoder share: query tiles, the blocks each tile sees, and a safe table."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int, Integer

from .checks import AnyArray, check_index, check_size, check_window, to_int32
from .tiles import QueryTiles, Rows, cut_tiles, locate_rows, max_tiles, query_lengths, tile_size

# Tokens of context that one trip of a CPU loop reads. On two cores with AVX2 (9 query heads, 3 KV
# heads, head_dim 64, block 16) 128 was best or near it: 32 took 1.5 to 2 times as long at 256
# tokens of context, 512 nearly 4 times at ragged lengths.
ROW_CHUNK = 128
TILE_CHUNK = 128


class Walk(NamedTuple):
    """Tiles, and the blocks of its sequence that each sees: `first_block` to `end_block - 1`."""

    tiles: QueryTiles
    first_block: Int[Array, "P"]
    end_block: Int[Array, "P"]


class Items(NamedTuple):
    """The chunks of blocks that the tiles of a walk have to see: tile after tile, in order.

    Attributes:
        tile: tile of each chunk.
        is_first: whether the chunk is its tile's first.
        first_key: position of the chunk's first token.
        blocks: ids of the chunk's blocks. The last chunk of a tile may reach past the table; what
            is read there is to be masked.
        num_items: number of real chunks.
    """

    tile: Int[Array, "I"]
    is_first: Bool[Array, "I"]
    first_key: Int[Array, "I"]
    blocks: Int[Array, "I blocks"]
    num_items: Int[Array, ""]


def list_items(walk: Walk, tables: Int[Array, "S M"], block_size: int, chunk_tokens: int) -> Items:
    """List the chunks of `chunk_tokens` tokens of a walk.

    Example: two tiles that see the blocks 2 to 4 and block 0, blocks of 16, chunks of 32 tokens:
    tile [0, 0, 1], is_first [yes, no, yes], first_key [32, 64, 0], table columns
    [[2, 3], [4, 5], [0, 1]].
    """
    width, num_tiles = tables.shape[1], walk.first_block.shape[0]
    per_item = max(1, min(chunk_tokens // block_size, width))
    bound = num_tiles * pl.cdiv(width, per_item)
    counts = pl.cdiv(jnp.maximum(walk.end_block - walk.first_block, 0), jnp.int32(per_item))
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # The tile of item i is the number of tiles that end at or before i: a scatter and a sum, where
    # a search would be a loop.
    ended = jnp.zeros(bound, jnp.int32).at[ends].add(1, mode="drop")
    tile = jnp.minimum(jnp.cumsum(ended, dtype=jnp.int32), num_tiles - 1)
    trip = jnp.arange(bound, dtype=jnp.int32) - (ends - counts)[tile]
    block = walk.first_block[tile] + trip * per_item
    column = block[:, None] + jnp.arange(per_item, dtype=jnp.int32)[None]
    column = jnp.clip(column, 0, width - 1)
    blocks = tables[walk.tiles.seq[tile][:, None], column]
    return Items(tile, trip == 0, block * block_size, blocks, ends[-1])


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
        single: the sequences with one query row, a tile each, and their items. All sequences
            where C is 1.
        place, wide_place, single_place: where each token is in those tiles.
        planned: what the plan was made for.
    """

    tables: Int[Array, "S M"]
    every: Walk
    wide: tuple[QueryTiles, Items]
    single: tuple[QueryTiles, Items]
    place: Rows
    wide_place: Rows
    single_place: Rows
    planned: Planned = field(metadata=dict(static=True))


class _Sequences(NamedTuple):
    """The lengths and tables of the sequences, clamped to the arrays, and what they are for."""

    cu_q_lens: Int[Array, "S+1"]
    kv_lens: Int[Array, "S"]
    tables: Int[Array, "S M"]
    planned: Planned

    def walk(self, q_lens: Int[Array, "S"], size: int) -> Walk:
        """Cut the sequences with `q_lens > 0` into tiles of `size` rows that know their blocks.

        Example: rows 15 to 18, blocks of 4, window 8: keys 8 to 18, first_block 2, end_block 5.
        """
        planned, block_size = self.planned, jnp.int32(self.planned.block_size)
        bound = max_tiles(planned.num_tokens, planned.num_seqs, size)
        tiles = cut_tiles(q_lens, self.cu_q_lens, self.kv_lens, size, bound)
        if planned.window is None:
            first_key = jnp.zeros_like(tiles.position)
        else:
            first_key = jnp.maximum(tiles.position - (planned.window - 1), 0)
        end = pl.cdiv(tiles.position + tiles.num_rows, jnp.int32(planned.block_size))
        end = jnp.where(tiles.num_rows > 0, end, 0)
        return Walk(tiles, lax.div(first_key, block_size), end)

    def items(
        self, q_lens: Int[Array, "S"], size: int, chunk_tokens: int
    ) -> tuple[QueryTiles, Items]:
        """Cut the sequences with `q_lens > 0` into tiles, and their contexts into chunks."""
        walk = self.walk(q_lens, size)
        return walk.tiles, list_items(walk, self.tables, self.planned.block_size, chunk_tokens)


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
    return AttentionPlan(
        tables=tables,
        every=sequences.walk(q_lens, size),
        wide=sequences.items(many, size, TILE_CHUNK),
        single=sequences.items(one, 1, ROW_CHUNK),
        place=locate_rows(num_tokens, q_lens, cu_q_lens, size),
        wide_place=locate_rows(num_tokens, many, cu_q_lens, size),
        single_place=locate_rows(num_tokens, one, cu_q_lens, 1),
        planned=planned,
    )
