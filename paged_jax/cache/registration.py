"""Registering full blocks in the prefix directory, in passes of up to `ENTRIES_A_PASS` blocks.

    gather   the blocks that the rows have not registered yet, with their tokens, hash and parent
    find     the contents that are registered already, and twins within the pass
    place    a free way in its set for each of the others, and the new content ids
    write    the new entries, and the mates of other groups

A pass takes many blocks of one row, or the next block of many rows. So two rows with one content
meet: in one pass by comparison, in a later pass by lookup.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from paged_jax.arrays import ragged_indices
from paged_jax.cache.block_table import BlockTables
from paged_jax.cache.content_hash import hash_blocks, to_key
from paged_jax.cache.prefix_directory import (
    NO_ID,
    PrefixDirectory,
    find_candidates,
    follow_chain,
    start_rows,
)

ENTRIES_A_PASS = 32
LONG = 8  # more blocks of one row than this are registered in passes of their own


class Entries(NamedTuple):
    """The E blocks of a pass: row after row, column after column, padding behind.

    row      3 3 5 . .      rank      0 1 0 . .
    column   4 5 0 . .      is_first  T F T . .
    """

    row: Int[Array, "E"]
    column: Int[Array, "E"]
    rank: Int[Array, "E"]  # among the row's entries
    is_valid: Bool[Array, "E"]
    is_first: Bool[Array, "E"]  # of the row's entries
    is_last: Bool[Array, "E"]
    content: Int[Array, "E B"]
    hash: UInt[Array, "E"]
    key: UInt[Array, "E"]
    parent: Int[Array, "E"]  # of the row's first entry
    block: Int[Array, "E"]  # in the key group
    mates: tuple[Int[Array, "E"], ...]  # in each other group


class Known(NamedTuple):
    """What is registered already: the ways of each set, and the block and id found there."""

    ways: Int[Array, "E ways"]
    block: Int[Array, "E"]
    id: Int[Array, "E"]
    is_found: Bool[Array, "E"]
    is_twin: Bool[Array, "E"]  # equal to an earlier new entry of this pass: its leader
    leader: Int[Array, "E"]
    is_fresh: Bool[Array, "E"]  # neither, and there is a block to register


class Placed(NamedTuple):
    """The way of each entry that is inserted, and every entry's content id and parent."""

    is_inserted: Bool[Array, "E"]
    set_index: Int[Array, "E"]
    way: Int[Array, "E"]
    id: Int[Array, "E"]
    parent: Int[Array, "E"]


def register(
    directory: PrefixDirectory,
    tables: BlockTables,
    tokens: Int[Array, "R L"],
    rows: Int[Array, "k"],
    num_blocks: Int[Array, "k"],
) -> PrefixDirectory:
    """Bring each row's registration up to its first `num_blocks` blocks, all of them full.

    Rows out of range are padding.
    """

    def pending(directory):
        known = directory.num_registered.at[rows].get(mode="fill", fill_value=2**30)
        last_id = directory.last_id.at[rows].get(mode="fill", fill_value=NO_ID)
        return jnp.where(last_id == NO_ID, 0, jnp.maximum(num_blocks - known, 0))

    def register_pass(carry):
        directory, counts = carry
        entries = _gather_entries(directory, tables, tokens, rows, _share_pass(counts))
        known = _find_known(directory, entries)
        directory = _write(directory, entries, known, _place(directory, entries, known))
        return directory, pending(directory)

    start = (directory, pending(directory))
    return jax.lax.while_loop(lambda c: jnp.any(c[1] > 0), register_pass, start)[0]


def _share_pass(counts: Int[Array, "k"]) -> Int[Array, "k"]:
    """Return how many of its pending blocks each row registers in this pass.

    3 20 1 40, LONG 8 -> 0 20 0 0     the first long row, alone
    3 0 1             -> 1 0 1        one of each row
    """
    is_long = counts > LONG
    first = jax.lax.argmax(is_long, 0, jnp.int32)
    is_alone = jnp.arange(counts.shape[0], dtype=jnp.int32) == first
    alone = jnp.where(is_alone, counts, 0)
    counts = jnp.where(jnp.any(is_long), alone, jnp.minimum(counts, 1))
    return jnp.clip(ENTRIES_A_PASS - (jnp.cumsum(counts, dtype=jnp.int32) - counts), 0, counts)


