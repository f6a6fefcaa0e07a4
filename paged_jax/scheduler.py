"""Who runs in a step, and with which blocks.

A step first plans what the running rows compute, in order, up to the token budget. Nearly always that is all. When it is not
(a row has finished, blocks run short or are written by two, a waiting row could start) the rare events run, in this order:

    advance     beam groups whose candidates are in (`beam_search`)
    release     the blocks of finished rows, in running order
    preempt     the last running row, or its whole beam group, until the others' blocks suffice; it goes to the head of the
                waiting order
    copy        blocks for rows that write into shared ones
    admit       the head of the waiting order, one after another, each whole; stops at the first that does not fit;
                not at all in a step that preempted (`admission`)

The order of events is vLLM's, but that a whole prompt is allocated when it is admitted: several half-computed prompts can
then not starve each other. Copies are settled before anyone is admitted: a row that starts by sharing blocks reads what their
holders write in this very step, and must not make them write elsewhere.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax import beam_search, block_pool, prefix_directory
from paged_jax.admission import admit, may_admit
from paged_jax.arrays import once
from paged_jax.block_table import first_live_block, missing_blocks
from paged_jax.cache_manager import (
    PagedCache,
    blocks_begun,
    copies_needed,
    copy_on_write,
    grow,
    release_rows,
    shared_writes,
)
from paged_jax.config import CacheConfig
from paged_jax.kv_cache import BlockCopies, no_copies
from paged_jax.sequences import FINISHED, WAITING, Sequences, running_rows


class Schedule(struct.PyTreeNode):
    """What scheduling changes, and what it decides."""

    cache: PagedCache  # without its pages
    seqs: Sequences
    take: Int[Array, "S"]  # tokens that each running place computes in this step
    copies: BlockCopies  # pages to be copied before anything is written
    num_events: Int[Array, ""]  # 1 where there were any
    num_preempted: Int[Array, ""]  # in this step
    queried: Int[Array, ""]  # prompt tokens of rows that started for the first time
    hits: Int[Array, ""]  # how many of them were in the cache


def schedule(config: CacheConfig, most: int, cache: PagedCache, seqs: Sequences, budget: Int[Array, ""]) -> Schedule:
    """Decide a step of up to `budget` tokens, `most` at most; afterwards its new blocks are free and ready at the queue's head."""
    zero = jnp.zeros_like(seqs.num_running)
    copies = no_copies(config.num_groups * seqs.max_running, zero)
    plan = Schedule(cache.books, seqs, plan_running(budget, seqs), copies, zero, zero, zero, zero)
    eventful = _is_eventful(config, most, plan, budget)
    with jax.named_scope("events"):
        return once(eventful, lambda p: _events(config, most, p, budget), plan)


def plan_running(budget: Int[Array, ""], seqs: Sequences) -> Int[Array, "S"]:
    """Tokens for each running place: what it has pending, first come first served, `budget` in all."""
    rows, active = running_rows(seqs)
    pending = jnp.where(active, seqs.num_tokens[rows] - seqs.num_computed[rows], 0)
    before = jnp.cumsum(pending) - pending
    return jnp.clip(budget - before, 0, pending)


def step_blocks(config: CacheConfig, cache: PagedCache, seqs: Sequences, take: Int[Array, "S"]) -> Int[Array, "G S"]:
    """Blocks that each running place lacks to compute `take` tokens."""
    rows, _ = running_rows(seqs)
    missing = missing_blocks(cache.tables, rows, seqs.num_computed[rows] + take, config.block_size)
    return jnp.where(take > 0, missing, 0)


def max_step_blocks(config: CacheConfig, width: int, max_running: int) -> int:
    """Blocks that all running rows can need in a step of `width` tokens together.

    A full-attention group gets a prompt's blocks at admission and then one at a time; a sliding-window group gets them by chunk.
    """
    rows = min(width, max_running)
    chunks = blocks_begun(width, rows, config.block_size)
    return min(sum(rows if window is None else chunks for window in config.windows), config.num_blocks)


def _writes(seqs: Sequences, take: Int[Array, "S"]) -> tuple[Array, Array, Array]:
    """The running rows, the first position that each writes, and whether it writes at all: what was hit is not written again."""
    rows, _ = running_rows(seqs)
    computed = seqs.num_computed[rows]
    first = jnp.maximum(computed, seqs.num_hit[rows])
    return rows, first, computed + take > first


