"""The engine as a value, and one decoding step as a pure function of it.

    schedule, copy pages -> grow tables, build batch -> run decoder -> sample, append, commit

`sequences.append` ends a row at a stop id or its length.

What writes pages under a condition is a loop of one trip or none (`arrays.apply_if`), or on a GPU
a switch of which every branch writes them (`passes`), so that no page array is copied. A GPU waits
for the host at each predicate: a greedy step reads four, those of `run`'s loop, the events, the
switch and the sampler.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import count_to_last
from paged_jax.cache.paged_cache import PagedCache, init_cache, release_passed_blocks
from paged_jax.checks import show
from paged_jax.config import EngineConfig, token_widths
from paged_jax.engine.counters import Counters, add_totals, init_counters, raise_peaks
from paged_jax.engine.passes import decode, head
from paged_jax.errors import ConfigError
from paged_jax.sampling.sampler import sample
from paged_jax.scheduling.batch import Batch, build_batch
from paged_jax.scheduling.beam_search import is_due
from paged_jax.scheduling.beams import collect, is_member
from paged_jax.scheduling.plan import grow_running
from paged_jax.scheduling.scheduler import schedule
from paged_jax.scheduling.sequences import (
    Sequences,
    append,
    finished_places,
    has_unfinished,
    init_sequences,
    running_rows,
)


class EngineState(struct.PyTreeNode):
    """The device's side of an engine: cache, sequence rows, counters. Arrays only.

    To save it is to save the engine.
    """

    cache: PagedCache
    seqs: Sequences
    counters: Counters

    @property
    def config(self) -> EngineConfig:
        """The engine's sizes, those that shape the state: a static field of the rows."""
        return self.seqs.config


