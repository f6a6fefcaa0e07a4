"""The plan of one step: what each running place computes, and the blocks that it needs for that."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.cache.block_table import missing_blocks
from paged_jax.cache.paged_cache import PagedCache, compact_head, grow
from paged_jax.cache.pages import BlockCopies, no_copies
from paged_jax.kv_group import first_live_blocks, max_new_blocks, most_held, releasing_groups
from paged_jax.scheduling.sequences import Sequences, running_rows


class StepPlan(struct.PyTreeNode):
    """What scheduling has changed so far, and what it has decided.

    Attributes:
        cache: without its pages.
        take: tokens that each running place computes in this step.
        copies: pages to be copied before anything is written.
        num_events: 1 where there were any events.
        queried: prompt tokens of rows that started for the first time.
        hits: how many of them were in the cache.
    """

    cache: PagedCache
    seqs: Sequences
    take: Int[Array, "S"]
    copies: BlockCopies
    num_events: Int[Array, ""]
    num_preempted: Int[Array, ""]
    queried: Int[Array, ""]
    hits: Int[Array, ""]


def first_plan(cache: PagedCache, seqs: Sequences, budget: Int[Array, ""]) -> StepPlan:
    """Return the plan of a step without events: the running rows go on."""
    zero = jnp.zeros_like(seqs.num_running)
    copies = no_copies(cache.config.num_groups * seqs.max_running, zero)
    return StepPlan(cache.books, seqs, plan_running(budget, seqs), copies, zero, zero, zero, zero)


def plan_running(budget: Int[Array, ""], seqs: Sequences) -> Int[Array, "S"]:
    """Divide the budget among the running places, first come first served.

    pending 1 5 4, budget 7 -> 1 5 1
    """
    rows, is_active = running_rows(seqs)
    pending = jnp.where(is_active, seqs.num_tokens[rows] - seqs.num_computed[rows], 0)
    pending = jnp.minimum(pending, budget)  # a sum of long prompts could pass 32 bits
    before = jnp.cumsum(pending, dtype=jnp.int32) - pending
    return jnp.clip(budget - before, 0, pending)


def grow_running(
    cache: PagedCache, seqs: Sequences, take: Int[Array, "S"], width: int
) -> PagedCache:
    """Give the running rows the blocks for the step's tokens, `width` at most.

    The queue's head must be live.
    """
    rows, _ = running_rows(seqs)
    need = _step_blocks(cache, seqs, take)
    target = jnp.where(take > 0, rows, seqs.num_rows)[:width]
    num_tokens = (seqs.num_computed[rows] + take)[:width]
    return grow(cache, target, need[:, :width], num_tokens, _max_step_blocks(cache, seqs, width))


def _step_blocks(cache: PagedCache, seqs: Sequences, take: Int[Array, "S"]) -> Int[Array, "G S"]:
    """Count the blocks that each running place lacks to compute `take` tokens."""
    rows, _ = running_rows(seqs)
    ends = seqs.num_computed[rows] + take
    missing = missing_blocks(cache.tables, rows, ends, cache.config.block_size)
    return jnp.where(take > 0, missing, 0)


def num_step_blocks(plan: StepPlan) -> Int[Array, ""]:
    """Count the blocks that all running places lack."""
    return jnp.sum(_step_blocks(plan.cache, plan.seqs, plan.take), dtype=jnp.int32)


def num_reserved_blocks(plan: StepPlan) -> Int[Array, ""]:
    """Count the free blocks that the running rows will need: nobody is admitted with them.

    Those are this step's, and where a group gets its blocks chunk by chunk, what it lacks of the
    most that it holds at once while it computes its known tokens: a prompt is never preempted for
    one that started later.

        window 8, blocks of 4, chunks of 8: 5 blocks at once; a row that holds 2 reserves 3
    """
    cache, seqs = plan.cache, plan.seqs
    groups, size = cache.config.groups, cache.config.block_size
    if not releasing_groups(groups):
        return num_step_blocks(plan)
    rows, is_active = running_rows(seqs)
    total, computed = seqs.num_tokens[rows], seqs.num_computed[rows]
    chunk = jnp.minimum(total - computed, seqs.config.max_num_batched_tokens)
    held = cache.tables.num_blocks[:, rows] - first_live_blocks(groups, computed, size)
    lacking = jnp.maximum(most_held(groups, total, chunk, size) - held, 0)
    return jnp.sum(jnp.where(is_active[None], lacking, 0), dtype=jnp.int32)


def _max_step_blocks(cache: PagedCache, seqs: Sequences, width: int) -> int:
    """Bound the blocks that a step of `width` tokens needs."""
    config = cache.config
    max_new = max_new_blocks(config.groups, width, seqs.max_running, config.block_size)
    return min(max_new, config.num_blocks)


def max_budget_blocks(plan: StepPlan) -> int:
    """Bound the blocks that a step of the whole token budget needs."""
    return _max_step_blocks(plan.cache, plan.seqs, plan.seqs.config.max_num_batched_tokens)


def planned_writes(plan: StepPlan) -> tuple[Int[Array, "S"], Int[Array, "S"], Bool[Array, "S"]]:
    """Return the running rows, the first position that each writes, and whether it writes at all.

    What was hit is not written again.
    """
    seqs = plan.seqs
    rows, _ = running_rows(seqs)
    computed = seqs.num_computed[rows]
    first = jnp.maximum(computed, seqs.num_hit[rows])
    return rows, first, computed + plan.take > first


def compact_step_head(plan: StepPlan) -> PagedCache:
    """Move the step's new blocks together at the queue's head."""
    return compact_head(plan.cache, num_step_blocks(plan), max_budget_blocks(plan))