def _finished(seqs: Sequences) -> Bool[Array, "S"]:
    rows, active = running_rows(seqs)
    return active & (seqs.status[rows] == FINISHED)


def _is_eventful(config: CacheConfig, most: int, plan: Schedule, budget: Array) -> Bool[Array, ""]:
    need = jnp.sum(step_blocks(config, plan.cache, plan.seqs, plan.take))
    width = max_step_blocks(config, most, plan.seqs.max_running)
    pool = plan.cache.pool
    shared, _ = shared_writes(config, plan.cache, *_writes(plan.seqs, plan.take))
    return (
        jnp.any(_finished(plan.seqs))
        | jnp.any(shared)
        | beam_search.is_due(plan.seqs)
        | (need > pool.num_free)
        | ~block_pool.head_is_ready(pool, need, width)
        | _must_register(config, plan)
        | may_admit(config, plan.seqs, plan.take, pool.num_free - need, budget, most)
    )


def _must_register(config: CacheConfig, plan: Schedule) -> Bool[Array, ""]:
    """Whether blocks that the directory does not know pass out of a window in this step."""
    if plan.cache.directory is None or all(window is None for window in config.windows):
        return jnp.zeros_like(plan.num_preempted, bool)
    rows, _ = running_rows(plan.seqs)
    after = plan.seqs.num_computed[rows] + plan.take
    low = [first_live_block(after, window, config.block_size) for window in config.windows]
    stopped = plan.cache.directory.last_id[rows] == prefix_directory.NO_ID
    known = plan.cache.directory.num_registered[rows]
    return jnp.any((plan.take > 0) & ~stopped & (jnp.stack(low) > known))


def _events(config: CacheConfig, most: int, plan: Schedule, budget: Array) -> Schedule:
    # What rows have computed becomes known before any of it is released; what they compute in this step, before anyone looks.
    cache = register_running(config, _with_ids_left(plan.cache), plan.seqs, jnp.zeros_like(plan.take))
    cache, seqs = beam_search.advance(cache, plan.seqs)
    cache, seqs = release_finished(cache, seqs)
    plan = plan.replace(cache=cache, seqs=seqs, take=plan_running(budget, seqs))

    def is_short(plan):
        return (_needed(config, plan) > plan.cache.pool.num_free) | _is_split(plan)

    plan = jax.lax.while_loop(is_short, lambda p: _preempt_last(budget, p), plan)
    plan = _copy(config, plan)
    reserved = jnp.sum(step_blocks(config, plan.cache, plan.seqs, plan.take))

    def can_go_on(carry):
        plan, reserved, going = carry
        free = plan.cache.pool.num_free - reserved
        return going & may_admit(config, plan.seqs, plan.take, free, budget, most)

    def admit_one(carry):
        plan, reserved, _ = carry
        cache = register_running(config, plan.cache, plan.seqs, plan.take)
        left = budget - jnp.sum(plan.take)
        cache, seqs, news = admit(config, cache, plan.seqs, left, reserved, most)
        plan = plan.replace(
            cache=cache,
            seqs=seqs,
            take=plan_running(budget, seqs),
            queried=plan.queried + news.queried,
            hits=plan.hits + news.hits,
        )
        return plan, reserved + news.reserved, news.admitted

    start = (plan, reserved, plan.num_preempted == 0)
    plan, _, _ = jax.lax.while_loop(can_go_on, admit_one, start)
    cache = _make_ready(config, most, plan)
    if cache.directory is not None and any(window is not None for window in config.windows):
        # A chunk may pass out of the window as it is computed: its blocks are taken now, and registered.
        cache = grow_running(config, cache, plan.seqs, plan.take, most)
        cache = register_running(config, cache, plan.seqs, plan.take)
    return plan.replace(cache=cache, num_events=jnp.ones_like(plan.num_events))


def _make_ready(config: CacheConfig, most: int, plan: Schedule) -> PagedCache:
    need = jnp.sum(step_blocks(config, plan.cache, plan.seqs, plan.take))
    width = max_step_blocks(config, most, plan.seqs.max_running)
    return plan.cache.replace(pool=block_pool.make_ready(plan.cache.pool, need, width))


