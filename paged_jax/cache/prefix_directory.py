"""Which block holds which content: a hash table of full blocks, on the device.

    content    the tokens of a block and everything before them, down to a root
    root       a number below 0 that stands for the weights and the salt in use
    table      sets of WAYS block ids; the hash of a content selects its set
    id         each registered content gets a new one and refers to its parent's

    root -3  <-  id 7: tokens 0..15, block 4  <-  id 8: tokens 16..31, block 9  <-  ...

A hit needs equal hash, equal tokens, a live id, and a parent id that is the id of the previous hit.
So neither a collision of hashes nor a block that was reused can match. Ids are never used twice. An
evicted block's id becomes 0, and its place in the table counts as free.

Blocks are registered lazily (`registration`), right before it could matter: before a lookup, before
blocks are released or pass out of a window. So a step that only decodes pays nothing.

Only the key group (`kv_group.key_group`) has entries. `mates` holds, for a registered block, the
blocks of the other groups with the same tokens. A mate is live while its id equals the block's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, UInt

from paged_jax.arrays import ceil_div
from paged_jax.cache.content_hash import hash_blocks, root_hash, to_key
from paged_jax.config import CacheConfig
from paged_jax.kv_group import key_group

WAYS = 8
LAST_ID = 2**30  # the directory is emptied when ids come this far
NO_ID = 0  # of a block that is not registered; of a row that no longer registers


class PrefixDirectory(struct.PyTreeNode):
    """Contents of N blocks of B tokens, and how far each of R rows is registered.

    Attributes:
        content_id: above 0 for a block with content worth keeping.
        parent_id: id of the content before it, or a root; NO_ID for a mate.
        hash: the key of the content.
        mates: blocks with the same tokens, 0 where there is none: an array for each other group.
        num_registered: leading blocks of a row that are registered, its hits among them.
        last_id: content id of the last of them, or the row's root before the first. NO_ID stops the
            row from registering.
        prefix_hash: hash of the row's registered tokens.
        key_group: index of the group with entries.
    """

    content_id: Int[Array, "N"]
    parent_id: Int[Array, "N"]
    hash: UInt[Array, "N"]
    tokens: Int[Array, "N B"]
    mates: tuple[Int[Array, "N"], ...]
    table: Int[Array, "sets ways"]
    next_id: Int[Array, ""]
    num_registered: Int[Array, "R"]
    last_id: Int[Array, "R"]
    prefix_hash: UInt[Array, "R"]
    key_group: int = struct.field(pytree_node=False, default=0)

    @property
    def block_size(self) -> int:
        """B."""
        return self.tokens.shape[1]


class Prefix(NamedTuple):
    """The registered beginning of a sequence: M columns, the first `num_blocks` are hits."""

    blocks: Int[Array, "G M"]  # 0 in a group that has lost the block
    ids: Int[Array, "M"]
    hashes: UInt[Array, "M"]
    num_blocks: Int[Array, ""]


def init_directory(config: CacheConfig) -> PrefixDirectory:
    """Return an empty directory.

    The table has room for four times as many entries as there are blocks: a set is rarely full.
    """
    num_blocks, num_rows = config.num_blocks, config.num_rows
    num_sets = 1 << max(0, ceil_div(4 * num_blocks, WAYS) - 1).bit_length()

    def zeros(*shape, dtype=jnp.int32):
        return jnp.zeros(shape, dtype)

    return PrefixDirectory(
        content_id=zeros(num_blocks),
        parent_id=zeros(num_blocks),
        hash=zeros(num_blocks, dtype=jnp.uint32),
        tokens=zeros(num_blocks, config.block_size),
        mates=tuple(zeros(num_blocks) for _ in range(config.num_groups - 1)),
        table=zeros(num_sets, WAYS),
        next_id=jnp.int32(1),
        num_registered=zeros(num_rows),
        last_id=zeros(num_rows),
        prefix_hash=zeros(num_rows, dtype=jnp.uint32),
        key_group=key_group(config.groups),
    )


def reset(directory: PrefixDirectory) -> PrefixDirectory:
    """Forget all contents. Rows that hold blocks register no more until they start again."""
    return stop_rows(directory, slice(None)).replace(
        content_id=jnp.zeros_like(directory.content_id),
        table=jnp.zeros_like(directory.table),
        next_id=jnp.ones_like(directory.next_id),
    )


def evict(directory: PrefixDirectory, blocks: Int[Array, "*k"]) -> PrefixDirectory:
    """Forget the contents of blocks that are about to hold something else; 0 is skipped."""
    content_id = directory.content_id.at[blocks].set(NO_ID, mode="drop")
    return directory.replace(content_id=content_id)


def is_registered(directory: PrefixDirectory, blocks: Int[Array, "*k"]) -> Bool[Array, "*k"]:
    """Return whether each block has content worth keeping."""
    return directory.content_id[blocks] != NO_ID


def start_rows(
    directory: PrefixDirectory, rows: Int[Array, "*k"], num_blocks, last_id, prefix_hash
) -> PrefixDirectory:
    """Let rows begin with `num_blocks` registered blocks, the last of them content `last_id`.

    Rows out of range are padding.
    """
    return directory.replace(
        num_registered=directory.num_registered.at[rows].set(num_blocks, mode="drop"),
        last_id=directory.last_id.at[rows].set(last_id, mode="drop"),
        prefix_hash=directory.prefix_hash.at[rows].set(prefix_hash, mode="drop"),
    )


def stop_rows(directory: PrefixDirectory, rows) -> PrefixDirectory:
    """Stop rows from registering until they start again.

    `rows` is any index; out of range is padding.
    """
    return directory.replace(last_id=directory.last_id.at[rows].set(NO_ID, mode="drop"))


# ---------------------------------------------------------------- lookup


def find_prefix(
    directory: PrefixDirectory,
    tokens: Int[Array, "L"],
    num_blocks: Int[Array, ""] | int,
    root: Int[Array, ""],
    num_columns: int,
) -> Prefix:
    """Find the longest registered beginning of `tokens`.

    It has `num_blocks` full blocks at most. The cost does not depend on N.
    `num_columns` is M, the columns of the result.
    """
    size = directory.block_size
    tokens = jnp.pad(tokens, (0, num_columns * size - tokens.shape[0])).reshape(num_columns, size)
    column = jnp.arange(num_columns, dtype=jnp.int32)
    hashes = root_hash(root) + jnp.cumsum(hash_blocks(tokens, column), dtype=jnp.uint32)
    ways, is_equal = find_candidates(directory, to_key(hashes), tokens)
    blocks, ids = follow_chain(directory, ways, is_equal, root, column == 0)
    is_hit = (blocks != 0) & (column < num_blocks)
    group, others = directory.key_group, []
    for mates in directory.mates:
        mate = mates[blocks]
        is_live = is_hit & (mate != 0) & (directory.content_id[mate] == ids)
        others.append(jnp.where(is_live, mate, 0))
    blocks = jnp.where(is_hit, blocks, 0)
    count = jnp.sum(is_hit, dtype=jnp.int32)
    return Prefix(jnp.stack([*others[:group], blocks, *others[group:]]), ids, hashes, count)


def find_candidates(
    directory: PrefixDirectory, keys: UInt[Array, "n"], tokens: Int[Array, "n B"]
) -> tuple[Int[Array, "n ways"], Bool[Array, "n ways"]]:
    """Return the blocks in each key's set, and which of them hold those tokens under that key."""
    ways = directory.table[(keys & (directory.table.shape[0] - 1)).astype(jnp.int32)]
    # Of the null block neither id is set.
    is_live = (directory.content_id[ways] != NO_ID) & (directory.parent_id[ways] != NO_ID)
    is_live &= directory.hash[ways] == keys[:, None]
    return ways, is_live & jnp.all(directory.tokens[ways] == tokens[:, None], axis=2)


