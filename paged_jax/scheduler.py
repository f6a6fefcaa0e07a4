"""Who runs in a step, and with which blocks.

A step first plans what the running rows compute, in order, up to the token budget. Nearly always that is all. When it is not
(a row has finished, blocks run short, a waiting row could start) the rare events run, in this order:

    release     the blocks of finished rows, in running order
    preempt     the last running row, until the others' blocks suffice; it goes to the head of the waiting order
    admit       the head of the waiting order, one after another, each whole; stops at the first that does not fit;
                not at all in a step that preempted

The order of events is vLLM's, but that a whole prompt is allocated when it is admitted: several half-computed prompts can
then not starve each other.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax import block_pool
from paged_jax.arrays import ceil_div, once
from paged_jax.block_pool import BlockPool
from paged_jax.block_table import BlockTables, missing_blocks
from paged_jax.cache_manager import admission_blocks, blocks_begun, grow, release_rows
from paged_jax.config import CacheConfig
from paged_jax.sequences import FINISHED, RUNNING, WAITING, Sequences, running_rows


class Schedule(struct.PyTreeNode):
    """What scheduling changes, and what it decides."""

    pool: BlockPool
    tables: BlockTables
    seqs: Sequences
    take: Int[Array, "S"]  # tokens that each running place computes in this step
    num_preempted: Int[Array, ""]  # in this step


def schedule(config: CacheConfig, budget: int, pool: BlockPool, tables: BlockTables, seqs: Sequences) -> Schedule:
    """Decide the step; afterwards the blocks that it needs are free and stand ready at the queue's head."""
    plan = Schedule(pool, tables, seqs, plan_running(budget, seqs), jnp.zeros_like(seqs.num_running))
    eventful = _is_eventful(config, budget, plan)
    with jax.named_scope("events"):
        return once(eventful, lambda p: _events(config, budget, p), plan)


def plan_running(budget: int, seqs: Sequences) -> Int[Array, "S"]:
    """Tokens for each running place: what it has pending, first come first served, `budget` in all."""
    rows, active = running_rows(seqs)
    pending = jnp.where(active, seqs.num_tokens[rows] - seqs.num_computed[rows], 0)
    before = jnp.cumsum(pending) - pending
    return jnp.clip(budget - before, 0, pending)


def step_blocks(config: CacheConfig, tables: BlockTables, seqs: Sequences, take: Int[Array, "S"]) -> Int[Array, "G S"]:
    """Blocks that each running place lacks to compute `take` tokens."""
    rows, _ = running_rows(seqs)
    missing = missing_blocks(tables, rows, seqs.num_computed[rows] + take, config.block_size)
    return jnp.where(take > 0, missing, 0)


def max_step_blocks(config: CacheConfig, width: int, max_running: int) -> int:
    """Blocks that all running rows can need in a step of `width` tokens together.

    A full-attention group gets a prompt's blocks at admission and then one at a time; a sliding-window group gets them by chunk.
    """
    rows = min(width, max_running)
    chunks = blocks_begun(width, rows, config.block_size)
    return min(sum(rows if window is None else chunks for window in config.windows), config.num_blocks)


def _finished(seqs: Sequences) -> Bool[Array, "S"]:
    rows, active = running_rows(seqs)
    return active & (seqs.status[rows] == FINISHED)


def _is_eventful(config: CacheConfig, budget: int, plan: Schedule) -> Bool[Array, ""]:
    need = jnp.sum(step_blocks(config, plan.tables, plan.seqs, plan.take))
    width = max_step_blocks(config, budget, plan.seqs.max_running)
    return (
        jnp.any(_finished(plan.seqs))
        | (need > plan.pool.num_free)
        | ~block_pool.head_is_ready(plan.pool, need, width)
        | _can_admit(config, budget, plan, need, jnp.sum(plan.take))
    )


