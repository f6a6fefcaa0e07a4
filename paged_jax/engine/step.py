"""The engine as a value, and one decoding step as a pure function of it.

    schedule -> copy pages -> for the first token width that holds the step's tokens:
                                  grow tables, build batch, run decoder, sample, append, commit

`sequences.append` ends a row at a stop id or its length.

Each part that writes pages is a loop of one trip or none (`arrays.apply_if`), so that no page array
is copied.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import apply_if
from paged_jax.cache.paged_cache import PagedCache, init_cache, release_passed_blocks
from paged_jax.cache.pages import copy_pages
from paged_jax.checks import show
from paged_jax.config import EngineConfig, token_widths
from paged_jax.engine.counters import Counters, add_totals, init_counters, raise_peaks
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
    with params that may be traced. With a budget of 0 nothing is computed, but what has finished is
    released. `widths`: see `config.token_widths`.
    """
    widths = token_widths(state.config, widths)
    if budget is None:
        budget = _full_budget(state)
    with jax.named_scope("schedule"):
        plan = schedule(state.cache, state.seqs, budget)
        total = jnp.sum(plan.take, dtype=jnp.int32)
    with jax.named_scope("copy"):
        kv = copy_pages(state.cache.kv, plan.copies)
    counters = add_totals(
        state.counters,
        preemptions=plan.num_preempted,
        queried_tokens=plan.queried,
        hit_tokens=plan.hits,
        copied_blocks=plan.copies.count,
        eventful_steps=plan.num_events,
    )
    state = EngineState(plan.cache.replace(kv=kv), plan.seqs, counters)
    needed, narrower = _needed_width(plan.seqs, plan.take), jnp.zeros_like(total)
    for width in widths:
        fits = (needed > narrower) & (needed <= width)
        with jax.named_scope(f"width_{width}"):
            state = apply_if(fits, lambda s, w=width: _compute(model, s, plan.take, w), state)
        narrower = jnp.full_like(total, width)
    return state, total > 0


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


def _needed_width(seqs: Sequences, take: Int[Array, "S"]) -> Int[Array, ""]:
    """Return the least width that holds the step: its tokens, and every place that has some.

    take 1 0 1, places 0 to 2 -> 3: a dormant beam has a place, but no token
    """
    total = jnp.sum(take, dtype=jnp.int32)
    if seqs.beams is None:
        return total
    places = jnp.arange(1, take.shape[0] + 1, dtype=jnp.int32)
    return jnp.maximum(total, jnp.max(jnp.where(take > 0, places, 0)))


def _compute(model: Any, state: EngineState, take: Int[Array, "S"], width: int) -> EngineState:
    """Run the decoder over the tokens taken, sample, and commit what came of it."""
    cache, seqs = state.cache, state.seqs
    with jax.named_scope("grow"):
        books = grow_running(cache.books, seqs, take, width)
    with jax.named_scope("batch"):
        batch = build_batch(books, seqs, take, width)
    with jax.named_scope("decoder"):
        hidden, k_pages, v_pages = model(batch.tokens, batch, cache.kv.k_pages, cache.kv.v_pages)
        logits = model.logits(hidden[batch.last_tokens])
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
        counters = _count(state.counters, books, batch, jnp.sum(take, dtype=jnp.int32), num_sampled)
        seqs = append(seqs, batch.rows, tokens, logprobs, is_sampled)
        books, seqs = _commit(books, seqs, batch, take[:width], width)
    kv = cache.kv.replace(k_pages=k_pages, v_pages=v_pages)
    return EngineState(books.replace(kv=kv), seqs, counters)


def _commit(
    books: PagedCache, seqs: Sequences, batch: Batch, take: Int[Array, "s"], width: int
) -> tuple[PagedCache, Sequences]:
    """Count the tokens as computed, and release the blocks that windows have passed."""
    rows = jnp.where(take > 0, batch.rows, seqs.num_rows)
    before = seqs.num_computed[batch.rows]
    seqs = seqs.replace(num_computed=seqs.num_computed.at[rows].add(take, mode="drop"))
    return release_passed_blocks(books, rows, before, before + take, width), seqs


def _count(
    counters: Counters,
    books: PagedCache,
    batch: Batch,
    num_computed: Int[Array, ""],
    num_sampled: Int[Array, ""],
) -> Counters:
    num_used = books.pool.num_blocks - 1 - books.pool.num_free
    is_active = jnp.arange(batch.rows.shape[0], dtype=jnp.int32) < batch.num_seqs
    # What is shared is full, except for the last block of a fork in the step before it is copied.
    slots = books.tables.num_blocks[:, batch.rows] * books.config.block_size
    num_empty = jnp.sum(jnp.where(is_active[None], slots - batch.kv_lens[None], 0), dtype=jnp.int32)
    counters = add_totals(
        counters,
        steps=jnp.ones_like(num_used),
        computed_tokens=num_computed,
        generated_tokens=num_sampled,
        block_steps=num_used,
        empty_slot_steps=num_empty,
    )
    return raise_peaks(counters, peak_blocks=num_used, peak_running=batch.num_seqs)
