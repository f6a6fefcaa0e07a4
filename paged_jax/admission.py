"""Who may start, and with which blocks it finds: the head of the waiting order, one row at a time.

A row that starts shares what is there already:

    fork      a further sample of a prompt shares all the blocks of the sample that computed it, the partly filled last one too
    prefix    any other row shares the full blocks whose content the directory knows

and is given blocks for the rest of it, whole. What it shares it does not compute, but for the last token of a prompt that is
shared whole: that is computed for its logits, and its K and V, which are in the block already, are not written.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from paged_jax import prefix_directory
from paged_jax.arrays import ceil_div
from paged_jax.block_table import first_live_block
from paged_jax.cache_manager import PagedCache, admission_blocks, grow, make_ready, share
from paged_jax.config import CacheConfig
from paged_jax.sequences import RUNNING, Sequences


class News(NamedTuple):
    """What an attempt to admit the head came to."""

    admitted: Bool[Array, ""]
    reserved: Int[Array, ""]  # blocks that it will soon copy
    queried: Int[Array, ""]
    hits: Int[Array, ""]


class Start(NamedTuple):
    """What a row begins with: M table columns in G groups, of which `num_blocks` are shared."""

    blocks: Int[Array, "G M"]
    num_blocks: Int[Array, ""]
    num_tokens: Int[Array, ""]  # tokens that are in them
    last_id: Int[Array, ""]  # see PrefixDirectory
    prefix_hash: UInt[Array, ""]


def may_admit(
    config: CacheConfig, seqs: Sequences, take: Int[Array, "S"], free: Array, budget: Array, most: int
) -> Bool[Array, ""]:
    """Whether an attempt to admit the head is worth making, with `free` blocks that no running row needs. Cheap: every step asks.

    A head that did not fit is tried again when more is free than then, or enough for all of it. A further sample waits for the
    one that computes its prompt.
    """
    row = seqs.waiting[seqs.waiting_head]
    parent, place = _parent(seqs, row)
    soon = seqs.num_computed[parent]
    if all(window is None for window in config.windows):  # a window's group gets the blocks of this step's chunk later
        soon += jnp.sum(jnp.where(seqs.running == parent, take, 0))
    ready = (place == seqs.num_rows) | (soon >= seqs.num_prompt_tokens[row])
    whole, width, follows = _unit(config, seqs, row, most)
    fits = (whole <= free) | (row != seqs.refused_row) | (free > seqs.refused_free)
    has_room = (seqs.num_waiting > 0) & (seqs.num_running + width <= seqs.max_running)
    return has_room & ((jnp.sum(take) < budget) | follows) & ready & fits


def admit(
    config: CacheConfig, cache: PagedCache, seqs: Sequences, left: Array, reserved: Array, most: int
) -> tuple[PagedCache, Sequences, News]:
    """Start the head of the waiting order if all of it fits: all its blocks in full-attention groups, those of its first chunk, of
    `left` tokens at most, in the others. `most` is the greatest chunk there is."""
    row = seqs.waiting[seqs.waiting_head]
    total = seqs.num_tokens[row]
    start, is_fork = _find_start(config, cache, seqs, row)
    computed = jnp.clip(start.num_tokens, 0, jnp.maximum(total - 1, 0))
    chunk = jnp.minimum(total - computed, left)

    shared = jnp.sum(start.blocks != 0, axis=1, dtype=jnp.int32)
    waking = jnp.sum((start.blocks != 0) & (cache.pool.ref_count[start.blocks] == 0), dtype=jnp.int32)
    # A partly filled shared block is copied when it is written, in the next step.
    copies = jnp.where(start.num_tokens % config.block_size != 0, jnp.int32(config.num_groups), 0)
    free = cache.pool.num_free - reserved
    whole, _, follows = _unit(config, seqs, row, most)
    fits = whole - jnp.sum(shared) + waking + copies <= free

    targets = [total if window is None else computed + chunk for window in config.windows]
    need = jnp.stack([ceil_div(target, config.block_size) - start.num_blocks for target in targets])[:, None]
    need = jnp.where(fits, jnp.maximum(need, 0), 0)
    widest = min(config.num_groups * config.max_blocks_per_row, config.num_blocks)
    target = jnp.where(fits, row, seqs.num_rows)
    cache = share(cache, target[None], start.blocks, start.num_blocks, start.num_tokens, fits.astype(jnp.int32))
    cache = grow(make_ready(cache, jnp.sum(need), widest), target[None], need, total[None], widest)
    if cache.directory is not None:
        known = jnp.where(is_fork, 0, start.num_blocks)
        directory = prefix_directory.start_rows(cache.directory, target, known, start.last_id, start.prefix_hash)
        cache = cache.replace(directory=directory)

    is_first = fits & (seqs.num_cached[row] < 0)
    counts = is_first & ~is_fork & ~follows
    hits = jnp.where(counts, start.num_tokens, 0)
    seqs = seqs.replace(
        running=seqs.running.at[jnp.where(fits, seqs.num_running, seqs.max_running)].set(row, mode="drop"),
        num_running=seqs.num_running + fits,
        num_computed=seqs.num_computed.at[target].set(computed, mode="drop"),
        num_hit=seqs.num_hit.at[target].set(start.num_tokens, mode="drop"),
        num_cached=seqs.num_cached.at[jnp.where(is_first, row, seqs.num_rows)].set(start.num_tokens, mode="drop"),
        status=seqs.status.at[target].set(RUNNING, mode="drop"),
        waiting_head=(seqs.waiting_head + fits) % seqs.num_rows,
        num_waiting=seqs.num_waiting - fits,
        refused_row=jnp.where(fits, seqs.num_rows, row),
        refused_free=free,
    )
    queried = jnp.where(counts, seqs.num_prompt_tokens[row], 0)
    return cache, seqs, News(fits, jnp.where(fits, copies, 0), queried, hits)


def _unit(config: CacheConfig, seqs: Sequences, row: Array, most: int) -> tuple[Array, Array, Array]:
    """What starts with the row: blocks that must be free, places, and whether the row only follows the leader of its beam group.

    A group is admitted with its leader: the rows behind it then find their places and blocks.
    """
    whole = admission_blocks(config, seqs.num_tokens[row], most)
    one = jnp.ones_like(whole)
    beams = seqs.beams
    if beams is None:
        return whole, one, one == 0
    leads, follows = beams.leader[row] == row, (beams.leader[row] != row) & (beams.leader[row] < seqs.num_rows)
    members = beams.members[row]
    inside = members < seqs.num_rows
    lengths = jnp.where(inside, seqs.num_tokens[jnp.minimum(members, seqs.num_rows - 1)], 0)
    group = jnp.sum(jnp.where(lengths > 0, admission_blocks(config, lengths, most), 0))
    width = jnp.sum(inside, dtype=jnp.int32)
    return jnp.where(leads, group, whole), jnp.where(leads, width, one), follows


def _parent(seqs: Sequences, row: Array) -> tuple[Array, Array]:
    """The row that computes this one's prompt, and again, or R if there is none (any more): then the row starts like any other."""
    parent = seqs.parent[row]
    clipped = jnp.minimum(parent, seqs.num_rows - 1)
    is_fresh = seqs.num_tokens[row] == seqs.num_prompt_tokens[row]
    lives = (parent < seqs.num_rows) & (seqs.status[clipped] == RUNNING) & is_fresh
    return clipped, jnp.where(lives, parent, seqs.num_rows)