def _events(config: CacheConfig, budget: int, plan: Schedule) -> Schedule:
    pool, tables, seqs = release_finished(plan.pool, plan.tables, plan.seqs)
    plan = Schedule(pool, tables, seqs, plan_running(budget, seqs), plan.num_preempted)

    def is_short(plan):
        return jnp.sum(step_blocks(config, plan.tables, plan.seqs, plan.take)) > plan.pool.num_free

    plan = jax.lax.while_loop(is_short, lambda p: _preempt_last(budget, p), plan)
    need = jnp.sum(step_blocks(config, plan.tables, plan.seqs, plan.take))

    def may_admit(carry):
        plan, taken = carry
        return (plan.num_preempted == 0) & _can_admit(config, budget, plan, need, taken)

    plan, _ = jax.lax.while_loop(may_admit, lambda c: _admit_first(config, budget, *c), (plan, jnp.sum(plan.take)))
    take = plan_running(budget, plan.seqs)
    need = jnp.sum(step_blocks(config, plan.tables, plan.seqs, take))
    width = max_step_blocks(config, budget, plan.seqs.max_running)
    return plan.replace(take=take, pool=block_pool.make_ready(plan.pool, need, width))


def release_finished(pool: BlockPool, tables: BlockTables, seqs: Sequences) -> tuple[BlockPool, BlockTables, Sequences]:
    """Give back the blocks of running rows that have finished, and close the gaps that they leave."""
    finished = _finished(seqs)
    rows, active = running_rows(seqs)
    gone, count = _gather(rows, finished, seqs.num_rows)
    pool, tables, _ = release_rows(pool, tables, gone, count)
    running, num_running = _gather(rows, active & ~finished, seqs.num_rows)
    return pool, tables, seqs.replace(running=running, num_running=num_running)


def _gather(rows: Array, chosen: Array, padding: int) -> tuple[Array, Array]:
    """The chosen rows moved together, `padding` behind them, and their number."""
    place = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, rows.shape[0])
    return jnp.full_like(rows, padding).at[place].set(rows, mode="drop"), jnp.sum(chosen, dtype=jnp.int32)


def _preempt_last(budget: int, plan: Schedule) -> Schedule:
    """Take the last running row's blocks back; it waits at the head and will be computed again from its first token."""
    seqs = plan.seqs
    last = seqs.num_running - 1
    row = seqs.running[last]
    pool, tables, _ = release_rows(plan.pool, plan.tables, row[None], jnp.ones_like(last))
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
    return Schedule(pool, tables, seqs, plan_running(budget, seqs), plan.num_preempted + 1)


def _can_admit(config: CacheConfig, budget: int, plan: Schedule, reserved: Array, taken: Array) -> Bool[Array, ""]:
    """Whether the head of the waiting order may start, with `reserved` free blocks and `taken` tokens of the budget gone."""
    seqs = plan.seqs
    whole = admission_blocks(config, seqs.num_tokens[seqs.waiting[seqs.waiting_head]], budget)
    return (
        (seqs.num_waiting > 0)
        & (seqs.num_running < seqs.max_running)
        & (taken < budget)
        & (whole <= plan.pool.num_free - reserved)
    )


def _admit_first(config: CacheConfig, budget: int, plan: Schedule, taken: Array) -> tuple[Schedule, Array]:
    """Start the head of the waiting order: all its blocks in full-attention groups, its first chunk's in the others."""
    seqs = plan.seqs
    row = seqs.waiting[seqs.waiting_head]
    total = seqs.num_tokens[row]
    chunk = jnp.minimum(total, budget - taken)
    targets = [total if window is None else chunk for window in config.windows]
    need = jnp.stack([ceil_div(target, config.block_size) for target in targets])[:, None]
    most = min(config.num_groups * config.max_blocks_per_row, config.num_blocks)
    pool = block_pool.make_ready(plan.pool, jnp.sum(need), most)
    pool, tables = grow(pool, plan.tables, row[None], need, total[None], most)
    seqs = seqs.replace(
        running=seqs.running.at[seqs.num_running].set(row),
        num_running=seqs.num_running + 1,
        num_computed=seqs.num_computed.at[row].set(0),
        status=seqs.status.at[row].set(RUNNING),
        waiting_head=(seqs.waiting_head + 1) % seqs.num_rows,
        num_waiting=seqs.num_waiting - 1,
    )
    return plan.replace(pool=pool, tables=tables, seqs=seqs), taken + chunk
