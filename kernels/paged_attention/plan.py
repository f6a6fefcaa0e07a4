"""What the layers of a decoder share: query tiles, where each walks in its context, and a table that is safe to read."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from .checks import check_index, check_size, check_window, to_int32
from .tiles import QueryTiles, Rows, cut_tiles, locate_rows, max_tiles, query_lengths, tile_size

# Tokens of context that one trip of a CPU loop reads. On two cores with AVX2 (9 query heads, 3 KV heads, head_dim 64, block
# 16) 128 was best or near it: 32 took 1.5 to 2 times as long at 256 tokens of context, 512 nearly 4 times at ragged lengths.
ROW_CHUNK = 128
TILE_CHUNK = 128


class Walk(NamedTuple):
    """Tiles, and the blocks of its sequence that each has to see: `first_block` up to `end_block`."""

    tiles: QueryTiles
    first_block: Int[Array, "P"]
    end_block: Int[Array, "P"]


class Items(NamedTuple):
    """The chunks of blocks that the tiles of a walk have to see, flat: tile after tile, each from its first block on.

    Attributes:
        tile: whose chunk it is.
        starts: whether it is the tile's first.
        first_key: position of its first token.
        blocks: ids of its blocks. The last chunk of a tile may reach past the table; what is read there is to be masked.
        num_items: how many are real.
    """

    tile: Int[Array, "I"]
    starts: Bool[Array, "I"]
    first_key: Int[Array, "I"]
    blocks: Int[Array, "I blocks"]
    num_items: Int[Array, ""]


def list_items(walk: Walk, tables: Int[Array, "S M"], block_size: int, chunk_tokens: int) -> Items:
    """The items of a walk, in chunks of `chunk_tokens`."""
    width, num_tiles = tables.shape[1], walk.first_block.shape[0]
    per_item = max(1, min(chunk_tokens // block_size, width))
    bound = num_tiles * -(-width // per_item)
    counts = lax.div(jnp.maximum(walk.end_block - walk.first_block, 0) + (per_item - 1), jnp.int32(per_item))
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    # The tile of item i is how many tiles have ended by then: a scatter and a sum, where a search would be a loop.
    ended = jnp.zeros(bound, jnp.int32).at[ends].add(1, mode="drop")
    tile = jnp.minimum(jnp.cumsum(ended, dtype=jnp.int32), num_tiles - 1)
    trip = jnp.arange(bound, dtype=jnp.int32) - (ends - counts)[tile]
    block = walk.first_block[tile] + trip * per_item
    column = jnp.clip(block[:, None] + jnp.arange(per_item, dtype=jnp.int32), 0, width - 1)
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
    """Computed once a step for each block table and window; an implementation takes from it what it needs.

    Attributes:
        tables: the block tables, every id inside the pool.
        every: all sequences in tiles of C rows; C is 1 where one token a sequence is the rule.
        wide: the sequences with more than one query row in tiles of C rows, and their items.
        single: the sequences with one query row, a tile each, and their items. All sequences where C is 1.
        place, wide_place, single_place: where each token stands in those tiles.
        planned: what it was made for.
    """

    tables: Int[Array, "S M"]
    every: Walk
    wide: tuple[QueryTiles, Items]
    single: tuple[QueryTiles, Items]
    place: Rows
    wide_place: Rows
    single_place: Rows
    planned: Planned = field(metadata=dict(static=True))


def plan_attention(
    num_tokens: int,
    kv_lens: Int[Array, "S"],
    block_tables: Int[Array, "S M"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, ""] | int,
    *,
    num_blocks: int,
    block_size: int,
    window: int | None,
) -> AttentionPlan:
    """The plan for T = `num_tokens` flattened tokens; the arguments mean what they mean to `ragged_paged_attention`.

    Row numbers, lengths and block ids that point outside the arrays are brought inside here, for all implementations.

    Raises:
        ValueError, TypeError: an argument is not as `ragged_paged_attention` takes it, or a size is not positive.
    """
    check_index(kv_lens, block_tables, cu_q_lens, num_seqs)
    for name, size in dict(num_tokens=num_tokens, num_blocks=num_blocks, block_size=block_size).items():
        check_size(name, size)
    check_window(window)
    num_seqs = to_int32(num_seqs).reshape(())
    cu_q_lens = jnp.clip(to_int32(cu_q_lens), 0, num_tokens)
    kv_lens = jnp.clip(to_int32(kv_lens), 0, block_tables.shape[1] * block_size)
    tables = jnp.clip(to_int32(block_tables), 0, num_blocks - 1)
    size = tile_size(num_tokens, kv_lens.shape[0])
    q_lens = query_lengths(cu_q_lens, num_seqs)

    def walk(q_lens, size) -> Walk:
        tiles = cut_tiles(q_lens, cu_q_lens, kv_lens, size, max_tiles(num_tokens, kv_lens.shape[0], size))
        first = jnp.zeros_like(tiles.position) if window is None else jnp.maximum(tiles.position - (window - 1), 0)
        end = lax.div(tiles.position + tiles.num_rows + (block_size - 1), jnp.int32(block_size))
        return Walk(tiles, lax.div(first, jnp.int32(block_size)), jnp.where(tiles.num_rows > 0, end, 0))

    def items(q_lens, size, chunk_tokens) -> tuple[QueryTiles, Items]:
        walked = walk(q_lens, size)
        return walked.tiles, list_items(walked, tables, block_size, chunk_tokens)

    many = jnp.where(q_lens > 1, q_lens, 0)
    one = q_lens if size == 1 else (q_lens == 1).astype(jnp.int32)
    return AttentionPlan(
        tables=tables,
        every=walk(q_lens, size),
        wide=items(many, size, TILE_CHUNK),
        single=items(one, 1, ROW_CHUNK),
        place=locate_rows(num_tokens, q_lens, cu_q_lens, size),
        wide_place=locate_rows(num_tokens, many, cu_q_lens, size),
        single_place=locate_rows(num_tokens, one, cu_q_lens, 1),
        planned=Planned(num_tokens, *block_tables.shape, num_blocks, block_size, window),
    )