def _find_start(config: CacheConfig, cache: PagedCache, seqs: Sequences, row: Array) -> tuple[Start, Bool[Array, ""]]:
    """What the row can share, and whether by a fork. Blocks below the groups' windows are null."""
    total, columns = seqs.num_tokens[row], config.max_blocks_per_row
    column = jnp.arange(columns, dtype=jnp.int32)
    parent, place = _parent(seqs, row)
    last = jnp.maximum(total - 1, 0)  # what is computed at least
    low = jnp.stack([first_live_block(last, window, config.block_size) for window in config.windows])
    passed = [first_live_block(seqs.num_computed[parent], window, config.block_size) for window in config.windows]
    is_fork = (place < seqs.num_rows) & jnp.all(jnp.stack(passed) <= low)
    root = seqs.root[row]
    prefix_hash = prefix_directory.root_hash(root)

    count = ceil_div(total, config.block_size)
    inside = is_fork & (column < count) & (column >= low[:, None])
    blocks = jnp.where(inside, cache.tables.blocks[:, parent], 0)
    fork = Start(blocks, jnp.where(is_fork, count, 0), jnp.where(is_fork, total, 0), root, prefix_hash)
    if cache.directory is None:
        return fork, is_fork
    # Where the parent may not register, because older params computed some of it, nor may who shares it.
    is_stopped = is_fork & (cache.directory.last_id[parent] == prefix_directory.NO_ID)
    fork = fork._replace(last_id=jnp.where(is_stopped, prefix_directory.NO_ID, root))

    prefix = prefix_directory.find_prefix(
        cache.directory, config.windows, seqs.tokens[row], total // config.block_size, root, columns
    )
    count, low = _usable(config, prefix, total)
    blocks = jnp.where((column < count) & (column >= low[:, None]), prefix.blocks, 0)
    at = jnp.maximum(count - 1, 0)
    found = Start(
        blocks,
        count,
        count * config.block_size,
        jnp.where(count > 0, prefix.ids[at], root),
        jnp.where(count > 0, prefix.hashes[at], prefix_hash),
    )
    return Start(*(jnp.where(is_fork, a, b) for a, b in zip(fork, found, strict=True))), is_fork


def _usable(config: CacheConfig, prefix: prefix_directory.Prefix, total: Array) -> tuple[Array, Array]:
    """How many of the hits can be used, and the first block that each group needs then.

    A sliding-window group needs only the blocks that the window still sees; where it has lost one of them, the prefix is cut
    short until it has all.
    """
    columns = prefix.ids.shape[0]
    counts = jnp.arange(columns + 1, dtype=jnp.int32)
    computed = jnp.clip(counts * config.block_size, 0, jnp.maximum(total - 1, 0))
    low = jnp.stack([first_live_block(computed, window, config.block_size) for window in config.windows])
    lost = jnp.cumsum(prefix.blocks == 0, axis=1, dtype=jnp.int32)
    lost = jnp.pad(lost, ((0, 0), (1, 0)))
    whole = jnp.all(lost == jnp.take_along_axis(lost, jnp.minimum(low, counts), axis=1), axis=0)
    count = jnp.max(jnp.where(whole & (counts <= prefix.num_blocks), counts, 0))
    return count, low[:, count]
