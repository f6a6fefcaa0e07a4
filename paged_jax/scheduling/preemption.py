"""Who gives its blocks back at the beginning of an eventful step: finished rows, and victims.

    running 4 7 2 9, of which 7 has finished     -> release 7, then 4 2 9
    blocks of the others do not suffice          -> preempt 9: it waits at the head, then 4 2

Preemption recomputes: a victim restarts from its first token, with what the prefix directory
still holds of it. Of a beam group all rows are preempted, one after another.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import compact
from paged_jax.cache.copy_on_write import copies_needed
from paged_jax.cache.paged_cache import release_rows
from paged_jax.scheduling import waiting as waiting_order
from paged_jax.scheduling.plan import StepPlan, num_step_blocks, plan_running, planned_writes
from paged_jax.scheduling.sequences import WAITING, Sequences, finished_places, running_rows


def release_and_preempt(plan: StepPlan, budget: Int[Array, ""]) -> StepPlan:
    """Release finished rows, then preempt the last running row until the others' blocks suffice.

    One loop releases both, so that the release is compiled once: its first trip takes all finished
    rows, each later one a victim.
    """

    def is_unsettled(carry):
        plan, has_released_finished = carry
        return ~has_released_finished | _must_preempt(plan)

    def release(carry):
        plan, has_released_finished = carry
        is_victim = _last_running(plan.seqs)
        leaving = jnp.where(has_released_finished, is_victim, finished_places(plan.seqs))
        plan, rows = _release_places(plan, leaving)
        victim = jnp.where(has_released_finished, rows[0], plan.seqs.num_rows)
        plan = _requeue(plan, victim, has_released_finished)
        plan = plan.replace(take=plan_running(budget, plan.seqs))
        return plan, jnp.ones_like(has_released_finished)

    start = (plan, jnp.zeros_like(plan.num_preempted, bool))
    return jax.lax.while_loop(is_unsettled, release, start)[0]


def _must_preempt(plan: StepPlan) -> Bool[Array, ""]:
    """Return whether the running rows' blocks do not suffice, or a beam group is split."""
    copies = copies_needed(plan.cache, *planned_writes(plan))
    needed = num_step_blocks(plan) + jnp.sum(copies, dtype=jnp.int32)
    return (needed > plan.cache.pool.num_free) | _is_group_split(plan)


def _last_running(seqs: Sequences) -> Bool[Array, "S"]:
    """Return the victim of preemption: the last in running order."""
    return jnp.arange(seqs.max_running, dtype=jnp.int32) == seqs.num_running - 1


def _is_group_split(plan: StepPlan) -> Bool[Array, ""]:
    """Return whether a beam group has been preempted in part: its leader is preempted last."""
    seqs = plan.seqs
    if seqs.beams is None:
        return jnp.zeros_like(plan.num_preempted, bool)
    head = waiting_order.first(seqs.waiting)
    leader = seqs.beams.leader[head]
    return (plan.num_preempted > 0) & (leader < seqs.num_rows) & (leader != head)


def _release_places(
    plan: StepPlan, is_leaving: Bool[Array, "S"]
) -> tuple[StepPlan, Int[Array, "S"]]:
    """Release the blocks of the rows that leave, and close the gaps in the running places.

    Also returns those rows, in order.
    """
    seqs = plan.seqs
    rows, is_active = running_rows(seqs)
    gone, count = compact(rows, is_leaving, seqs.num_rows)
    cache, _ = release_rows(plan.cache, gone, count)
    running, num_running = compact(rows, is_active & ~is_leaving, seqs.num_rows)
    seqs = seqs.replace(running=running, num_running=num_running)
    return plan.replace(cache=cache, seqs=seqs), gone


def _requeue(plan: StepPlan, victim: Int[Array, ""], is_preempted: Bool[Array, ""]) -> StepPlan:
    """Put a preempted row (R for none) at the head of the waiting order, to be recomputed."""
    seqs = plan.seqs
    seqs = seqs.replace(
        num_computed=seqs.num_computed.at[victim].set(0, mode="drop"),
        status=seqs.status.at[victim].set(WAITING, mode="drop"),
        waiting=waiting_order.push_front(seqs.waiting, victim),
    )
    num_preempted = plan.num_preempted + is_preempted.astype(jnp.int32)
    return plan.replace(seqs=seqs, num_preempted=num_preempted)