def follow_chain(
    directory: PrefixDirectory,
    ways: Int[Array, "n ways"],
    is_equal: Bool[Array, "n ways"],
    start: Int[Array, "*n"],
    is_first: Bool[Array, "n"],
) -> tuple[Int[Array, "n"], Int[Array, "n"]]:
    """Return the block and content id of each entry, 0 where none continues the entry before it.

    A first entry must have `start` as its parent, any other the content chosen for the entry before
    it. Each candidate points to its parent among the candidates before it. Pointers are doubled
    until all have come to a start (or to nothing).

        start -3   candidates of entry 0: id 7 (parent -3), id 5 (parent -2)
                   candidates of entry 1: id 8 (parent 5),  id 9 (parent 7)    -> ids 7 9
    """
    count, num_ways = ways.shape
    grounded, dead = num_ways, num_ways + 1
    ids, parents = directory.content_id[ways], directory.parent_id[ways]
    before = jnp.where(jnp.roll(is_equal, 1, axis=0), jnp.roll(ids, 1, axis=0), NO_ID)
    links = (parents[:, :, None] == before[:, None]) & (before[:, None] != NO_ID)
    back = jnp.where(jnp.any(links, axis=2), jax.lax.argmax(links, 2, jnp.int32), dead)
    start = jnp.broadcast_to(start, (count,))
    is_grounded = (parents == start[:, None]) & (start != NO_ID)[:, None]
    back = jnp.where(is_first[:, None], jnp.where(is_grounded, grounded, dead), back)
    back = jnp.where(is_equal, back, dead).astype(jnp.int32)

    def double(k, back):
        source = jnp.maximum(jnp.arange(count, dtype=jnp.int32) - (1 << k), 0)
        further = jnp.take_along_axis(back[source], jnp.minimum(back, num_ways - 1), axis=1)
        return jnp.where(back < num_ways, further, back)

    back = jax.lax.fori_loop(0, max(count - 1, 0).bit_length(), double, back)
    is_good = back == grounded
    way = jax.lax.argmax(is_good, 1, jnp.int32)[:, None]
    is_found = jnp.any(is_good, axis=1)
    block, content = (jnp.take_along_axis(x, way, axis=1)[:, 0] for x in (ways, ids))
    return jnp.where(is_found, block, 0), jnp.where(is_found, content, NO_ID)
