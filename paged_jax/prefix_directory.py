"""Which block holds which content: a hash table of full blocks, on the device.

    content     the tokens of a block and everything before them, down to a root: what was computed with which weights and salt
    table       sets of WAYS block ids; the set of a content follows from its hash
    identity    each content that is registered gets a new id, and names its parent's: the content before it, or the root

    root -3  <-  id 7: tokens 0..15, block 4  <-  id 8: tokens 16..31, block 9  <-  ...

A hit needs equal hash, equal tokens, a live id, and a parent id that is the id of the hit before it. So neither a collision
of hashes nor a block that was given to someone else can match. Ids are never used twice. An evicted block's id becomes 0, and
its place in the table counts as free.

Blocks are registered lazily, right before someone could notice: before a lookup, before blocks are released or pass out of a
window. So a step that only decodes pays nothing. Groups of layers besides the first full-attention one do not have entries of
their own: `mates` names, for a registered block, the blocks of the other groups with the same tokens, live while their id is the
block's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, UInt

from paged_jax.arrays import spread
from paged_jax.block_table import BlockTables

WAYS = 8
ENTRIES_A_PASS = 32  # blocks registered in one vectorised pass
LONG = 8  # more blocks of one row than this are registered in passes of their own
LAST_ID = 2**30  # the directory is emptied when ids come this far
HASH_BITS = 32  # tests leave a few, to force collisions
NO_ID = 0  # of a block that is not registered; of a row that no longer registers


class PrefixDirectory(struct.PyTreeNode):
    """Contents of N blocks of B tokens, and how far each of R rows is registered. G KV-cache groups.

    Attributes:
        content_id: above 0 for a block with content worth keeping.
        parent_id: of the content before it, or a root; NO_ID for a mate.
        mates: blocks of the other groups with the same tokens as the block, 0 where there is none.
        num_registered: leading blocks of a row that the directory knows, its hits among them.
        last_id: content id of the last of them, the row's root (below 0) before the first, or NO_ID: no more are registered.
        prefix_hash: of the row's tokens up to there.
    """

    content_id: Int[Array, "N"]
    parent_id: Int[Array, "N"]
    hash: UInt[Array, "N"]
    tokens: Int[Array, "N B"]
    mates: Int[Array, "G-1 N"]
    table: Int[Array, "sets ways"]
    next_id: Int[Array, ""]
    num_registered: Int[Array, "R"]
    last_id: Int[Array, "R"]
    prefix_hash: UInt[Array, "R"]


class Prefix(NamedTuple):
    """The registered beginning of a sequence: M columns, of which the first `num_blocks` are hits."""

    blocks: Int[Array, "G M"]  # 0 in a group that has lost the block
    ids: Int[Array, "M"]
    hashes: UInt[Array, "M"]
    num_blocks: Int[Array, ""]


def init_directory(num_blocks: int, block_size: int, num_groups: int, num_rows: int) -> PrefixDirectory:
    """Nothing registered. The table has room for four times as many entries as there are blocks: a set is hardly ever full."""
    sets = 1 << max(0, -(-4 * num_blocks // WAYS) - 1).bit_length()

    def zeros(*shape, dtype=jnp.int32):
        return jnp.zeros(shape, dtype)

    return PrefixDirectory(
        content_id=zeros(num_blocks),
        parent_id=zeros(num_blocks),
        hash=zeros(num_blocks, dtype=jnp.uint32),
        tokens=zeros(num_blocks, block_size),
        mates=zeros(num_groups - 1, num_blocks),
        table=zeros(sets, WAYS),
        next_id=jnp.int32(1),
        num_registered=zeros(num_rows),
        last_id=zeros(num_rows),
        prefix_hash=zeros(num_rows, dtype=jnp.uint32),
    )


def key_group(windows: tuple[int | None, ...]) -> int:
    """The group whose blocks have the entries: the first that keeps all of a sequence."""
    return next((group for group, window in enumerate(windows) if window is None), 0)


def reset(directory: PrefixDirectory) -> PrefixDirectory:
    """Forget all contents. Rows that hold blocks register no more until they start again."""
    return stop_rows(directory, slice(None)).replace(
        content_id=jnp.zeros_like(directory.content_id),
        table=jnp.zeros_like(directory.table),
        next_id=jnp.ones_like(directory.next_id),
    )


def evict(directory: PrefixDirectory, blocks: Int[Array, "k"]) -> PrefixDirectory:
    """The blocks are about to hold something else; 0 is passed over."""
    return directory.replace(content_id=directory.content_id.at[blocks].set(NO_ID, mode="drop"))


def start_rows(directory: PrefixDirectory, rows: Int[Array, "k"], num_blocks, last_id, prefix_hash) -> PrefixDirectory:
    """Rows begin with `num_blocks` blocks that are registered, the last under `last_id`; rows out of range are padding."""
    return directory.replace(
        num_registered=directory.num_registered.at[rows].set(num_blocks, mode="drop"),
        last_id=directory.last_id.at[rows].set(last_id, mode="drop"),
        prefix_hash=directory.prefix_hash.at[rows].set(prefix_hash, mode="drop"),
    )


def stop_rows(directory: PrefixDirectory, rows) -> PrefixDirectory:
    """Rows register no more until they start again; `rows` is any index, out of range is padding."""
    return directory.replace(last_id=directory.last_id.at[rows].set(NO_ID, mode="drop"))


def root_hash(root: Int[Array, "..."]) -> UInt[Array, "..."]:
    """The hash of no tokens."""
    return _mix(root, jnp.full_like(root, -1))


def find_prefix(
    directory: PrefixDirectory, windows: tuple[int | None, ...], tokens: Int[Array, "L"], num_blocks, root, columns: int
) -> Prefix:
    """The longest registered beginning of `tokens`, of `num_blocks` full blocks at most. Its cost does not depend on N."""
    size = directory.tokens.shape[1]
    tokens = jnp.pad(tokens, (0, columns * size - tokens.shape[0])).reshape(columns, size)
    column = jnp.arange(columns, dtype=jnp.int32)
    sums = _block_sums(tokens, column)
    hashes = root_hash(root) + jnp.cumsum(sums, dtype=jnp.uint32)
    ways, equal = _candidates(directory, _key(hashes), tokens)
    blocks, ids = _follow(directory, ways, equal, root, column == 0)
    hit = (blocks != 0) & (column < num_blocks)
    group, others = key_group(windows), []
    for mates in directory.mates:
        mate = mates[blocks]
        others.append(jnp.where(hit & (mate != 0) & (directory.content_id[mate] == ids), mate, 0))
    blocks = jnp.where(hit, blocks, 0)
    return Prefix(jnp.stack([*others[:group], blocks, *others[group:]]), ids, hashes, jnp.sum(hit, dtype=jnp.int32))


def register(
    directory: PrefixDirectory,
    windows: tuple[int | None, ...],
    tables: BlockTables,
    tokens: Int[Array, "R L"],
    rows: Int[Array, "k"],
    num_blocks: Int[Array, "k"],
) -> PrefixDirectory:
    """Bring each row's registration up to its first `num_blocks` blocks, all of them full; rows out of range are padding."""

    def pending(directory):
        known = directory.num_registered.at[rows].get(mode="fill", fill_value=2**30)
        stopped = directory.last_id.at[rows].get(mode="fill", fill_value=NO_ID) == NO_ID
        return jnp.where(stopped, 0, jnp.maximum(num_blocks - known, 0))

    def body(carry):
        directory, counts = carry
        directory = _register_some(directory, key_group(windows), tables, tokens, rows, counts)
        return directory, pending(directory)

    return jax.lax.while_loop(lambda c: jnp.any(c[1] > 0), body, (directory, pending(directory)))[0]


