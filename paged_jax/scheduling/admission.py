"""Who may start, and with which blocks it finds: the head of the waiting order, one row at a time.

A row that starts shares what is there already:

    fork      a further sample of a prompt shares all blocks of the sample that computed it, the
              partly filled last one too
    prefix    any other row shares the full blocks with content that the directory knows

It gets blocks for the rest, whole. What it shares it does not compute, except for the last token of
a prompt that is shared whole: that is computed for its logits. Its K and V are in the block already
and are not written.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from paged_jax.arrays import ceil_div
from paged_jax.cache import prefix_directory
from paged_jax.cache.content_hash import root_hash
from paged_jax.cache.paged_cache import PagedCache, compact_head, grow, share
from paged_jax.kv_group import blocks_to_admit, first_live_blocks, longest_start
from paged_jax.scheduling import waiting as waiting_order
from paged_jax.scheduling.sequences import RUNNING, Sequences


class Outcome(NamedTuple):
    """The outcome of an attempt to admit the head.

    Attributes:
        copies: blocks that the row will copy in the next step.
        queried: prompt tokens, where the row starts for the first time.
        hits: how many of them were found in the cache.
    """

    is_admitted: Bool[Array, ""]
    copies: Int[Array, ""]
    queried: Int[Array, ""]
    hits: Int[Array, ""]


class Start(NamedTuple):
    """The shared beginning of a row: M table columns in G groups, of which `num_blocks` are in use.

    Attributes:
        num_tokens: tokens in the shared blocks.
        last_id, prefix_hash: see `PrefixDirectory`.
        is_fork: whether it is shared with the sample that computed the prompt.
    """

    blocks: Int[Array, "G M"]
    num_blocks: Int[Array, ""]
    num_tokens: Int[Array, ""]
    last_id: Int[Array, ""]
    prefix_hash: UInt[Array, ""]
    is_fork: Bool[Array, ""]


class Unit(NamedTuple):
    """What starts with a row: a beam group is admitted with its leader.

    Attributes:
        blocks: blocks that must be free for it.
        kept: blocks that must stay free beside them: the watermark's, while others run.
        places: running places that must be free.
        is_follower: whether the row only follows the leader of its group, which was admitted just
            before: its place and blocks are there.
    """

    blocks: Int[Array, ""]
    kept: Int[Array, ""]
    places: Int[Array, ""]
    is_follower: Bool[Array, ""]


def may_admit(
    cache: PagedCache,
    seqs: Sequences,
    take: Int[Array, "S"],
    num_free: Int[Array, ""],
    budget: Int[Array, ""],
) -> Bool[Array, ""]:
    """Return whether to attempt to admit the head. Cheap: every step asks.

    `take` is the tokens that each running place computes in this step, `num_free` the blocks that
    no running row needs. A head that did not fit is retried when more blocks are free than
    then, or enough for all of it. A further sample waits for the one that computes its prompt.
    """
    row = waiting_order.first(seqs.waiting)
    parent, is_forkable = _parent(seqs, row)
    computed = seqs.num_computed[parent]
    # A group that does not allocate whole gets the blocks of this step's chunk only later.
    if all(group.allocates_whole for group in cache.config.groups):
        computed += jnp.sum(jnp.where(seqs.running == parent, take, 0), dtype=jnp.int32)
    is_ready = ~is_forkable | (computed >= seqs.num_prompt_tokens[row])
    unit = _unit(cache, seqs, row)
    is_refused = (row == seqs.refused_row) & (num_free <= seqs.refused_free)
    fits = (unit.blocks + unit.kept <= num_free) | ~is_refused
    has_place = seqs.num_running + unit.places <= seqs.max_running
    has_budget = (jnp.sum(take, dtype=jnp.int32) < budget) | unit.is_follower
    return (seqs.waiting.count > 0) & has_place & has_budget & is_ready & fits


def admit(
    cache: PagedCache, seqs: Sequences, budget_left: Int[Array, ""], reserved: Int[Array, ""]
) -> tuple[PagedCache, Sequences, Outcome]:
    """Start the head of the waiting order if all of it fits.

    Groups that allocate whole get blocks for the whole sequence, others those of its first chunk,
    of `budget_left` tokens at most. `reserved` blocks are not its to take.
    """
    config, row = cache.config, waiting_order.first(seqs.waiting)
    total = seqs.num_tokens[row]
    start = _find_start(cache, seqs, row)
    computed = jnp.clip(start.num_tokens, 0, jnp.maximum(total - 1, 0))
    chunk = jnp.minimum(total - computed, budget_left)

    is_shared = start.blocks != 0
    num_shared = jnp.sum(is_shared, axis=1, dtype=jnp.int32)
    is_unused = is_shared & (cache.pool.ref_count[start.blocks] == 0)
    # A partly filled shared block is copied when it is written, in the next step.
    is_partial = start.num_tokens % config.block_size != 0
    copies = jnp.where(is_partial, jnp.int32(config.num_groups), 0)
    free, unit = cache.pool.num_free - reserved, _unit(cache, seqs, row)
    needed = (
        unit.blocks
        + unit.kept
        - jnp.sum(num_shared, dtype=jnp.int32)
        + jnp.sum(is_unused, dtype=jnp.int32)
        + copies
    )
    fits = needed <= free

    cache = _allocate(cache, seqs, row, start, computed + chunk, fits)
    seqs, is_first = _start_row(seqs, row, computed, start.num_tokens, fits, free)
    is_counted = is_first & ~start.is_fork & ~unit.is_follower
    outcome = Outcome(
        is_admitted=fits,
        copies=jnp.where(fits, copies, 0),
        queried=jnp.where(is_counted, seqs.num_prompt_tokens[row], 0),
        hits=jnp.where(is_counted, start.num_tokens, 0),
    )
    return cache, seqs, outcome


def _allocate(
    cache: PagedCache,
    seqs: Sequences,
    row: Int[Array, ""],
    start: Start,
    chunk_end: Int[Array, ""],
    fits: Bool[Array, ""],
) -> PagedCache:
    """Let the row hold what it shares, and new blocks for the rest, if it fits."""
    config, total = cache.config, seqs.num_tokens[row]
    ends = [group.tokens_at_admission(total, chunk_end) for group in config.groups]
    need = [ceil_div(end, config.block_size) - start.num_blocks for end in ends]
    need = jnp.where(fits, jnp.maximum(jnp.stack(need)[:, None], 0), 0)
    max_need = min(config.num_groups * config.max_blocks_per_row, config.num_blocks)
    rows = jnp.where(fits, row, seqs.num_rows)[None]
    num_sharers = fits.astype(jnp.int32)
    cache = share(cache, rows, start.blocks, start.num_blocks, start.num_tokens, num_sharers)
    cache = grow(
        compact_head(cache, jnp.sum(need, dtype=jnp.int32), max_need),
        rows,
        need,
        total[None],
        max_need,
    )
    if cache.directory is None:
        return cache
    num_known = jnp.where(start.is_fork, 0, start.num_blocks)
    directory = prefix_directory.start_rows(
        cache.directory, rows[0], num_known, start.last_id, start.prefix_hash
    )
    return cache.replace(directory=directory)


def _start_row(
    seqs: Sequences,
    row: Int[Array, ""],
    computed: Int[Array, ""],
    num_hit: Int[Array, ""],
    fits: Bool[Array, ""],
    free: Int[Array, ""],
) -> tuple[Sequences, Bool[Array, ""]]:
    """Move the head to the running places if it fits, else note that it was refused.

    Also returns whether it starts for the first time.
    """
    rows = jnp.where(fits, row, seqs.num_rows)
    is_first = fits & (seqs.num_cached[row] < 0)
    first_rows = jnp.where(is_first, row, seqs.num_rows)
    place = jnp.where(fits, seqs.num_running, seqs.max_running)
    seqs = seqs.replace(
        running=seqs.running.at[place].set(row, mode="drop"),
        num_running=seqs.num_running + fits.astype(jnp.int32),
        num_computed=seqs.num_computed.at[rows].set(computed, mode="drop"),
        num_hit=seqs.num_hit.at[rows].set(num_hit, mode="drop"),
        num_cached=seqs.num_cached.at[first_rows].set(num_hit, mode="drop"),
        status=seqs.status.at[rows].set(RUNNING, mode="drop"),
        waiting=waiting_order.pop_front(seqs.waiting, fits),
        refused_row=jnp.where(fits, seqs.num_rows, row),
        refused_free=free,
    )
    return seqs, is_first


def _unit(cache: PagedCache, seqs: Sequences, row: Int[Array, ""]) -> Unit:
    """Return what starts with the row."""
    config, beams = cache.config, seqs.beams

    def blocks(num_tokens):
        max_chunk = seqs.config.max_num_batched_tokens
        return blocks_to_admit(config.groups, num_tokens, max_chunk, config.block_size)

    own = blocks(seqs.num_tokens[row])
    one = jnp.ones_like(own)
    kept = jnp.full_like(own, int(seqs.config.watermark * config.num_blocks))
    kept = jnp.where(seqs.num_running > 0, kept, 0)
    if beams is None:
        return Unit(own, kept, one, one == 0)
    leader = beams.leader[row]
    is_leader, is_follower = leader == row, (leader != row) & (leader < seqs.num_rows)
    members = beams.members[row]
    is_inside = members < seqs.num_rows
    lengths = seqs.num_tokens[jnp.minimum(members, seqs.num_rows - 1)]
    lengths = jnp.where(is_inside, lengths, 0)
    group = jnp.sum(jnp.where(lengths > 0, blocks(lengths), 0), dtype=jnp.int32)
    places = jnp.sum(is_inside, dtype=jnp.int32)
    return Unit(
        blocks=jnp.where(is_leader, group, own),
        kept=jnp.where(is_follower, 0, kept),  # its leader has left them
        places=jnp.where(is_leader, places, one),
        is_follower=is_follower,
    )


def _parent(seqs: Sequences, row: Int[Array, ""]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Return the row that computes this one's prompt, and whether this one can fork from it.

    It cannot once the parent has ended, or once this row has output of its own (after preemption).
    It then starts like any other row.
    """
    parent = seqs.parent[row]
    clamped = jnp.minimum(parent, seqs.num_rows - 1)
    is_fresh = seqs.num_tokens[row] == seqs.num_prompt_tokens[row]
    is_running = (parent < seqs.num_rows) & (seqs.status[clamped] == RUNNING)
    return clamped, is_running & is_fresh