def init_state(config: EngineConfig, model: Any, cache: PagedCache | None = None) -> EngineState:
    """Return an idle engine for `model`, a `paged_jax.models.Decoder`.

    It works over `cache`, of which all rows must be empty, or over a new one. Raises ConfigError
    for a cache of other sizes than the engine's.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config={show(config)}: an EngineConfig is needed")
    needed = config.cache_config(model)
    if cache is not None and cache.config != needed:
        raise ConfigError(f"cache: is of {cache.config}; the engine needs {needed}")
    return EngineState(
        cache=init_cache(needed) if cache is None else cache,
        seqs=init_sequences(config),
        counters=init_counters(),
    )


def step(
    model: Any,
    state: EngineState,
    budget: Int[Array, ""] | None = None,
    *,
    widths: tuple[int, ...] | None = None,
) -> tuple[EngineState, Bool[Array, ""]]:
    """Schedule, then compute up to `budget` tokens (None: `max_num_batched_tokens`).

    Also returns whether anything was computed. `model` is a decoder (`paged_jax.models.Decoder`)
    with params that may be traced. With a budget of 0 no token is computed (a GPU runs the
    narrowest pass on padding), but what has finished is released. `widths`: see
    `config.token_widths`.
    """
    widths = token_widths(state.config, widths)
    if budget is None:
        budget = _full_budget(state)
    with jax.named_scope("schedule"):
        plan, kv = schedule(state.cache, state.seqs, budget)
        total = jnp.sum(plan.take, dtype=jnp.int32)
    counters = add_totals(
        state.counters,
        preemptions=plan.num_preempted,
        queried_tokens=plan.queried,
        hit_tokens=plan.hits,
        copied_blocks=plan.copies.count,
        eventful_steps=plan.num_events,
    )
    state = EngineState(plan.cache.replace(kv=kv), plan.seqs, counters)
    return _compute(model, state, plan.take, widths), total > 0


def run(
    model: Any,
    state: EngineState,
    max_steps: Int[Array, ""],
    *,
    widths: tuple[int, ...] | None = None,
) -> tuple[EngineState, Int[Array, ""]]:
    """Step until `max_steps` are done, nothing is left to do or no progress is made.

    Finished rows' blocks are given back. Returns also the number of steps. One program, no host in
    the loop.
    """
    full_budget = _full_budget(state)

    def is_busy(carry):
        state, num_steps, has_progress = carry
        must_drain = jnp.any(finished_places(state.seqs)) | is_due(state.seqs)
        may_step = (num_steps < max_steps) & has_unfinished(state.seqs)
        return has_progress & (may_step | must_drain)

    def advance(carry):
        state, num_steps, _ = carry
        budget = jnp.where(num_steps < max_steps, full_budget, 0)
        state, has_progress = step(model, state, budget, widths=widths)
        return state, num_steps + has_progress.astype(jnp.int32), has_progress

    none = jnp.zeros_like(state.seqs.num_running)
    start = (state, none, jnp.ones_like(none, bool))
    with jax.named_scope("steps"):
        state, num_steps, _ = jax.lax.while_loop(is_busy, advance, start)
    return state, num_steps


def _full_budget(state: EngineState) -> Int[Array, ""]:
    return jnp.full_like(state.seqs.num_running, state.config.max_num_batched_tokens)


def _compute(
    model: Any, state: EngineState, take: Int[Array, "S"], widths: tuple[int, ...]
) -> EngineState:
    """Run the decoder over the tokens taken, sample, and commit what came of it."""
    cache, seqs = state.cache, state.seqs
    with jax.named_scope("grow"):
        books = grow_running(cache.books, seqs, take, seqs.config.max_num_batched_tokens)
    with jax.named_scope("batch"):
        batch = build_batch(books, seqs, take, seqs.config.max_num_batched_tokens)
    hidden, kv = decode(model, batch, cache.kv, widths)
    with jax.named_scope("head"):
        logits = head(model, hidden, count_to_last(batch.is_sampled), widths)
    with jax.named_scope("sample"):
        rows = jax.tree.map(lambda x: x[batch.rows], seqs.sampling)
        is_sampled = batch.is_sampled
        if seqs.beams is not None:  # beams leave their candidates for the next step's events
            beams = collect(seqs.beams, batch.rows, logits, rows.stop_ids, is_sampled)
            is_sampled &= ~is_member(beams, batch.rows)
            seqs = seqs.replace(beams=beams)
        tokens, logprobs = sample(logits, rows, seqs.num_tokens[batch.rows], is_sampled)
    with jax.named_scope("commit"):
        num_sampled = jnp.sum(is_sampled & jnp.isfinite(logprobs), dtype=jnp.int32)
        counters = _count(state.counters, books, seqs, take, batch.num_tokens, num_sampled)
        seqs = append(seqs, batch.rows, tokens, logprobs, is_sampled)
        books, seqs = _commit(books, seqs, batch)
    return EngineState(books.replace(kv=kv), seqs, counters)


def _commit(books: PagedCache, seqs: Sequences, batch: Batch) -> tuple[PagedCache, Sequences]:
    """Count the tokens as computed, and release the blocks that windows have passed."""
    before = seqs.num_computed[batch.rows]
    after = before + batch.take
    seqs = seqs.replace(num_computed=seqs.num_computed.at[batch.rows].set(after, mode="drop"))
    return release_passed_blocks(books, batch.rows, before, after, batch.tokens.shape[0]), seqs


def _count(
    counters: Counters,
    books: PagedCache,
    seqs: Sequences,
    take: Int[Array, "S"],
    num_tokens: Int[Array, ""],
    num_sampled: Int[Array, ""],
) -> Counters:
    """Count a step, if it has any tokens; `seqs` are the rows before it."""
    is_step = (num_tokens > 0).astype(jnp.int32)
    num_used = books.pool.num_blocks - 1 - books.pool.num_free
    rows, is_active = running_rows(seqs)
    # What is shared is full, except for the last block of a fork in the step before it is copied.
    slots = books.tables.num_blocks[:, rows] * books.config.block_size
    filled = seqs.num_computed[rows] + take
    num_empty = jnp.sum(jnp.where(is_active[None], slots - filled[None], 0), dtype=jnp.int32)
    counters = add_totals(
        counters,
        steps=is_step,
        computed_tokens=num_tokens,
        generated_tokens=num_sampled,
        block_steps=num_used * is_step,
        empty_slot_steps=num_empty * is_step,
    )
    return raise_peaks(
        counters, peak_blocks=num_used * is_step, peak_running=seqs.num_running * is_step
    )