def _register_some(directory: PrefixDirectory, group: int, tables: BlockTables, tokens, rows, counts):
    """One pass: many blocks of one row, or the next block of many.

    So every content that two rows bring is seen twice: in the same pass by comparison, in a later one by lookup.
    """
    size, is_long = ENTRIES_A_PASS, counts > LONG
    alone = jnp.arange(counts.shape[0]) == jnp.argmax(is_long)
    counts = jnp.where(jnp.any(is_long), jnp.where(alone, counts, 0), jnp.minimum(counts, 1))
    counts = jnp.clip(size - (jnp.cumsum(counts) - counts), 0, counts)
    owner, rank, given = spread(counts, size)
    index, row, first = jnp.arange(size, dtype=jnp.int32), rows[owner], rank == 0
    column = directory.num_registered[row] + rank
    position = column[:, None] * directory.tokens.shape[1] + jnp.arange(directory.tokens.shape[1], dtype=jnp.int32)
    content = tokens[row[:, None], position]

    def in_row(values):
        """Sums of `values` over the row's entries up to each."""
        sums = jnp.cumsum(values, dtype=values.dtype)
        return sums - (sums - values)[index - rank]

    hashes = directory.prefix_hash[row] + in_row(jnp.where(given, _block_sums(content, column), 0))
    keys, parent = _key(hashes), directory.last_id[row]
    blocks = jnp.where(given, tables.blocks[:, row, column], 0)
    block, mates = blocks[group], jnp.delete(blocks, group, axis=0, assume_unique_indices=True)

    # What is known already is not registered again.
    ways, equal = _candidates(directory, keys, content)
    existing, existing_id = _follow(directory, ways, equal, parent, first)
    found = given & (existing != 0)
    fresh = given & ~found & (block != 0)
    # Nor what another row registers in this very pass.
    earlier = jnp.tril(fresh[:, None] & fresh & first[:, None] & first, -1)
    earlier &= (keys[:, None] == keys) & (parent[:, None] == parent)
    leader = jnp.argmax(earlier, axis=1)
    twin = jnp.any(earlier, axis=1) & jnp.all(content[leader] == content, axis=1)
    fresh &= ~twin

    # The others take free ways of their sets, in order. A row ends at the first that finds none: its later blocks would have
    # a parent that nobody can find.
    sets = directory.table.shape[0]
    target_set = (keys & (sets - 1)).astype(jnp.int32)
    in_set = jnp.sum(jnp.tril((target_set[:, None] == target_set) & fresh, -1), axis=1)
    foreign = (directory.hash[ways] & (sets - 1)).astype(jnp.int32) != target_set[:, None]
    dead = (directory.content_id[ways] == NO_ID) | (directory.parent_id[ways] == NO_ID)
    free = dead | foreign | (ways == 0) | (ways == block[:, None])
    chosen = free & (jnp.cumsum(free, axis=1) == in_set[:, None] + 1)
    failed = given & ~found & ~twin & ~(fresh & jnp.any(chosen, axis=1))
    broken = in_row(failed.astype(jnp.int32)) > 0
    insert = fresh & ~broken
    ids = jnp.where(found, existing_id, directory.next_id + jnp.cumsum(insert, dtype=jnp.int32) - 1)
    ids = jnp.where(broken, NO_ID, ids)
    ids = jnp.where(twin, ids[leader], ids)
    parents = jnp.where(first, parent, ids[index - 1])

    # A group whose block is gone from the known content gets this row's.
    holder = jnp.where(found, existing, block)
    old_mates = directory.mates[:, holder]
    lost = (old_mates == 0) | (directory.content_id[old_mates] != ids)
    mends = found & lost & (mates != 0) & (directory.content_id[mates] == NO_ID)
    end, last = directory.content_id.shape[0], given & (rank == counts[owner] - 1)
    ways_index, directory, keys = jax.lax.optimization_barrier((jnp.argmax(chosen, axis=1), directory, keys))
    target = jnp.where(insert, block, end)
    content_id = directory.content_id.at[target].set(ids, mode="drop")
    parent_id = directory.parent_id.at[target].set(parents, mode="drop")
    new_mates = directory.mates.at[:, target].set(mates, mode="drop")
    for g in range(mates.shape[0]):
        mate_target = jnp.where((insert & (mates[g] != 0)) | mends[g], mates[g], end)
        content_id = content_id.at[mate_target].set(ids, mode="drop")
        # A mate has no entry of its own: an old one of that block must not come to life again.
        parent_id = parent_id.at[mate_target].set(NO_ID, mode="drop")
        new_mates = new_mates.at[g, jnp.where(mends[g], holder, end)].set(mates[g], mode="drop")
    directory = directory.replace(
        content_id=content_id,
        parent_id=parent_id,
        hash=directory.hash.at[target].set(keys, mode="drop"),
        tokens=directory.tokens.at[target].set(content, mode="drop"),
        mates=new_mates,
        table=directory.table.at[jnp.where(insert, target_set, sets), ways_index].set(block, mode="drop"),
        next_id=directory.next_id + jnp.sum(insert, dtype=jnp.int32),
    )
    return start_rows(directory, jnp.where(last, row, tables.num_rows), column + 1, ids, hashes)


