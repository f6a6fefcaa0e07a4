"""The work of the CPU form: for tiles and for groups of rows the chunks of context they see."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from ..running_sum import running_sum
from .tiles import QueryTiles

# Rows that one trip of a CPU loop serves, and tokens of each row's context that it reads. With
# fewer rows than a group has, a trip reads twice as many tokens. On two cores with AVX2 (9 query
# heads, 3 KV heads, head_dim 64, block 16) 64 rows took, in ms a layer with 8 rows x 64 tokens,
# 16 x 32, 4 x 128, 8 x 128: at 16 tokens of context 0.9, 0.8, 1.9, 1.9; at 160 tokens 5.1, 4.8,
# 5.8, 5.7; one of 1000 tokens among 40s 4.0, 5.9, 4.0, 4.9. One row a trip: 3.0, 8.0, 4.6.
GROUP_SIZE = 8
ROW_CHUNK = 64


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
        blocks: ids of the chunk's blocks. Past the last block of a tile they are 0; what is read
            there is to be masked.
        num_items: number of real chunks.
    """

    tile: Int[Array, "I"]
    is_first: Bool[Array, "I"]
    first_key: Int[Array, "I"]
    blocks: Int[Array, "I blocks"]
    num_items: Int[Array, ""]


class RowGroups(NamedTuple):
    """The tiles of one row, the longest contexts first, in groups of G.

    One trip of a loop adds a chunk of each of its group's rows. A group has as many chunks as its
    first row, so the others waste little.

    Attributes:
        start: row of each among the T flattened tokens; any row where there is none.
        position: position of each in its sequence; -1 where there is no row, which sees no key.
        rank: place of each tile among the rows.
        group: group of each item.
        first_key: position of the first token of each row's chunk, by item.
        blocks: ids of the chunks' blocks. Past a row's last block they are 0.
        num_items: number of real items.
    """

    start: Int[Array, "groups G"]
    position: Int[Array, "groups G"]
    rank: Int[Array, "P"]
    group: Int[Array, "I"]
    first_key: Int[Array, "I G"]
    blocks: Int[Array, "I G blocks"]
    num_items: Int[Array, ""]


def list_items(walk: Walk, tables: Int[Array, "S M"], block_size: int, chunk_tokens: int) -> Items:
    """List the chunks of `chunk_tokens` tokens of a walk.

    Example: two tiles that see the blocks 2 to 4 and block 0, blocks of 16, chunks of 32 tokens:
    tile [0, 0, 1], is_first [yes, no, yes], first_key [32, 64, 0], table columns
    [[2, 3], [4, none], [0, none]].
    """
    width = tables.shape[1]
    per_item = max(1, min(chunk_tokens // block_size, width))
    counts = pl.cdiv(jnp.maximum(walk.end_block - walk.first_block, 0), jnp.int32(per_item))
    tile, trip, num_items = _flatten(counts, pl.cdiv(width, per_item))
    block = walk.first_block[tile] + trip * per_item
    seq, end = walk.tiles.seq[tile], walk.end_block[tile]
    blocks = _read_tables(tables, seq, block, end, per_item)
    return Items(tile, trip == 0, block * block_size, blocks, num_items)


def group_rows(walk: Walk, tables: Int[Array, "S M"], block_size: int) -> RowGroups:
    """Group the tiles of a walk, which are of one row.

    Example: contexts of 1, 9 and 3 chunks, groups of two: rank [2, 0, 1], rows [[1, 2], [0, none]],
    items 0 to 8 of group 0 and item 9 of group 1.
    """
    width, num_rows = tables.shape[1], walk.first_block.shape[0]
    num_groups = pl.cdiv(num_rows, GROUP_SIZE)
    size = pl.cdiv(num_rows, num_groups)
    per_item = (ROW_CHUNK if size == GROUP_SIZE else 2 * ROW_CHUNK) // block_size
    per_item = max(1, min(per_item, width))
    chunks = pl.cdiv(jnp.maximum(walk.end_block - walk.first_block, 0), jnp.int32(per_item))
    # Compares and sums: a sort and a scatter are loops.
    row, after = jnp.arange(num_rows, dtype=jnp.int32), chunks[:, None]
    is_before = (chunks[None] > after) | ((chunks[None] == after) & (row[None] < row[:, None]))
    rank = is_before.sum(1, dtype=jnp.int32)
    place = jnp.arange(num_groups * size, dtype=jnp.int32).reshape(num_groups, size)
    is_there = rank[None, None] == place[..., None]
    order = jnp.where(is_there, row[None, None], 0).sum(2, dtype=jnp.int32)
    is_row = place < num_rows
    counts = jnp.where(is_row, chunks[order], 0)[:, 0]
    group, trip, num_items = _flatten(counts, pl.cdiv(width, per_item))
    tile = order[group]
    block = walk.first_block[tile] + trip[:, None] * per_item
    end = jnp.where(is_row, walk.end_block[order], 0)[group]
    blocks = _read_tables(tables, walk.tiles.seq[tile], block, end, per_item)
    is_row &= walk.tiles.num_rows[order] > 0
    position = jnp.where(is_row, walk.tiles.position[order], -1)
    return RowGroups(
        walk.tiles.start[order], position, rank, group, block * block_size, blocks, num_items
    )


def _flatten(
    counts: Int[Array, "P"], most: int
) -> tuple[Int[Array, "I"], Int[Array, "I"], Int[Array, ""]]:
    """Return for each item of P lists of `counts` items its list, its place there, and the sum.

    Example: counts [2, 0, 1] -> lists [0, 0, 2, ...], places [0, 1, 0, ...], 3.
    """
    ends = running_sum(counts)
    item = jnp.arange(counts.shape[0] * most, dtype=jnp.int32)
    # The list of an item is the number of lists that end at or before it: one kernel, where a
    # search is a loop.
    of_item = (item[:, None] >= ends[None]).sum(1, dtype=jnp.int32)
    of_item = jnp.minimum(of_item, counts.shape[0] - 1)
    return of_item, item - (ends - counts)[of_item], ends[-1]


def _read_tables(tables, seq, block, end, num_blocks: int):
    """Return the ids of `num_blocks` blocks of each sequence from `block` on; 0 from `end` on.

    Block 0 stays in the cache, and what may follow in a table does not.
    """
    offsets = jnp.arange(num_blocks, dtype=jnp.int32)
    column = block[..., None] + offsets.reshape(*(1,) * block.ndim, -1)
    ids = tables[seq[..., None], jnp.clip(column, 0, tables.shape[1] - 1)]
    return jnp.where(column < end[..., None], ids, 0)
