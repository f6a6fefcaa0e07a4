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

from paged_jax import beam_search, prefix_directory
from paged_jax.admission import admit, may_admit
from paged_jax.arrays import once
from paged_jax.block_table import first_live_block, missing_blocks
from paged_jax.cache_manager import (
    PagedCache,
    blocks_begun,
    copies_needed,
    copy_on_write,
    grow,
    head_is_ready,
    make_ready,
    release_rows,
    shared_writes,
)
from paged_jax.config import CacheConfig
from paged_jax.kv_cache import BlockCopies, no_copies
from paged_jax.sequences import FINISHED, WAITING, Sequences, running_rows

SETTLE, ADMIT, LAST, DONE = range(4)  # what a turn of the events does


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
        | ~head_is_ready(plan.cache, need, width)
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
    # One loop, so that each of its parts is compiled once: a first turn that settles who stays, one for each row that tries to
    # start and, where a chunk may pass out of a window as it is computed, a last one that takes its blocks now.
    directory = plan.cache.directory
    has_last = directory is not None and any(window is not None for window in config.windows)
    end = LAST if has_last else DONE

    def turn(carry):
        plan, reserved, phase = carry
        if has_last:
            plan = once(phase == LAST, lambda p: _grow_now(config, most, p), plan)
        if directory is not None:
            # What rows have computed becomes known before any of it is released; what they compute in this step, before anyone
            # looks.
            cache = register_running(config, plan.cache, plan.seqs, jnp.where(phase == SETTLE, 0, plan.take))
            plan = plan.replace(cache=cache)
        plan = once(phase == SETTLE, lambda p: _settle(config, p, budget), plan)
        reserved = jnp.where(phase == SETTLE, jnp.sum(step_blocks(config, plan.cache, plan.seqs, plan.take)), reserved)

        def admit_one(carry):
            plan, reserved, _ = carry
            left = budget - jnp.sum(plan.take)
            cache, seqs, news = admit(config, plan.cache, plan.seqs, left, reserved, most)
            plan = plan.replace(
                cache=cache,
                seqs=seqs,
                take=plan_running(budget, seqs),
                queried=plan.queried + news.queried,
                hits=plan.hits + news.hits,
            )
            return plan, reserved + news.reserved, news.admitted

        plan, reserved, going = once(phase == ADMIT, admit_one, (plan, reserved, plan.num_preempted == 0))
        going &= may_admit(config, plan.seqs, plan.take, plan.cache.pool.num_free - reserved, budget, most)
        return plan, reserved, jnp.where(phase == LAST, DONE, jnp.where(going, ADMIT, end))

    if directory is not None:
        is_late = directory.next_id > prefix_directory.LAST_ID
        directory = once(is_late, prefix_directory.reset, directory)
    plan = plan.replace(cache=plan.cache.replace(directory=directory), num_events=jnp.ones_like(plan.num_events))
    none = jnp.zeros_like(plan.num_events)
    plan, _, _ = jax.lax.while_loop(lambda c: c[2] != DONE, turn, (plan, none, none + SETTLE))
    # The last turn has taken the step's blocks already; otherwise they are made ready for it.
    return plan if has_last else plan.replace(cache=_make_ready(config, most, plan))


def _settle(config: CacheConfig, plan: Schedule, budget: Array) -> Schedule:
    """Advance beams, release who has finished and then who is preempted, the last first, and take blocks for copies."""
    cache, seqs = beam_search.advance(plan.cache, plan.seqs)

    def is_short(carry):
        plan, has_released = carry
        return ~has_released | (_needed(config, plan) > plan.cache.pool.num_free) | _is_split(plan)

    def release(carry):
        plan, has_released = carry
        leaving = jnp.where(has_released, _is_last(plan.seqs), _finished(plan.seqs))
        return _release(budget, plan, leaving, has_released), jnp.ones_like(has_released)

    start = (plan.replace(cache=cache, seqs=seqs), jnp.zeros_like(plan.num_preempted, bool))
    plan, _ = jax.lax.while_loop(is_short, release, start)
    return _copy(config, plan)


def _make_ready(config: CacheConfig, most: int, plan: Schedule) -> PagedCache:
    need = jnp.sum(step_blocks(config, plan.cache, plan.seqs, plan.take))
    return make_ready(plan.cache, need, max_step_blocks(config, most, plan.seqs.max_running))


def _grow_now(config: CacheConfig, most: int, plan: Schedule) -> Schedule:
    cache = _make_ready(config, most, plan)
    return plan.replace(cache=grow_running(config, cache, plan.seqs, plan.take, most))


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
    cache = make_ready(plan.cache, jnp.sum(copies, dtype=jnp.int32), copies.size)
    cache, pages = copy_on_write(config, cache, rows, first, copies)
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


def _is_last(seqs: Sequences) -> Bool[Array, "S"]:
    return jnp.arange(seqs.max_running, dtype=jnp.int32) == seqs.num_running - 1


def _release(budget: Array, plan: Schedule, leaving: Bool[Array, "S"], is_preempted: Bool[Array, ""]) -> Schedule:
    """Take the blocks of running rows that leave back, and close the gaps.

    They have finished; or it is one row that `is_preempted`: it waits at the head and will be computed again from its first
    token.
    """
    seqs = plan.seqs
    rows, active = running_rows(seqs)
    gone, count = _gather(rows, leaving, seqs.num_rows)
    cache, _ = release_rows(plan.cache, gone, count)
    running, num_running = _gather(rows, active & ~leaving, seqs.num_rows)
    preempted = jnp.where(is_preempted, gone[0], seqs.num_rows)
    head = (seqs.waiting_head - is_preempted) % seqs.num_rows
    seqs = seqs.replace(
        running=running,
        num_running=num_running,
        num_computed=seqs.num_computed.at[preempted].set(0, mode="drop"),
        status=seqs.status.at[preempted].set(WAITING, mode="drop"),
        waiting=seqs.waiting.at[jnp.where(is_preempted, head, seqs.num_rows)].set(preempted, mode="drop"),
        waiting_head=head,
        num_waiting=seqs.num_waiting + is_preempted,
    )
    num_preempted = plan.num_preempted + is_preempted
    return plan.replace(cache=cache, seqs=seqs, take=plan_running(budget, seqs), num_preempted=num_preempted)


def _gather(rows: Array, chosen: Array, padding: int) -> tuple[Array, Array]:
    """The chosen rows moved together, `padding` behind them, and their number."""
    place = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, rows.shape[0])
    return jnp.full_like(rows, padding).at[place].set(rows, mode="drop"), jnp.sum(chosen, dtype=jnp.int32)