def _candidates(directory: PrefixDirectory, keys: UInt[Array, "n"], tokens: Int[Array, "n B"]):
    """The blocks in each key's set, and which of them hold those tokens under that hash: [n, WAYS] both."""
    ways = directory.table[(keys & (directory.table.shape[0] - 1)).astype(jnp.int32)]
    live = (directory.content_id[ways] != NO_ID) & (directory.parent_id[ways] != NO_ID)  # of the null block neither is
    live &= directory.hash[ways] == keys[:, None]
    return ways, live & jnp.all(directory.tokens[ways] == tokens[:, None], axis=2)


def _follow(
    directory: PrefixDirectory, ways: Int[Array, "n W"], equal: Bool[Array, "n W"], start: Int[Array, "..."], first
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """The block and content id of each entry, 0 where none continues the entry before it.

    An entry that is `first` must have `start` as its parent, any other the content chosen for the entry before it. Each
    candidate points to the candidate before it that is its parent; pointers are doubled until all have come to a start.
    """
    count, width = ways.shape
    grounded, dead = width, width + 1
    ids, parents = directory.content_id[ways], directory.parent_id[ways]
    before = jnp.where(jnp.roll(equal, 1, axis=0), jnp.roll(ids, 1, axis=0), NO_ID)
    links = (parents[:, :, None] == before[:, None]) & (before[:, None] != NO_ID)
    back = jnp.where(jnp.any(links, axis=2), jnp.argmax(links, axis=2), dead)
    start = jnp.broadcast_to(start, (count,))
    grounds = (parents == start[:, None]) & (start != NO_ID)[:, None]
    back = jnp.where(first[:, None], jnp.where(grounds, grounded, dead), back)
    back = jnp.where(equal, back, dead).astype(jnp.int32)

    def double(k, back):
        source = jnp.maximum(jnp.arange(count, dtype=jnp.int32) - (1 << k), 0)
        further = jnp.take_along_axis(back[source], jnp.minimum(back, width - 1), axis=1)
        return jnp.where(back < width, further, back)

    back = jax.lax.fori_loop(0, max(count - 1, 0).bit_length(), double, back)
    good = back == grounded
    way = jnp.argmax(good, axis=1)[:, None]
    chosen = jnp.any(good, axis=1)
    block, content = (jnp.take_along_axis(x, way, axis=1)[:, 0] for x in (ways, ids))
    return jnp.where(chosen, block, 0), jnp.where(chosen, content, NO_ID)


def _key(hashes: UInt[Array, "n"]) -> UInt[Array, "n"]:
    return hashes >> (32 - HASH_BITS)


def _block_sums(tokens: Int[Array, "n B"], column: Int[Array, "n"]) -> UInt[Array, "n"]:
    """What each block adds to the hash of a sequence: order counts, because each token is mixed with its position."""
    position = column[:, None] * tokens.shape[1] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.sum(_mix(tokens, position), axis=1, dtype=jnp.uint32)


def _mix(tokens: Int[Array, "..."], position: Int[Array, "..."]) -> UInt[Array, "..."]:
    """32 bits of which each depends on all of both: two odd multipliers, then murmur3's finaliser."""
    x = tokens.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
