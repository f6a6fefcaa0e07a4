"""Who runs in a step, and with which blocks.

A step first plans what the running rows compute, in order, up to the token budget. Nearly always
that is all. When it is not (a row has finished, blocks run short or are written by two, a waiting
row could start) the rare events run, in this order:

    advance     beam groups of which the candidates are in (`beam_search`)
    release     the blocks of finished rows, in running order (`preemption`)
    preempt     the last running row, or its whole beam group, until the others' blocks suffice; it
                goes to the head of the waiting order (`preemption`)
    copy        blocks for rows that write into shared ones
    admit       the head of the waiting order, one after another, each whole; stops at the first
                that does not fit; not at all in a step that preempted (`admission`)

The order of events is vLLM's, except that a whole prompt is allocated when it is admitted, so that
half-computed prompts cannot starve each other. Copies are settled before anyone is admitted: a row
that starts by sharing blocks reads what their holders write in this very step, and must not make
them write elsewhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import apply_if
from paged_jax.cache import prefix_directory
from paged_jax.cache.copy_on_write import (
    copies_needed,
    copy_on_write,
    shared_writes,
    written_blocks,
)
from paged_jax.cache.paged_cache import PagedCache, compact_head, is_head_live
from paged_jax.cache.pages import KVCache, copy_pages
from paged_jax.cache.registration import register
from paged_jax.kv_group import first_live_blocks, releasing_groups
from paged_jax.scheduling import beam_search
from paged_jax.scheduling.admission import admit, may_admit
from paged_jax.scheduling.plan import (
    StepPlan,
    compact_step_head,
    first_plan,
    grow_running,
    max_budget_blocks,
    num_reserved_blocks,
    num_step_blocks,
    plan_running,
    planned_writes,
)
from paged_jax.scheduling.preemption import release_and_preempt
from paged_jax.scheduling.sequences import Sequences, finished_places, running_rows

SETTLE, ADMIT, ALLOCATE, DONE = range(4)  # what a turn of the events does


def schedule(
    cache: PagedCache, seqs: Sequences, budget: Int[Array, ""]
) -> tuple[StepPlan, KVCache]:
    """Decide a step of up to `budget` tokens and do its copies; returns the plan and the pages.

    Afterwards the step's new blocks are free and stand at the queue's live head. Nothing is copied
    without an event, so the copies have no predicate of their own.
    """
    plan = first_plan(cache, seqs, budget)

    def run_events(carry):
        plan, kv = carry
        plan = _events(plan, budget)
        with jax.named_scope("copy"):
            return plan, copy_pages(kv, plan.copies)

    with jax.named_scope("events"):
        return apply_if(_is_eventful(plan, budget), run_events, (plan, cache.kv))


# ---------------------------------------------------------------- whether anything rare happens


def _is_eventful(plan: StepPlan, budget: Int[Array, ""]) -> Bool[Array, ""]:
    need, pool = num_step_blocks(plan), plan.cache.pool
    is_shared, _ = shared_writes(plan.cache, *planned_writes(plan))
    return (
        jnp.any(finished_places(plan.seqs))
        | jnp.any(is_shared)
        | beam_search.is_due(plan.seqs)
        | (need > pool.num_free)
        | ~is_head_live(plan.cache, need, max_budget_blocks(plan))
        | _must_register(plan)
        | may_admit(plan.cache, plan.seqs, plan.take, _num_spare(plan), budget)
    )


def _num_spare(plan: StepPlan) -> Int[Array, ""]:
    """Count the free blocks that no running row will need."""
    return plan.cache.pool.num_free - num_reserved_blocks(plan)


def _registers_before_release(cache: PagedCache) -> bool:
    """Whether blocks may leave a running row, which must be registered before."""
    return cache.directory is not None and bool(releasing_groups(cache.config.groups))


def _must_register(plan: StepPlan) -> Bool[Array, ""]:
    """Return whether unregistered blocks pass out of a window in this step."""
    directory, config = plan.cache.directory, plan.cache.config
    if directory is None or not _registers_before_release(plan.cache):
        return jnp.zeros_like(plan.num_preempted, bool)
    rows, _ = running_rows(plan.seqs)
    after = plan.seqs.num_computed[rows] + plan.take
    low = first_live_blocks(config.groups, after, config.block_size)
    is_stopped = directory.last_id[rows] == prefix_directory.NO_ID
    known = directory.num_registered[rows]
    return jnp.any(((plan.take > 0) & ~is_stopped)[None] & (low > known[None]))


# ---------------------------------------------------------------- the events


def _events(plan: StepPlan, budget: Int[Array, ""]) -> StepPlan:
    """Run the rare events in turns of one loop, so that each of their parts is compiled once.

        SETTLE     advance beams, release, preempt, copy: who stays is settled
        ADMIT      try to start one row; again as long as it may succeed
        ALLOCATE   take the step's blocks now and register what they will hold, where a chunk may
                   pass out of a window while it is computed

    Before each turn what is computed becomes known: before any of it is released, and before the
    next row looks it up.
    """
    has_allocate = _registers_before_release(plan.cache)
    end = ALLOCATE if has_allocate else DONE

    def turn(carry):
        plan, copies, phase = carry
        if has_allocate:
            plan = apply_if(phase == ALLOCATE, _allocate_now, plan)
        # What was computed is registered before any of it is released; what this step computes,
        # before another row looks it up.
        plan = _register_running(plan, jnp.where(phase == SETTLE, 0, plan.take))
        plan = apply_if(phase == SETTLE, lambda p: _settle(p, budget), plan)
        start = (plan, copies, plan.num_preempted == 0)
        plan, copies, goes_on = apply_if(phase == ADMIT, lambda c: _admit_one(c, budget), start)
        goes_on &= may_admit(plan.cache, plan.seqs, plan.take, _num_spare(plan) - copies, budget)
        after = jnp.where(goes_on, jnp.int32(ADMIT), jnp.int32(end))
        return plan, copies, jnp.where(phase == ALLOCATE, DONE, after)

    plan = plan.replace(
        cache=_reset_late_directory(plan.cache), num_events=jnp.ones_like(plan.num_events)
    )
    none = jnp.zeros_like(plan.num_events)
    plan, _, _ = jax.lax.while_loop(lambda c: c[2] != DONE, turn, (plan, none, none + SETTLE))
    # Where the last turn has taken the step's blocks nothing is left to prepare.
    return plan if has_allocate else plan.replace(cache=compact_step_head(plan))


def _reset_late_directory(cache: PagedCache) -> PagedCache:
    """Empty the directory where its ids come to an end."""
    directory = cache.directory
    if directory is None:
        return cache
    is_late = directory.next_id > prefix_directory.LAST_ID
    return cache.replace(directory=apply_if(is_late, prefix_directory.reset, directory))


def _register_running(plan: StepPlan, take: Int[Array, "S"]) -> StepPlan:
    """Register the full blocks that running rows have when `take` more tokens are computed."""
    cache, seqs = plan.cache, plan.seqs
    if cache.directory is None:
        return plan
    rows, is_active = running_rows(seqs)
    num_full = (seqs.num_computed[rows] + take) // cache.config.block_size
    num_allocated = jnp.min(cache.tables.num_blocks[:, rows], axis=0)
    rows = jnp.where(is_active, rows, seqs.num_rows)
    num_blocks = jnp.minimum(num_full, num_allocated)
    directory = register(cache.directory, cache.tables, seqs.tokens, rows, num_blocks)
    return plan.replace(cache=cache.replace(directory=directory))


def _settle(plan: StepPlan, budget: Int[Array, ""]) -> StepPlan:
    """Advance beams, release finished rows, preempt until the rest fits, take blocks for copies."""
    cache, seqs = beam_search.advance(plan.cache, plan.seqs)
    plan = release_and_preempt(plan.replace(cache=cache, seqs=seqs), budget)
    return _evict_overwritten(_copy_on_write(plan))


def _copy_on_write(plan: StepPlan) -> StepPlan:
    """Take blocks for the copies. The pages are copied before the step writes."""
    rows, first, is_writing = planned_writes(plan)
    copies = copies_needed(plan.cache, rows, first, is_writing)
    count = jnp.sum(copies, dtype=jnp.int32)
    cache = compact_head(plan.cache, count, copies.size)
    cache, pages = copy_on_write(cache, rows, first, copies)
    return plan.replace(cache=cache, copies=pages)


def _evict_overwritten(plan: StepPlan) -> StepPlan:
    """Evict the contents of blocks that a running row alone holds and has yet to fill.

    A fork shares its parent's last block. The parent fills it and ends: the block is registered
    with the parent's tokens, and the fork, with no one to copy for, writes its own into it.

        parent a b c d | e f g h    fork a b c d | e x . .    a hit of e f g h must not find it
    """
    cache, seqs = plan.cache, plan.seqs
    if cache.directory is None:
        return plan
    _, is_active = running_rows(seqs)
    rows, first, _ = planned_writes(plan)
    blocks = written_blocks(cache, rows, first)
    is_partial = is_active & (first % cache.config.block_size != 0)
    is_own = is_partial[None] & (cache.pool.ref_count[blocks] == 1)
    directory = prefix_directory.evict(cache.directory, jnp.where(is_own, blocks, 0))
    return plan.replace(cache=cache.replace(directory=directory))


def _admit_one(
    carry: tuple[StepPlan, Int[Array, ""], Bool[Array, ""]], budget: Int[Array, ""]
) -> tuple[StepPlan, Int[Array, ""], Bool[Array, ""]]:
    """Try to start the head of the waiting order; returns whether it was admitted.

    Also counts the blocks that those which started will copy in the next step.
    """
    plan, copies, _ = carry
    reserved = num_reserved_blocks(plan) + copies
    budget_left = budget - jnp.sum(plan.take, dtype=jnp.int32)
    cache, seqs, outcome = admit(plan.cache, plan.seqs, budget_left, reserved)
    plan = plan.replace(
        cache=cache,
        seqs=seqs,
        take=plan_running(budget, seqs),
        queried=plan.queried + outcome.queried,
        hits=plan.hits + outcome.hits,
    )
    return plan, copies + outcome.copies, outcome.is_admitted


def _allocate_now(plan: StepPlan) -> StepPlan:
    """Give the running rows the step's blocks."""
    max_tokens = plan.seqs.config.max_num_batched_tokens
    cache = grow_running(compact_step_head(plan), plan.seqs, plan.take, max_tokens)
    return plan.replace(cache=cache)
