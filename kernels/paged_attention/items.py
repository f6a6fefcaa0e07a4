"""The work of the CPU form: for tiles and for groups of rows the chunks of context they see."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from ..running_sum import running_sum
from .tiles import QueryTiles

# Rows that one trip of a CPU loop serves, and tokens of each row's context that it reads. With
# fewer rows than a group has, a trip reads twice as many tokens. LLVM unrolls inner loops of up to
# 64 numbers to scalars, so chunks are longer. On two cores with AVX-512 (9 query heads, 3 KV heads,
# head_dim 64, block 16) 64 rows took, in ms a layer with 16 rows x 96 tokens, 16 x 64, 16 x 128,
# 8 x 64, 8 x 128, 32 x 32: at 145 tokens of context 2.0, 2.4, 2.4, 3.0, 2.9, 2.0; at 380 tokens
# 4.3, 5.0, 4.1, 6.1, 4.9, 4.8; at 45 to 245 tokens 2.0, 2.2, 2.1 with 16 rows.
GROUP_SIZE = 16
ROW_CHUNK = 96

# Tiles that one trip of a CPU loop serves. 512 tokens of 4 sequences took 3.2, 2.8, 2.3, 2.1 ms a
# layer with 1, 2, 4, 8 tiles; 512 of 2 sequences 4.4, 4.0, 3.4, 3.6. Kernels of its own for each
# tile: 2.5, 2.0, 1.8 with 2, 4, 8, but with 4 a ladder of widths took 81 CPU s to compile for 58.
NUM_SHARES = 4


class Walk(NamedTuple):
    """Tiles, and the blocks of its sequence that each sees: `first_block` to `end_block - 1`."""

    tiles: QueryTiles
    first_block: Int[Array, "P"]
    end_block: Int[Array, "P"]


class Shares(NamedTuple):
    """The items cut into W shares, which a CPU's cores work on at the same time.

    A share begins where a tile begins, so no tile is in two of them: what a row attends to is
    added in one order, whatever else is in the batch.

    Attributes:
        first_item: first item of each share, and the end of the last.
        first_tile: the first tile of each share. It has those up to the next share's.
    """

    first_item: Int[Array, "W+1"]
    first_tile: Int[Array, "W"]


class Items(NamedTuple):
    """The chunks of blocks that the tiles of a walk have to see: tile after tile, in order.

    Attributes:
        tile: tile of each chunk.
        first_key: position of the chunk's first token.
        blocks: ids of the chunk's blocks. Past the last block of a tile they are 0; what is read
            there is to be masked.
        shares: the real chunks, cut into shares.
    """

    tile: Int[Array, "I"]
    first_key: Int[Array, "I"]
    blocks: Int[Array, "I blocks"]
    shares: Shares


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
        is_shared: whether the blocks of all rows are those of the item's first row.
        num_items: number of real items.
    """

    start: Int[Array, "groups G"]
    position: Int[Array, "groups G"]
    rank: Int[Array, "P"]
    group: Int[Array, "I"]
    first_key: Int[Array, "I G"]
    blocks: Int[Array, "I G blocks"]
    is_shared: Bool[Array, "I"]
    num_items: Int[Array, ""]


def list_items(walk: Walk, tables: Int[Array, "S M"], block_size: int, chunk_tokens: int) -> Items:
    """List the chunks of `chunk_tokens` tokens of a walk.

    Example: two tiles that see the blocks 2 to 4 and block 0, blocks of 16, chunks of 32 tokens:
    tile [0, 0, 1], first_key [32, 64, 0], table columns [[2, 3], [4, none], [0, none]].
    """
    width = tables.shape[1]
    per_item = max(1, min(chunk_tokens // block_size, width))
    counts = pl.cdiv(jnp.maximum(walk.end_block - walk.first_block, 0), jnp.int32(per_item))
    tile, trip, ends = _flatten(counts, pl.cdiv(width, per_item))
    block = walk.first_block[tile] + trip * per_item
    seq, end = walk.tiles.seq[tile], walk.end_block[tile]
    blocks, _ = _read_tables(tables, seq, block, end, per_item)
    return Items(tile, block * block_size, blocks, share_items(ends - counts, ends[-1]))


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
    group, trip, ends = _flatten(counts, pl.cdiv(width, per_item))
    tile = order[group]
    block = walk.first_block[tile] + trip[:, None] * per_item
    end = jnp.where(is_row, walk.end_block[order], 0)[group]
    blocks, is_block = _read_tables(tables, walk.tiles.seq[tile], block, end, per_item)
    is_shared = ((blocks == blocks[:, :1]) | ~is_block).all((1, 2))
    is_row &= walk.tiles.num_rows[order] > 0
    position = jnp.where(is_row, walk.tiles.position[order], -1)
    start, first_key = walk.tiles.start[order], block * block_size
    return RowGroups(start, position, rank, group, first_key, blocks, is_shared, ends[-1])


def _flatten(
    counts: Int[Array, "P"], most: int
) -> tuple[Int[Array, "I"], Int[Array, "I"], Int[Array, "P"]]:
    """Return for each item of P lists of `counts` items its list and its place there; lists' ends.

    Example: counts [2, 0, 1] -> lists [0, 0, 2, ...], places [0, 1, 0, ...], ends [2, 2, 3].
    """
    ends = running_sum(counts)
    item = jnp.arange(counts.shape[0] * most, dtype=jnp.int32)
    # The list of an item is the number of lists that end at or before it: one kernel, where a
    # search is a loop.
    of_item = (item[:, None] >= ends[None]).sum(1, dtype=jnp.int32)
    of_item = jnp.minimum(of_item, counts.shape[0] - 1)
    return of_item, item - (ends - counts)[of_item], ends


def share_items(begins: Int[Array, "P"], num_items: Int[Array, ""]) -> Shares:
    """Cut `num_items` items of tiles whose items begin at `begins` into NUM_SHARES shares.

    Example: tiles that begin at 0, 3, 3 and 4, of 6 items, in two shares: first_item [0, 3, 6],
    first_tile [0, 1].
    """
    share = jnp.arange(1, NUM_SHARES, dtype=jnp.int32)
    wanted = lax.div(num_items * share, jnp.int32(NUM_SHARES))[:, None]
    inner = jnp.where(begins[None] >= wanted, begins[None], num_items).min(1)
    first_tile = (begins[None] < inner[:, None]).sum(1, dtype=jnp.int32)
    first_item = jnp.concatenate([jnp.zeros_like(inner, shape=1), inner, num_items[None]])
    return Shares(first_item, jnp.pad(first_tile, (1, 0)))


def _read_tables(tables, seq, block, end, num_blocks: int):
    """Return the ids of `num_blocks` blocks of each sequence from `block` on, and which are real.

    From `end` on they are 0. Block 0 stays in the cache, and what may follow in a table does not.
    """
    offsets = jnp.arange(num_blocks, dtype=jnp.int32)
    column = block[..., None] + offsets.reshape(*(1,) * block.ndim, -1)
    ids = tables[seq[..., None], jnp.clip(column, 0, tables.shape[1] - 1)]
    is_block = column < end[..., None]
    return jnp.where(is_block, ids, 0), is_block