def _find_start(cache: PagedCache, seqs: Sequences, row: Int[Array, ""]) -> Start:
    """Find what the row can share. Blocks below the groups' windows are null."""
    fork = _find_fork(cache, seqs, row)
    if cache.directory is None:
        return fork
    found = _find_prefix(cache, seqs, row)
    chosen = (jnp.where(fork.is_fork, a, b) for a, b in zip(fork, found, strict=True))
    return Start(*chosen)


def _find_fork(cache: PagedCache, seqs: Sequences, row: Int[Array, ""]) -> Start:
    """Return the parent's blocks, where the row can fork from it and none has been released."""
    config, total = cache.config, seqs.num_tokens[row]
    column = jnp.arange(config.max_blocks_per_row, dtype=jnp.int32)
    parent, is_forkable = _parent(seqs, row)
    last = jnp.maximum(total - 1, 0)  # at least this token is computed
    low = first_live_blocks(config.groups, last, config.block_size)
    released = first_live_blocks(config.groups, seqs.num_computed[parent], config.block_size)
    is_fork = is_forkable & jnp.all(released <= low)
    count = ceil_div(total, config.block_size)
    is_used = (is_fork & (column < count))[None] & (column[None] >= low[:, None])
    last_id = seqs.root[row]
    if cache.directory is not None:
        # Where the parent may not register, because older params computed some of it, nor may this.
        is_stopped = is_fork & (cache.directory.last_id[parent] == prefix_directory.NO_ID)
        last_id = jnp.where(is_stopped, prefix_directory.NO_ID, last_id)
    return Start(
        blocks=jnp.where(is_used, cache.tables.blocks[:, parent], 0),
        num_blocks=jnp.where(is_fork, count, 0),
        num_tokens=jnp.where(is_fork, total, 0),
        last_id=last_id,
        prefix_hash=root_hash(seqs.root[row]),
        is_fork=is_fork,
    )


def _find_prefix(cache: PagedCache, seqs: Sequences, row: Int[Array, ""]) -> Start:
    """Return the longest beginning of the row's tokens that every group can start from."""
    config, total, root = cache.config, seqs.num_tokens[row], seqs.root[row]
    num_columns, size = config.max_blocks_per_row, config.block_size
    assert cache.directory is not None
    prefix = prefix_directory.find_prefix(
        cache.directory, seqs.tokens[row], total // size, root, num_columns
    )
    count, low = longest_start(config.groups, prefix.blocks != 0, total, prefix.num_blocks, size)
    column = jnp.arange(num_columns, dtype=jnp.int32)
    is_used = (column < count)[None] & (column[None] >= low[:, None])
    last = jnp.maximum(count - 1, 0)
    return Start(
        blocks=jnp.where(is_used, prefix.blocks, 0),
        num_blocks=count,
        num_tokens=count * size,
        last_id=jnp.where(count > 0, prefix.ids[last], root),
        prefix_hash=jnp.where(count > 0, prefix.hashes[last], root_hash(root)),
        is_fork=jnp.zeros_like(count, bool),
    )