def _gather_entries(
    directory: PrefixDirectory,
    tables: BlockTables,
    tokens: Int[Array, "R L"],
    rows: Int[Array, "k"],
    counts: Int[Array, "k"],
) -> Entries:
    """Gather the next `counts` blocks of each row."""
    owner, rank, is_valid = ragged_indices(counts, ENTRIES_A_PASS)
    row, size = rows[owner], directory.block_size
    column = directory.num_registered[row] + rank
    position = column[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    content = tokens[row[:, None], position]
    added = jnp.where(is_valid, hash_blocks(content, column), 0)
    hashes = directory.prefix_hash[row] + _sum_in_row(added, rank)
    blocks = jnp.where(is_valid, tables.blocks[:, row, column], 0)
    group = directory.key_group
    return Entries(
        row=row,
        column=column,
        rank=rank,
        is_valid=is_valid,
        is_first=rank == 0,
        is_last=is_valid & (rank == counts[owner] - 1),
        content=content,
        hash=hashes,
        key=to_key(hashes),
        parent=directory.last_id[row],
        block=blocks[group],
        mates=tuple(blocks[g] for g in range(blocks.shape[0]) if g != group),
    )


def _find_known(directory: PrefixDirectory, entries: Entries) -> Known:
    """Find the contents that are registered already, and those that come twice in this pass."""
    e = entries
    ways, is_equal = find_candidates(directory, e.key, e.content)
    block, content_id = follow_chain(directory, ways, is_equal, e.parent, e.is_first)
    is_found = e.is_valid & (block != 0)
    is_fresh = e.is_valid & ~is_found & (e.block != 0)
    # Only first entries can be twins: a pass of several rows takes one entry of each.
    is_leading = is_fresh & e.is_first
    both = is_leading[:, None] & is_leading[None]
    is_earlier = jnp.tril(both, -1)
    is_earlier &= (e.key[:, None] == e.key[None]) & (e.parent[:, None] == e.parent[None])
    leader = jax.lax.argmax(is_earlier, 1, jnp.int32)
    is_twin = jnp.any(is_earlier, axis=1) & jnp.all(e.content[leader] == e.content, axis=1)
    return Known(ways, block, content_id, is_found, is_twin, leader, is_fresh & ~is_twin)


def _place(directory: PrefixDirectory, entries: Entries, known: Known) -> Placed:
    """Give each fresh entry a free way of its set, in order, and a new content id.

    A row ends at its first entry that finds none: later blocks would have a parent that no lookup
    finds.

        set 5, ways . 7 . 3 (7 and 3 live), fresh entries a and b of that set -> a 0, b 2
    """
    e, num_sets = entries, directory.table.shape[0]
    set_index = (e.key & (num_sets - 1)).astype(jnp.int32)
    same_set = (set_index[:, None] == set_index[None]) & known.is_fresh[None]
    in_set = jnp.sum(jnp.tril(same_set, -1), axis=1, dtype=jnp.int32)
    foreign = (directory.hash[known.ways] & (num_sets - 1)).astype(jnp.int32) != set_index[:, None]
    dead = (directory.content_id[known.ways] == NO_ID) | (directory.parent_id[known.ways] == NO_ID)
    is_free = dead | foreign | (known.ways == 0) | (known.ways == e.block[:, None])
    is_chosen = is_free & (jnp.cumsum(is_free, axis=1, dtype=jnp.int32) == in_set[:, None] + 1)
    has_way = known.is_fresh & jnp.any(is_chosen, axis=1)
    has_failed = e.is_valid & ~known.is_found & ~known.is_twin & ~has_way
    is_broken = _sum_in_row(has_failed.astype(jnp.int32), e.rank) > 0
    is_inserted = known.is_fresh & ~is_broken
    new_ids = directory.next_id + jnp.cumsum(is_inserted, dtype=jnp.int32) - 1
    ids = jnp.where(known.is_found, known.id, new_ids)
    ids = jnp.where(is_broken, NO_ID, ids)
    ids = jnp.where(known.is_twin, ids[known.leader], ids)
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    parents = jnp.where(e.is_first, e.parent, ids[index - 1])
    return Placed(is_inserted, set_index, jax.lax.argmax(is_chosen, 1, jnp.int32), ids, parents)


def _write(
    directory: PrefixDirectory, entries: Entries, known: Known, placed: Placed
) -> PrefixDirectory:
    """Write the new entries and mates, and how far each row is registered now.

    A group that lost its block of a known content gets this row's block as the mate.
    """
    e = entries
    holder = jnp.where(known.is_found, known.block, e.block)
    old_mates = [mates[holder] for mates in directory.mates]
    is_mended = [
        known.is_found
        & ((old == 0) | (directory.content_id[old] != placed.id))
        & ((new != 0) & (directory.content_id[new] == NO_ID))
        for old, new in zip(old_mates, e.mates, strict=True)
    ]
    past, num_sets = directory.content_id.shape[0], directory.table.shape[0]
    # All reads come before the first write: the arrays are updated in place.
    way, directory, keys = jax.lax.optimization_barrier((placed.way, directory, e.key))
    target = jnp.where(placed.is_inserted, e.block, past)
    content_id = directory.content_id.at[target].set(placed.id, mode="drop")
    parent_id = directory.parent_id.at[target].set(placed.parent, mode="drop")
    mates = list(directory.mates)
    for g, new in enumerate(e.mates):
        is_named = (placed.is_inserted & (new != 0)) | is_mended[g]
        mate = jnp.where(is_named, new, past)
        content_id = content_id.at[mate].set(placed.id, mode="drop")
        # A mate has no entry of its own: an old one of that block must not come to life again.
        parent_id = parent_id.at[mate].set(NO_ID, mode="drop")
        place = jnp.where(is_mended[g], holder, target)
        mates[g] = mates[g].at[place].set(new, mode="drop")
    set_index = jnp.where(placed.is_inserted, placed.set_index, num_sets)
    directory = directory.replace(
        content_id=content_id,
        parent_id=parent_id,
        hash=directory.hash.at[target].set(keys, mode="drop"),
        tokens=directory.tokens.at[target].set(e.content, mode="drop"),
        mates=tuple(mates),
        table=directory.table.at[set_index, way].set(e.block, mode="drop"),
        next_id=directory.next_id + jnp.sum(placed.is_inserted, dtype=jnp.int32),
    )
    rows = jnp.where(e.is_last, e.row, directory.last_id.shape[0])
    return start_rows(directory, rows, e.column + 1, placed.id, e.hash)


def _sum_in_row(values: Array, rank: Int[Array, "E"]) -> Array:
    """Return running sums that start anew at each row's first entry.

    values 1 2 4 5, rank 0 1 0 1 -> 1 3 4 9
    """
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    sums = jnp.cumsum(values, dtype=values.dtype)
    return sums - (sums - values)[index - rank]
