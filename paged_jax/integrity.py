"""Whether a state is sound: a public checker, for tests and for hunting a fault. It runs on the host and copies the books."""

from typing import Any

import jax
import numpy as np

from paged_jax.block_table import BlockTables
from paged_jax.cache_manager import PagedCache
from paged_jax.sequences import EMPTY, FINISHED, RUNNING, WAITING, Sequences
from paged_jax.step import EngineState


def check_integrity(state: PagedCache | EngineState, *, block_size: int | None = None) -> list[str]:
    """The broken invariants of a cache or an engine, a sentence each; empty when it is sound.

    1. Every block but 0 is exactly one of free (live once in the queue, reference count 0) or in use (reference count = number of
       table entries that name it).
    2. No row's table names a block twice (the null block may repeat where a window has passed), and entries past `num_blocks`
       are 0.
    3. A row has at least ceil(computed / block_size) entries, nulls included, and no more than its allocation asked for.
    4. Every live entry of the prefix directory names one block, whose tokens are those of the rows that hold it, and no content
       is registered twice.
    5. Of an engine: the running places, the waiting order and the rows' status tell the same story, and only running rows have
       blocks.

    `block_size` is needed only where the cache has no pages to read it from.
    """
    cache = state.cache if isinstance(state, EngineState) else state
    if block_size is None and cache.kv.k_pages:
        block_size = cache.kv.k_pages[0].shape[1]
    pool, tables = jax.device_get((cache.pool, cache.tables))
    seqs = jax.device_get(state.seqs) if isinstance(state, EngineState) else None
    faults = _check_pool(pool) + _check_tables(tables) + _check_counts(pool, tables)
    if cache.directory is not None:
        faults += _check_directory(jax.device_get(cache.directory), tables, seqs)
    if block_size is not None:
        faults += _check_sizes(tables, seqs, block_size)
    return faults if seqs is None else faults + _check_rows(seqs, tables)


# Below, states hold numpy arrays.


def _check_pool(pool: Any) -> list[str]:
    faults, size = [], pool.ring.shape[0]
    if not (0 <= pool.head < size and 0 <= pool.num_free <= pool.span <= size):
        return [f"queue: head {pool.head}, span {pool.span}, {pool.num_free} free do not fit a ring of {size}"]
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
        named = entries[entries != 0]
        if len(set(named.tolist())) < len(named):
            faults.append(f"{where}: names a block twice")
    return faults


def _check_counts(pool: Any, tables: BlockTables) -> list[str]:
    named = tables.blocks[tables.blocks != 0]
    if np.any((named < 0) | (named >= pool.num_blocks)):
        return [f"tables: name blocks outside 0 to {pool.num_blocks - 1}"]
    counts = np.bincount(named, minlength=pool.num_blocks)
    return [
        f"block {block}: reference count {pool.ref_count[block]}, {counts[block]} table entries name it"
        for block in np.flatnonzero(counts[1:] != pool.ref_count[1:]) + 1
    ]


def _check_sizes(tables: BlockTables, seqs: Sequences | None, block_size: int) -> list[str]:
    faults = []
    for group, row in np.ndindex(*tables.num_blocks.shape):
        have, asked = tables.num_blocks[group, row], -(-tables.num_tokens[row] // block_size)
        if have > asked:
            faults.append(f"group {group}, row {row}: {have} blocks, but it asked for {tables.num_tokens[row]} tokens")
        if seqs is not None and have < -(-seqs.num_computed[row] // block_size) and seqs.status[row] == RUNNING:
            faults.append(f"group {group}, row {row}: {have} blocks hold {seqs.num_computed[row]} computed tokens")
    return faults


def _check_directory(directory: Any, tables: BlockTables, seqs: Any) -> list[str]:
    faults, size = [], directory.tokens.shape[1]
    sets = directory.table.shape[0]
    named = [
        (int(block), key)
        for key, ways in enumerate(directory.table)
        for block in ways
        if directory.content_id[block] > 0
        and directory.parent_id[block] != 0
        and directory.hash[block] & (sets - 1) == key
    ]
    seen: dict[Any, int] = {}
    for block, _ in named:
        content = (int(directory.parent_id[block]), tuple(directory.tokens[block].tolist()))
        if seen.setdefault(content, block) != block:
            faults.append(f"directory: blocks {seen[content]} and {block} are registered for one content")
        if directory.parent_id[block] >= directory.content_id[block]:
            faults.append(f"block {block}: content {directory.content_id[block]} is older than its parent")
    if np.any(directory.content_id >= directory.next_id):
        faults.append("directory: a content id is yet to be given")
    if seqs is None:
        return faults
    keys = dict(named)
    for row in seqs.running[: seqs.num_running].tolist():
        full = min(int(directory.num_registered[row]), seqs.num_computed[row] // size)
        for group, column in np.ndindex(tables.num_blocks.shape[0], full):
            block = tables.blocks[group, row, column]
            if block not in keys:
                continue
            if np.any(directory.tokens[block] != seqs.tokens[row, column * size : (column + 1) * size]):
                faults.append(f"block {block}: registered for other tokens than row {row} has in column {column}")
            # Which content it stands behind cannot be told from the row: that may have been evicted, or registered anew.
            if (directory.parent_id[block] < 0) != (column == 0):
                faults.append(f"block {block}: in column {column} of row {row}, behind {directory.parent_id[block]}")
    return faults


def _check_rows(seqs: Any, tables: BlockTables) -> list[str]:
    faults = []
    running = seqs.running[: seqs.num_running].tolist()
    waiting = seqs.waiting[(seqs.waiting_head + np.arange(seqs.num_waiting)) % seqs.num_rows].tolist()
    for name, rows in (("running", running), ("waiting", waiting)):
        if len(set(rows)) < len(rows):
            faults.append(f"{name}: a row stands there twice: {rows}")
    for row, status in enumerate(seqs.status.tolist()):
        places = (row in running, row in waiting)
        # A finished row may keep its running place until the next step begins.
        allowed = {
            EMPTY: [(False, False)],
            WAITING: [(False, True)],
            RUNNING: [(True, False)],
            FINISHED: [(False, False), (True, False)],
        }
        if places not in allowed.get(status, []):
            faults.append(f"row {row}: status {status}, running {places[0]}, waiting {places[1]}")
        if not places[0] and np.any(tables.num_blocks[:, row] != 0):
            faults.append(f"row {row}: does not run, but has blocks")
        if not 0 <= seqs.num_computed[row] <= seqs.num_tokens[row]:
            faults.append(f"row {row}: {seqs.num_computed[row]} of {seqs.num_tokens[row]} tokens computed")
    return faults
