"""Whether the books of a cache are sound: a checker for tests and for hunting a fault.

It runs on the host and copies the books. `engine.integrity` adds what an engine's rows must hold.
"""

from typing import Any

import jax
import numpy as np

from paged_jax.arrays import ceil_div
from paged_jax.cache.block_table import BlockTables
from paged_jax.cache.paged_cache import PagedCache


def cache_faults(cache: PagedCache) -> list[str]:
    """List the broken invariants of a cache, a sentence each. See `check_integrity`."""
    pool, tables = jax.device_get((cache.pool, cache.tables))
    faults = _check_pool(pool) + _check_tables(tables) + _check_counts(pool, tables)
    faults += _check_sizes(tables, cache.config.block_size)
    if cache.directory is not None:
        faults += _check_directory(jax.device_get(cache.directory))
    return faults


def directory_entries(directory: Any) -> dict[int, int]:
    """Return the blocks with a live entry in the table, and the set that each stands in."""
    num_sets = directory.table.shape[0]
    return {
        int(block): key
        for key, ways in enumerate(directory.table)
        for block in ways
        if directory.content_id[block] > 0
        and directory.parent_id[block] != 0
        and directory.hash[block] & (num_sets - 1) == key
    }


# Below, states hold NumPy arrays.


def _check_pool(pool: Any) -> list[str]:
    faults, size = [], pool.ring.shape[0]
    if not (0 <= pool.head < size and 0 <= pool.num_free <= pool.span <= size):
        return [
            f"queue: head {pool.head}, span {pool.span}, {pool.num_free} free do not fit a ring of "
            f"{size}"
        ]
    positions = (pool.head + np.arange(pool.span)) % size
    ids = pool.ring[positions]
    live = ids[pool.stamp[ids] == positions]
    if len(live) != pool.num_free:
        faults.append(f"queue: {len(live)} live entries, num_free says {pool.num_free}")
    if len(set(live.tolist())) < len(live):
        faults.append("queue: a block stands in it twice")
    if 0 in live:
        faults.append("queue: holds the null block")
    queued = np.zeros(pool.num_blocks, bool)
    queued[live] = True
    for block in np.flatnonzero(queued[1:] & (pool.ref_count[1:] != 0)) + 1:
        faults.append(f"block {block}: free, but its reference count is {pool.ref_count[block]}")
    for block in np.flatnonzero(~queued[1:] & (pool.ref_count[1:] == 0)) + 1:
        faults.append(f"block {block}: lost: neither free nor in use")
    for block in np.flatnonzero(~queued[1:] & (pool.stamp[1:] != -1)) + 1:
        faults.append(f"block {block}: not in the queue, but stamped {pool.stamp[block]}")
    return faults


def _check_tables(tables: BlockTables) -> list[str]:
    faults = []
    for group, row in np.argwhere(np.any(tables.blocks != 0, axis=2) | (tables.num_blocks != 0)):
        count, entries = tables.num_blocks[group, row], tables.blocks[group, row]
        where = f"group {group}, row {row}"
        if not 0 <= count <= len(entries):
            faults.append(f"{where}: {count} blocks in a table of {len(entries)}")
            continue
        if np.any(entries[count:] != 0):
            faults.append(f"{where}: entries past its {count} blocks are not null")
        blocks = entries[entries != 0]
        if len(set(blocks.tolist())) < len(blocks):
            faults.append(f"{where}: names a block twice")
    return faults


def _check_counts(pool: Any, tables: BlockTables) -> list[str]:
    blocks = tables.blocks[tables.blocks != 0]
    if np.any((blocks < 0) | (blocks >= pool.num_blocks)):
        return [f"tables: name blocks outside 0 to {pool.num_blocks - 1}"]
    counts = np.bincount(blocks, minlength=pool.num_blocks)
    return [
        f"block {block}: reference count {pool.ref_count[block]}, {counts[block]} table entries "
        "name it"
        for block in np.flatnonzero(counts[1:] != pool.ref_count[1:]) + 1
    ]


def _check_sizes(tables: BlockTables, block_size: int) -> list[str]:
    faults = []
    for group, row in np.ndindex(*tables.num_blocks.shape):
        have, tokens = tables.num_blocks[group, row], tables.num_tokens[row]
        if have > ceil_div(tokens, block_size):
            faults.append(
                f"group {group}, row {row}: {have} blocks, but it asked for {tokens} tokens"
            )
    return faults


def _check_directory(directory: Any) -> list[str]:
    faults: list[str] = []
    seen: dict[Any, int] = {}
    for block in directory_entries(directory):
        parent, content_id = int(directory.parent_id[block]), directory.content_id[block]
        content = (parent, tuple(directory.tokens[block].tolist()))
        if seen.setdefault(content, block) != block:
            faults.append(
                f"directory: blocks {seen[content]} and {block} are registered for one content"
            )
        if parent >= content_id:
            faults.append(f"block {block}: content {content_id} is older than its parent")
    if np.any(directory.content_id >= directory.next_id):
        faults.append("directory: a content id is yet to be given")
    return faults
