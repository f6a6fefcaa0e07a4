"""Serve requests that arrive over time with the real engine step, in one jitted loop.

    arrivals -> admit those that may start -> engine step -> clock += cost -> note who ended
       ^__________________________________________________________________________|

Scheduler, allocator and step are the product's own (`paged_jax.engine.step.step`). What a step
would take is a number from a cost model (`Cost`), so that the decoder may keep no K and V: then a
simulated step takes some 0.1 ms. With a real decoder the same loop is a real run.

Contiguous allocation is a policy of admission. A request holds `reservation` slots from start to
end, and the head of the queue waits until its reservation is free. The pool is as large as the
memory, so nothing is ever preempted then. Any free slots serve a reservation (no external
fragmentation), which favours contiguous allocation. With reservations of 0 the pool alone decides:
paging.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from loads import STEPS, Cost, Load
from paged_jax import EngineConfig
from paged_jax.engine.integrity import check_integrity
from paged_jax.engine.step import EngineState, init_state, step
from paged_jax.sampling.rows import init_sampling_rows
from paged_jax.scheduling import sequences
from paged_jax.scheduling.sequences import FINISHED, LENGTH, NewSequences


class Sums(struct.PyTreeNode):
    """Sums over steps, weighted with their seconds (`steps` and `tokens` are plain counts)."""

    steps: Any
    tokens: Any
    seconds: Any
    running: Any
    reserved: Any
    used_slots: Any
    filled: Any


class Clock(struct.PyTreeNode):
    """The simulator's own state beside the engine's.

    Attributes:
        now: seconds.
        next: the request that starts next.
        owner: the request of each row, n for none.
        held: slots reserved.
        start, end: seconds of each request; `length` is what it had at its end.
        order: the requests in order of their start.
    """

    now: Float[Array, ""]
    next: Int[Array, ""]
    owner: Int[Array, "R"]
    held: Int[Array, ""]
    start: Float[Array, "n"]
    end: Float[Array, "n"]
    length: Int[Array, "n"]
    sums: Sums


class Result(NamedTuple):
    """What a run gave, on the host: arrays by request, sums over steps."""

    state: EngineState
    start: np.ndarray
    end: np.ndarray
    sums: Any
    preemptions: int
    peak_running: int

    @property
    def mean_running(self) -> float:
        """Requests running at once, averaged over time."""
        return float(self.sums.running / self.sums.seconds)

    def empty_share(self, is_paged: bool) -> float:
        """Share of the slots held that are not filled, averaged over time."""
        held = self.sums.used_slots if is_paged else self.sums.reserved
        return float(1 - self.sums.filled / held)


# ---------------------------------------------------------------- the loop


def _may_start(load: Load, clock: Clock, is_open: Bool[Array, ""], row: Int[Array, ""]):
    """Return whether the head of the queue has arrived, has a row, and its reservation fits."""
    num_requests, num_rows = load.arrival.shape[0], clock.owner.shape[0]
    head = jnp.minimum(clock.next, num_requests - 1)
    is_there = (clock.next < num_requests) & (load.arrival[head] <= clock.now)
    fits = (load.reservation[head] == 0) | (clock.held + load.reservation[head] <= load.memory)
    return is_there & fits & is_open & (row < num_rows)


def _free_row(state: EngineState, clock: Clock, num_requests: int) -> Int[Array, ""]:
    """Return a row that no request has and whose blocks are given back, R for none."""
    num_rows = clock.owner.shape[0]
    is_free = clock.owner == num_requests
    is_free = is_free.at[state.seqs.running].set(False, mode="drop")
    return jnp.where(jnp.any(is_free), jnp.argmax(is_free), num_rows).astype(jnp.int32)


def _add(state: EngineState, load: Load, request, row) -> EngineState:
    """Put a request into a row. Its tokens are all alike."""
    config, one = state.config, row[None]
    new = NewSequences(
        rows=one,
        tokens=jnp.ones((1, config.max_model_len), jnp.int32),
        num_prompt_tokens=load.prompt[request][None],
        max_len=(load.prompt[request] + load.output[request])[None],
        root=jnp.full_like(one, -1),
        parent=jnp.full_like(one, config.num_rows),
        sampling=init_sampling_rows(1, config.max_stop_ids),
    )
    return state.replace(seqs=sequences.add(state.seqs, new))


def _admit(state: EngineState, load: Load, clock: Clock) -> tuple[EngineState, Clock]:
    """Start requests, first come first served, as long as the head may."""
    num_requests = load.arrival.shape[0]
    is_open = ~load.is_static | jnp.all(clock.owner == num_requests)

    def start(carry):
        state, clock, row = carry
        request = clock.next
        state = _add(state, load, request, row)
        clock = clock.replace(
            next=request + 1,
            owner=clock.owner.at[row].set(request),
            held=clock.held + load.reservation[request],
            start=clock.start.at[request].set(clock.now),
        )
        return state, clock, _free_row(state, clock, num_requests)

    carry = (state, clock, _free_row(state, clock, num_requests))
    state, clock, _ = jax.lax.while_loop(
        lambda c: _may_start(load, c[1], is_open, c[2]), start, carry
    )
    return state, clock


def _account(before, state: EngineState, clock: Clock, cost: Cost) -> Clock:
    """Add the step to clock and sums."""
    rows, is_active = sequences.running_rows(state.seqs)
    filled = jnp.sum(jnp.where(is_active, state.seqs.num_computed[rows], 0))
    pool = state.cache.pool
    used = (pool.num_blocks - 1 - pool.num_free) * state.cache.config.block_size
    tokens = (state.counters.computed_tokens - before).astype(jnp.int32)
    spent = cost.fixed + cost.per_token * tokens + cost.per_kv * filled
    spent = jnp.where(tokens > 0, spent, 0.0)
    values = dict(running=state.seqs.num_running, reserved=clock.held, used_slots=used)
    added = {name: spent * value for name, value in values.items()}
    one = (tokens > 0).astype(jnp.int64)
    new = Sums(one, tokens.astype(jnp.int64), spent, filled=spent * filled, **added)
    sums = jax.tree.map(jnp.add, clock.sums, new)
    return clock.replace(now=clock.now + spent, sums=sums)


def _note_ends(state: EngineState, load: Load, clock: Clock) -> Clock:
    """Let go of what has ended: in a static batch, of all when the last has."""
    num_requests = load.arrival.shape[0]
    is_ended = (clock.owner < num_requests) & (state.seqs.status == FINISHED)
    is_ended &= ~load.is_static | ~sequences.has_unfinished(state.seqs)
    is_right = state.seqs.finish_reason == LENGTH
    request = jnp.where(is_ended, clock.owner, num_requests)
    given_back = jnp.where(is_ended, load.reservation.at[request].get(mode="fill", fill_value=0), 0)
    return clock.replace(
        end=clock.end.at[request].set(clock.now, mode="drop"),
        length=clock.length.at[request].set(
            jnp.where(is_right, state.seqs.num_tokens, -1), mode="drop"
        ),
        owner=jnp.where(is_ended, num_requests, clock.owner),
        held=clock.held - jnp.sum(given_back, dtype=jnp.int32),
    )


def _advance(model, load: Load, cost: Cost, widths, carry):
    state, clock = carry
    head = jnp.minimum(clock.next, load.arrival.shape[0] - 1)
    is_idle = jnp.all(clock.owner == load.arrival.shape[0])
    now = jnp.where(is_idle, jnp.maximum(clock.now, load.arrival[head]), clock.now)
    state, clock = _admit(state, load, clock.replace(now=now))
    before = state.counters.computed_tokens
    state, _ = step(model, state, widths=widths)
    clock = _account(before, state, clock, cost)
    return state, _note_ends(state, load, clock)


@partial(jax.jit, static_argnames=("graphdef", "widths"), donate_argnames="state")
def _loop(graphdef, params, state, load: Load, cost: Cost, max_steps, widths):
    model, num_requests = nnx.merge(graphdef, params), load.arrival.shape[0]
    zeros = Sums(
        *(jnp.zeros((), jnp.int64),) * 2,
        *(jnp.zeros((), jnp.float64),) * 5,
    )
    clock = Clock(
        now=jnp.zeros((), jnp.float64),
        next=jnp.int32(0),
        owner=jnp.full(state.config.num_rows, num_requests, jnp.int32),
        held=jnp.int32(0),
        start=jnp.zeros_like(load.arrival),
        end=jnp.zeros_like(load.arrival),
        length=jnp.zeros_like(load.prompt),
        sums=zeros,
    )

    def is_busy(carry):
        _, clock = carry
        is_left = (clock.next < num_requests) | jnp.any(clock.owner < num_requests)
        return is_left & (clock.sums.steps < max_steps)

    advance = partial(_advance, model, load, cost, widths)
    state, clock = jax.lax.while_loop(is_busy, advance, (state, clock))
    return step(model, state, jnp.int32(0), widths=widths)[0], clock


# ---------------------------------------------------------------- from the host


def simulate(
    model: Any,
    config: EngineConfig,
    load: Load,
    cost: Cost = STEPS,
    max_steps: int | None = None,
    widths: tuple[int, ...] | None = None,
) -> Result:
    """Serve all requests, or as many as `max_steps` steps do.

    Asserts that the engine's state is sound and, of a whole run, that every request ended with its
    length, that no block is left in use, and that reservations never led to a preemption.
    """
    graphdef, params = nnx.split(model)
    with jax.enable_x64(True):  # the clock; the engine's state stays of 32 bits
        cost = jax.tree.map(jnp.asarray, cost)
        most = jnp.asarray(2**62 if max_steps is None else max_steps, jnp.int64)
        state, clock = _loop(
            graphdef, params, init_state(config, model), load, cost, most, widths=widths
        )
        state, clock = jax.block_until_ready((state, clock))
        clock = jax.device_get(clock)
        faults = check_integrity(state)
        assert not faults, faults
        counters = state.counters
        if max_steps is None:
            assert np.array_equal(clock.length, load.prompt + load.output)
            assert int(state.cache.pool.num_free) == config.num_blocks - 1
            assert counters.preemptions == 0 or not np.any(load.reservation)
    return Result(
        state, clock.start, clock.end, clock.sums, counters.preemptions, counters.peak_running
    )