def grow_running(
    config: CacheConfig, cache: PagedCache, seqs: Sequences, take: Int[Array, "S"], width: int
) -> PagedCache:
    """Give the running rows the blocks in which the step's tokens, `width` at most, go; they stand ready at the queue's head."""
    rows, _ = running_rows(seqs)
    need = step_blocks(config, cache, seqs, take)
    target = jnp.where(take > 0, rows, seqs.num_rows)[:width]
    asked = (seqs.num_computed[rows] + take)[:width]
    return grow(cache, target, need[:, :width], asked, max_step_blocks(config, width, seqs.max_running))


def _is_split(plan: Schedule) -> Bool[Array, ""]:
    """Whether a beam group has been preempted in part: its leader goes last."""
    seqs = plan.seqs
    if seqs.beams is None:
        return jnp.zeros_like(plan.num_preempted, bool)
    head = seqs.waiting[seqs.waiting_head]
    leader = seqs.beams.leader[head]
    return (plan.num_preempted > 0) & (leader < seqs.num_rows) & (leader != head)


def _needed(config: CacheConfig, plan: Schedule) -> Int[Array, ""]:
    """Blocks that the running rows' step takes, copies included."""
    copies = copies_needed(config, plan.cache, *_writes(plan.seqs, plan.take))
    return jnp.sum(step_blocks(config, plan.cache, plan.seqs, plan.take)) + jnp.sum(copies, dtype=jnp.int32)


def _copy(config: CacheConfig, plan: Schedule) -> Schedule:
    """Take blocks for the copies; the pages are copied before the step writes."""
    rows, first, writes = _writes(plan.seqs, plan.take)
    copies = copies_needed(config, plan.cache, rows, first, writes)
    pool = block_pool.make_ready(plan.cache.pool, jnp.sum(copies, dtype=jnp.int32), copies.size)
    cache, pages = copy_on_write(config, plan.cache.replace(pool=pool), rows, first, copies)
    return plan.replace(cache=cache, copies=pages)


def register_running(config: CacheConfig, cache: PagedCache, seqs: Sequences, take: Int[Array, "S"]) -> PagedCache:
    """Make the full blocks known that running rows have when `take` more tokens are computed."""
    if cache.directory is None:
        return cache
    rows, active = running_rows(seqs)
    full = (seqs.num_computed[rows] + take) // config.block_size
    full = jnp.minimum(full, jnp.min(cache.tables.num_blocks[:, rows], axis=0))  # what is there to be named
    rows = jnp.where(active, rows, seqs.num_rows)
    directory = prefix_directory.register(cache.directory, config.windows, cache.tables, seqs.tokens, rows, full)
    return cache.replace(directory=directory)


def _with_ids_left(cache: PagedCache) -> PagedCache:
    if cache.directory is None:
        return cache
    is_late = cache.directory.next_id > prefix_directory.LAST_ID
    return cache.replace(directory=once(is_late, prefix_directory.reset, cache.directory))


def release_finished(cache: PagedCache, seqs: Sequences) -> tuple[PagedCache, Sequences]:
    """Give back the blocks of running rows that have finished, and close the gaps that they leave."""
    finished = _finished(seqs)
    rows, active = running_rows(seqs)
    gone, count = _gather(rows, finished, seqs.num_rows)
    cache, _ = release_rows(cache, gone, count)
    running, num_running = _gather(rows, active & ~finished, seqs.num_rows)
    return cache, seqs.replace(running=running, num_running=num_running)


def _gather(rows: Array, chosen: Array, padding: int) -> tuple[Array, Array]:
    """The chosen rows moved together, `padding` behind them, and their number."""
    place = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, rows.shape[0])
    return jnp.full_like(rows, padding).at[place].set(rows, mode="drop"), jnp.sum(chosen, dtype=jnp.int32)


def _preempt_last(budget: Array, plan: Schedule) -> Schedule:
    """Take the last running row's blocks back; it waits at the head and will be computed again from its first token."""
    seqs = plan.seqs
    last = seqs.num_running - 1
    row = seqs.running[last]
    cache, _ = release_rows(plan.cache, row[None], jnp.ones_like(last))
    head = (seqs.waiting_head - 1) % seqs.num_rows
    seqs = seqs.replace(
        running=seqs.running.at[last].set(seqs.num_rows),
        num_running=last,
        num_computed=seqs.num_computed.at[row].set(0),
        status=seqs.status.at[row].set(WAITING),
        waiting=seqs.waiting.at[head].set(row),
        waiting_head=head,
        num_waiting=seqs.num_waiting + 1,
    )
    return plan.replace(cache=cache, seqs=seqs, take=plan_running(budget, seqs), num_preempted=plan.num_preempted + 1)
