"""Whether the state of a cache or an engine is sound: the public checker."""

from typing import Any

import jax
import numpy as np

from paged_jax.arrays import ceil_div
from paged_jax.cache.block_table import BlockTables
from paged_jax.cache.integrity import cache_faults, directory_entries
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.checks import show
from paged_jax.engine.step import EngineState
from paged_jax.errors import ConfigError
from paged_jax.scheduling.sequences import EMPTY, FINISHED, RUNNING, WAITING
from paged_jax.scheduling.waiting import waiting_rows


def check_integrity(state: PagedCache | EngineState) -> list[str]:
    """List the broken invariants of a cache or an engine, a sentence each; empty when it is sound.

    1. Every block but 0 is exactly one of free (live once in the queue, reference count 0) or in
       use (reference count = number of table entries that name it).
    2. No row's table names a block twice (the null block may repeat where a window has passed), and
       entries past `num_blocks` are 0.
    3. A row has at least ceil(computed / block_size) entries, nulls included, and no more than its
       allocation asked for.
    4. Every live entry of the prefix directory names one block, with the tokens of the rows that
       hold it, and no content is registered twice.
    5. Of an engine: the running places, the waiting order and the rows' status agree, and only
       running rows have blocks.

    It runs on the host and copies the books, not the pages. Raises ConfigError for anything else.
    """
    if isinstance(state, PagedCache):
        return cache_faults(state)
    if not isinstance(state, EngineState):
        raise ConfigError(f"state={show(state)}: a PagedCache or an EngineState is needed")
    cache = state.cache
    faults = cache_faults(cache)
    tables, seqs = jax.device_get((cache.tables, state.seqs))
    if cache.directory is not None:
        faults += _check_registered(jax.device_get(cache.directory), tables, seqs)
    faults += _check_computed(tables, seqs, cache.config.block_size)
    return faults + _check_rows(seqs, tables)


# Below, states hold NumPy arrays.


def _check_computed(tables: BlockTables, seqs: Any, block_size: int) -> list[str]:
    faults = []
    for group, row in np.ndindex(*tables.num_blocks.shape):
        have, computed = tables.num_blocks[group, row], seqs.num_computed[row]
        if have < ceil_div(computed, block_size) and seqs.status[row] == RUNNING:
            faults.append(
                f"group {group}, row {row}: {have} blocks hold {computed} computed tokens"
            )
    return faults


def _check_registered(directory: Any, tables: BlockTables, seqs: Any) -> list[str]:
    """Compare the entries of the blocks that running rows hold with the rows' tokens."""
    faults, size = [], directory.block_size
    entries = directory_entries(directory)
    for row in seqs.running[: seqs.num_running].tolist():
        full = min(int(directory.num_registered[row]), seqs.num_computed[row] // size)
        for group, column in np.ndindex(tables.num_blocks.shape[0], full):
            block = tables.blocks[group, row, column]
            if block not in entries:
                continue
            tokens = seqs.tokens[row, column * size : (column + 1) * size]
            if np.any(directory.tokens[block] != tokens):
                faults.append(
                    f"block {block}: registered for other tokens than row {row} has in column "
                    f"{column}"
                )
            # Its parent cannot be told from the row: it may be evicted, or registered anew.
            if (directory.parent_id[block] < 0) != (column == 0):
                faults.append(
                    f"block {block}: in column {column} of row {row}, "
                    f"behind {directory.parent_id[block]}"
                )
    return faults


def _check_rows(seqs: Any, tables: BlockTables) -> list[str]:
    faults = []
    running = seqs.running[: seqs.num_running].tolist()
    waiting = waiting_rows(seqs.waiting)
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
            faults.append(
                f"row {row}: {seqs.num_computed[row]} of {seqs.num_tokens[row]} tokens computed"
            )
    return faults
