"""The engine as a value, and one decoding step as a pure function of it.

    schedule -> copy pages -> once for the first width that holds the step's tokens: grow tables, build batch, run decoder,
    sample, commit

Each part that writes pages is a loop of one trip or none (`arrays.once`), so that no page array is copied.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from paged_jax import sampling
from paged_jax.arrays import once
from paged_jax.batch import Batch, build_batch
from paged_jax.beam_search import is_due
from paged_jax.beams import collect
from paged_jax.cache_manager import PagedCache, init_cache, release_below_window
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.kv_cache import copy_pages
from paged_jax.scheduler import grow_running, schedule
from paged_jax.sequences import FINISHED, Sequences, append, init_sequences, running_rows


class Counters(struct.PyTreeNode):
    """What happened since the state was made. Few arrays, because each is a kernel in every step."""

    totals: Int[Array, "8"]
    peaks: Int[Array, "2"]
    sums: Float[Array, "2"]

    steps = property(lambda self: self.totals[0])
    preemptions = property(lambda self: self.totals[1])
    computed_tokens = property(lambda self: self.totals[2])
    generated_tokens = property(lambda self: self.totals[3], doc="Sampled tokens; those of beams are not among them.")
    queried_tokens = property(lambda self: self.totals[4], doc="Prompt tokens of sequences that started.")
    hit_tokens = property(lambda self: self.totals[5], doc="How many of them were found in the cache.")
    copied_blocks = property(
        lambda self: self.totals[6], doc="Blocks copied because a sequence wrote into a shared one."
    )
    eventful_steps = property(lambda self: self.totals[7], doc="Steps that admitted, preempted, copied or released.")
    peak_blocks = property(lambda self: self.peaks[0], doc="Most blocks in use in one step.")
    peak_running = property(lambda self: self.peaks[1], doc="Most sequences running in one step.")
    block_steps = property(lambda self: self.sums[0], doc="Blocks in use, summed over steps.")
    empty_block_steps = property(
        lambda self: self.sums[1], doc="Slots in them that hold no token / block_size, likewise."
    )

    def items(self):
        """Names and values."""
        names = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return [(name, getattr(self, name)) for name in names]


class EngineState(struct.PyTreeNode):
    """Everything that changes: cache, sequence rows, counters. Arrays only; save it and the engine is saved."""

    cache: PagedCache
    seqs: Sequences
    counters: Counters


def cache_config(config: EngineConfig, model) -> CacheConfig:
    """Sizes of the KV cache that an engine of that config needs for `model` (a `paged_jax.models.Decoder`)."""
    return CacheConfig.for_decoder(
        model,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_rows=config.rows,
        max_blocks_per_row=config.max_blocks_per_row,
        prefix_caching=config.enable_prefix_caching,
    )


def init_state(config: EngineConfig, sizes: CacheConfig, cache: PagedCache | None = None) -> EngineState:
    """An idle engine, over `cache` (whose rows are all empty) or a new one."""
    return EngineState(
        cache=init_cache(sizes) if cache is None else cache,
        seqs=init_sequences(
            config.rows, config.max_model_len, config.max_num_seqs, config.max_stop_ids, config.max_beam_width
        ),
        counters=Counters(jnp.zeros(8, jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros(2)),
    )


def step(
    model, config: EngineConfig, sizes: CacheConfig, state: EngineState, budget: Int[Array, ""] | None = None
) -> tuple[EngineState, Bool[Array, ""]]:
    """One step: schedule, then compute up to `budget` tokens, the config's where None. Returns whether anything was computed.

    `model` is a decoder (`paged_jax.models.Decoder`) whose params may be traced. With a budget of 0 nothing is computed, but
    what has finished is released.
    """
    most = config.max_num_batched_tokens
    budget = jnp.full_like(state.seqs.num_running, most) if budget is None else budget
    with jax.named_scope("schedule"):
        plan = schedule(sizes, most, state.cache, state.seqs, budget)
        total = jnp.sum(plan.take)
    with jax.named_scope("copy"):
        kv = copy_pages(state.cache.kv, plan.copies)
    news = jnp.stack([plan.num_preempted, plan.queried, plan.hits, plan.copies.count, plan.num_events])
    totals = state.counters.totals.at[jnp.asarray([1, 4, 5, 6, 7])].add(news)
    state = EngineState(plan.cache.replace(kv=kv), plan.seqs, state.counters.replace(totals=totals))
    least, reach = jnp.zeros_like(total), total
    if state.seqs.beams is not None:  # a dormant beam has a place, but no token
        places = jnp.arange(1, plan.take.shape[0] + 1, dtype=jnp.int32)
        reach = jnp.maximum(total, jnp.max(jnp.where(plan.take > 0, places, 0)))
    assert config.widths is not None  # set when made
    for width in config.widths:
        fits = (reach > least) & (reach <= width)
        with jax.named_scope(f"width_{width}"):
            state = once(fits, lambda s, width=width: _compute(model, sizes, s, plan.take, width), state)
        least = jnp.full_like(total, width)
    return state, total > 0


def _compute(model, sizes: CacheConfig, state: EngineState, take: Int[Array, "S"], width: int) -> EngineState:
    cache, seqs = state.cache, state.seqs
    with jax.named_scope("grow"):
        books = grow_running(sizes, cache.books, seqs, take, width)
    with jax.named_scope("batch"):
        batch = build_batch(sizes, books.tables, seqs, take, width)
    with jax.named_scope("decoder"):
        hidden, k_pages, v_pages = model(batch.tokens, batch, cache.kv.k_pages, cache.kv.v_pages)
        logits = model.logits(hidden[batch.last_tokens])
    with jax.named_scope("sample"):
        rows_sampling = jax.tree.map(lambda x: x[batch.rows], seqs.sampling)
        sampled = batch.samples
        if seqs.beams is not None:  # beams leave their candidates for the next step's events
            beams = collect(seqs.beams, batch.rows, logits, rows_sampling.stop_ids, sampled)
            seqs = seqs.replace(beams=beams)
            sampled &= beams.leader.at[batch.rows].get(mode="clip") == seqs.num_rows
        tokens, logprobs = sampling.sample(logits, rows_sampling, seqs.num_tokens[batch.rows], sampled)

    with jax.named_scope("commit"):
        counters = _count(sizes, state.counters, books, batch, jnp.sum(take), jnp.sum(sampled, dtype=jnp.int32))
        seqs = append(seqs, batch.rows, tokens, logprobs, sampled)
        books, seqs = _commit(sizes, books, seqs, batch, take[:width], width)
    kv = cache.kv.replace(k_pages=k_pages, v_pages=v_pages)
    return EngineState(books.replace(kv=kv), seqs, counters)


def _commit(sizes, books: PagedCache, seqs: Sequences, batch: Batch, take, width: int):
    rows = jnp.where(take > 0, batch.rows, seqs.num_rows)
    before = seqs.num_computed[batch.rows]
    seqs = seqs.replace(num_computed=seqs.num_computed.at[rows].add(take, mode="drop"))
    return release_below_window(sizes, books, rows, before, before + take, width), seqs


def _count(sizes: CacheConfig, counters: Counters, books: PagedCache, batch: Batch, total, sampled) -> Counters:
    in_use = books.pool.num_blocks - 1 - books.pool.num_free
    active = jnp.arange(batch.rows.shape[0]) < batch.num_seqs
    # What is shared is full, but for the last block of a fork in the step before it is copied.
    slots = books.tables.num_blocks[:, batch.rows] * sizes.block_size
    empty = jnp.sum(jnp.where(active, slots - batch.kv_lens, 0))
    one = jnp.ones_like(in_use)
    return Counters(
        totals=counters.totals.at[jnp.asarray([0, 2, 3])].add(jnp.stack([one, total, sampled])),
        peaks=jnp.maximum(counters.peaks, jnp.stack([in_use, batch.num_seqs])),
        sums=counters.sums + jnp.stack([in_use.astype(jnp.float32), empty / sizes.block_size]),
    )


def run(
    model, config: EngineConfig, sizes: CacheConfig, state: EngineState, max_steps: Int[Array, ""]
) -> tuple[EngineState, Int[Array, ""]]:
    """Steps until `max_steps` are done, nothing is left to do or no progress is made; finished rows' blocks are given back.

    Returns the number of steps made. One program, no host in the loop.
    """
    most = jnp.full_like(state.seqs.num_running, config.max_num_batched_tokens)

    def is_busy(carry):
        state, done, progress = carry
        rows, active = running_rows(state.seqs)
        finished = jnp.any(active & (state.seqs.status[rows] == FINISHED))
        left = finished | is_due(state.seqs)
        return progress & (((done < max_steps) & has_unfinished(state.seqs)) | left)

    def advance(carry):
        state, done, _ = carry
        state, progress = step(model, config, sizes, state, jnp.where(done < max_steps, most, 0))
        return state, done + progress, progress

    start = (state, jnp.zeros_like(max_steps), jnp.ones_like(max_steps, bool))
    with jax.named_scope("steps"):
        state, done, _ = jax.lax.while_loop(is_busy, advance, start)
    return state, done


def has_unfinished(seqs: Sequences) -> Bool[Array, ""]:
    """Whether a row waits or runs."""
    rows, active = running_rows(seqs)
    return (seqs.num_waiting > 0) | jnp.any(active & (seqs.status[rows] != FINISHED))
