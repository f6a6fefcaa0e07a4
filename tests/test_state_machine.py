"""Random operations on the cache and random requests to the engine's step, against plain models of
both.

After every operation the blocks are the same in the same order, the decisions are the same, and the
state is sound.
"""

from dataclasses import replace
from functools import cache as memoize
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paged_jax import (
    CacheConfig,
    EngineConfig,
    SamplingParams,
    allocate_slots,
    check_integrity,
    fork,
    free,
    init_cache,
)
from paged_jax.cache import block_pool
from paged_jax.cache.paged_cache import release_passed_blocks
from paged_jax.engine.requests import Output, make_request, max_blocks_held, to_rows
from paged_jax.engine.step import init_state, step
from paged_jax.kv_group import attention_group
from paged_jax.scheduling import sequences
from paged_jax.scheduling.waiting import waiting_rows
from plain_cache import PlainCache, books, plain_books
from plain_scheduler import PlainRequest, PlainScheduler
from toy_decoder import ToyDecoder, random_prompts

ROWS, BLOCK_SIZE, MAX_BLOCKS = 6, 4, 7
CONFIGS = [
    CacheConfig(
        num_blocks,
        ROWS,
        MAX_BLOCKS,
        block_size=BLOCK_SIZE,
        groups=tuple(attention_group(window) for window in windows),
        enable_prefix_caching=caching,
    )
    for num_blocks, windows, caching in (
        (14, (None,), True),
        (13, (6,), False),
        (31, (None, 6), True),
    )
]
unchecked = pytest.mark.usefixtures("no_annotation_checks")
APPENDED, CHILDREN = 3, 2  # rows in one call of a fixed shape


def _adopt(cache, row, blocks):
    """Let an empty row begin with blocks that others hold or that are free: a prefix hit."""
    count = jnp.sum(blocks[0] >= 0, dtype=jnp.int32)
    blocks = jnp.maximum(blocks, 0)
    tables = cache.tables.replace(
        blocks=cache.tables.blocks.at[:, row].set(blocks),
        num_blocks=cache.tables.num_blocks.at[:, row].set(count),
        num_tokens=cache.tables.num_tokens.at[row].set(count * BLOCK_SIZE),
    )
    return cache.replace(
        pool=block_pool.touch(cache.pool, blocks.ravel(), 1), tables=tables
    ), jnp.bool(True)


def _slide(cache, rows, before, after):
    most = ROWS * MAX_BLOCKS * BLOCK_SIZE
    return release_passed_blocks(cache, rows, before, after, most), jnp.bool(True)


@memoize
def compiled(config):
    """An empty cache, and each operation at one shape or two, so that nothing compiles again."""
    functions = dict(allocate=allocate_slots, fork=fork, free=free, slide=_slide, adopt=_adopt)
    return init_cache(config), {name: jax.jit(function) for name, function in functions.items()}


def ints(values, length=ROWS, padding=ROWS):
    return np.asarray(list(values) + [padding] * (length - len(values)), np.int32)


class AgainstPlainCache(RuleBasedStateMachine):
    @initialize(config=st.sampled_from(CONFIGS))
    def begin(self, config):
        self.config = config
        self.cache, self.run = compiled(config)
        windows = [getattr(group, "window", None) for group in config.groups]
        self.plain = PlainCache(config.num_blocks, ROWS, MAX_BLOCKS, BLOCK_SIZE, windows)
        self.has_window = any(windows)
        self.slid = [0] * ROWS  # tokens up to which a row's window groups have let go

    def after(self, operation, *arguments, expect=True, **options):
        """Run it, then compare everything."""
        cache, ok = self.run[operation](self.cache, *arguments, **options)
        before, self.cache = self.cache, cache
        ok, fetched = jax.device_get((ok, cache))
        assert bool(ok) == expect
        assert books(fetched) == plain_books(self.plain)
        assert check_integrity(fetched) == []
        if not expect:
            assert all(
                np.array_equal(a, b)
                for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(fetched), strict=True)
            )

    def used(self):
        return [row for row in range(ROWS) if not self.plain.is_empty(row)]

    def empty(self):
        return [row for row in range(ROWS) if self.plain.is_empty(row)]

    @rule(
        row=st.integers(0, ROWS - 1),
        new=st.integers(1, 30),
        reserved=st.integers(0, 4),
        must_fit=st.integers(0, 40),
    )
    def allocate(self, row, new, reserved, must_fit):
        fits = self.plain.allocate([row], [new], reserved, must_fit)
        options = {"reserved_blocks": np.int32(reserved), "must_fit_tokens": np.int32(must_fit)}
        self.after("allocate", ints([row], 1), ints([new], 1), expect=fits, **options)

    @rule(
        rows=st.permutations(range(ROWS)),
        new=st.one_of(
            st.just([1] * APPENDED),
            st.lists(st.integers(1, 9), min_size=APPENDED, max_size=APPENDED),
        ),
    )
    def append_to_several(self, rows, new):
        rows = rows[:APPENDED]
        fits = self.plain.allocate(rows, new)
        self.after("allocate", ints(rows, APPENDED), ints(new, APPENDED), expect=fits)

    @rule(rows=st.permutations(range(ROWS)), onto_empty=st.booleans())
    def fork(self, rows, onto_empty):
        parent, *children = sorted(rows, key=self.plain.is_empty) if onto_empty else rows
        children = (children[::-1] if onto_empty else children)[:CHILDREN]
        fits = self.plain.fork(parent, children)
        if fits:
            for child in children:
                self.slid[child] = self.slid[parent]
        self.after("fork", ints([parent], 1), ints(children, CHILDREN), expect=fits)

    @rule(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    def free(self, rows):
        self.plain.free(rows)
        for row in rows:
            self.slid[row] = 0
        self.after("free", ints(rows))

    @rule(order=st.permutations(range(ROWS)))
    def free_all(self, order):
        self.free(order)
        assert len(self.plain.pool.queue) == self.config.num_blocks - 1

    @precondition(lambda self: self.has_window)
    @rule(rows=st.permutations(range(ROWS)), data=st.data())
    def slide(self, rows, data):
        """The windows move on, by another distance in each row; a block that forks share may stay
        in one and go in the other.
        """
        before = [self.slid[row] for row in rows]
        after = [
            data.draw(st.integers(self.slid[row], max(self.slid[row], self.plain.num_tokens[row])))
            for row in rows
        ]
        self.plain.release_below_window(rows, before, after)
        for row, high in zip(rows, after, strict=True):
            self.slid[row] = high
        self.after("slide", ints(rows), ints(before, padding=0), ints(after, padding=0))

    @precondition(lambda self: self.empty())
    @rule(data=st.data(), count=st.integers(1, MAX_BLOCKS))
    def adopt(self, data, count):
        """A prefix of another row's blocks, then free ones from anywhere in the queue."""
        row = data.draw(st.sampled_from(self.empty()))
        parent = data.draw(st.sampled_from(self.used() or [row]))
        held = min(count, len(self.plain.tables[0][parent]))
        # Without a directory nobody can name a free block.
        kept = data.draw(st.integers(0 if self.config.enable_prefix_caching else held, held))
        count = count if self.config.enable_prefix_caching else held
        free = data.draw(st.permutations(self.plain.pool.queue))
        extra = count - kept
        if not count or extra * len(self.config.groups) > len(free):
            return
        for table in self.plain.tables:
            table[row] = table[parent][:kept] + free[:extra]
            free = free[extra:]
            self.plain.pool.touch(table[row])
        self.plain.num_tokens[row] = count * BLOCK_SIZE
        self.slid[row] = min(self.slid[parent], kept * BLOCK_SIZE) if kept else 0
        self.after(
            "adopt",
            np.int32(row),
            np.stack([ints(table[row], MAX_BLOCKS, -1) for table in self.plain.tables]),
        )


TestAgainstPlainCache = unchecked(AgainstPlainCache.TestCase)
TestAgainstPlainCache.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


# ---------------------------------------------------------------- the engine's step

ENGINES = [
    (EngineConfig(13, 30, 3, 9, num_rows=7, block_size=4), (3, 9), (None,)),
    (EngineConfig(21, 30, 3, 9, num_rows=7, block_size=4), (9,), (None, 6)),
]
ENGINES += [
    (replace(config, enable_prefix_caching=True), (9,), windows) for config, _, windows in ENGINES
]
HOLDER = 6  # holds blocks and is no request's, so that one program serves pools of many sizes
MOST_HELD = 4


@memoize
def compiled_engine(config, widths, windows):
    model = ToyDecoder(windows=windows)
    programs = {
        "step": jax.jit(partial(step, model, widths=widths)),
        "add": jax.jit(sequences.add),
        "abort": jax.jit(sequences.abort),
        "hold": jax.jit(allocate_slots),
    }
    return model, init_state(config, model), programs


class AgainstPlainScheduler(RuleBasedStateMachine):
    @initialize(engine=st.sampled_from(ENGINES), held=st.integers(0, MOST_HELD))
    def begin(self, engine, held):
        self.config, _, windows = engine
        self.model, self.state, self.programs = compiled_engine(*engine)
        self.sizes = self.state.cache.config
        self.plain = PlainScheduler(self.config, windows, self.model.next_token)
        self.faults = []
        if held:
            self.plain.cache.allocate([HOLDER], [4 * held])
            cache, _ = self.programs["hold"](
                self.state.cache, ints([HOLDER], 1), ints([4 * held], 1)
            )
            self.state = self.state.replace(cache=cache)
            self.faults = [f"row {HOLDER}: does not run, but has blocks"]
        self.usable = self.plain.num_free()

    def compare(self):
        state, plain = jax.device_get(self.state), self.plain
        seqs = state.seqs
        assert seqs.running[: seqs.num_running].tolist() == plain.running
        assert waiting_rows(seqs.waiting) == plain.waiting
        assert books(state.cache) == plain_books(plain.cache)
        for row, request in plain.requests.items():
            count = len(request.tokens)
            assert seqs.tokens[row, : seqs.num_tokens[row]].tolist() == request.tokens
            assert seqs.num_computed[row] == request.computed and seqs.num_prompt_tokens[
                row
            ] == len(request.prompt)
            assert sequences.FINISH_REASONS[seqs.finish_reason[row]] == request.finish_reason
            assert request.tokens == request.prompt + self.model.continuation(
                request.prompt, count - len(request.prompt)
            )
        assert state.counters.preemptions == plain.preemptions
        assert (state.counters.queried_tokens, state.counters.hit_tokens) == (
            plain.queried,
            plain.hits,
        )
        assert check_integrity(state) == self.faults

    def rows(self, finished):
        done = {
            row
            for row, request in self.plain.requests.items()
            if request.finish_reason and row not in self.plain.running
        }
        live = set(self.plain.requests) - done
        return sorted(set(range(HOLDER)) - live) if finished else sorted(live)

    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 4))
    def add(self, seed, count):
        """Requests of random lengths that the pool can hold, some with a token that ends them."""
        rng = np.random.default_rng(seed)
        for row in rng.permutation(self.rows(finished=True))[:count].tolist():
            length, more = rng.integers(1, 21).item(), rng.integers(1, 21).item()
            more = min(more, self.config.max_model_len - length)
            while (
                max_blocks_held(self.sizes, length + more, self.config.max_num_batched_tokens)
                > self.usable
            ):
                more, length = (more - 1, length) if more > 1 else (more, length - 1)
            # Few different tokens and few beginnings, so that prompts and outputs share some.
            earlier = [request.tokens for request in self.plain.requests.values()]
            (prompt,) = random_prompts(seed % 3, [length], vocab_size=2)
            if earlier and rng.random() < 0.5:
                begin = earlier[rng.integers(len(earlier))][: rng.integers(length + 1)]
                prompt = (begin + prompt)[:length]
            stop_ids = (self.model.continuation(prompt, more)[-1],) if rng.random() < 0.2 else ()
            params = SamplingParams(temperature=0, max_tokens=more, stop_token_ids=stop_ids)
            given = dict(vocab_size=self.model.vocab_size, eos_token_ids=())
            given |= dict(config=self.config, cache_config=self.sizes)
            request = make_request("", prompt, params, **given)
            new = to_rows({row: Output(request, 0)}, self.config)
            self.state = self.state.replace(seqs=self.programs["add"](self.state.seqs, new))
            self.plain.add(row, PlainRequest(prompt, length + more, stop_ids))
        self.compare()

    @precondition(lambda self: len(self.rows(finished=False)) > 3)
    @rule(data=st.data())
    def abort(self, data):
        row = data.draw(st.sampled_from(self.rows(finished=False)))
        self.state = self.state.replace(
            seqs=self.programs["abort"](self.state.seqs, np.arange(self.config.num_rows) == row)
        )
        self.plain.abort(row)
        self.compare()

    @precondition(lambda self: self.plain.requests)
    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            before = self.state.counters
            if self.plain.is_busy():
                budget = self.config.max_num_batched_tokens
                self.state, progress = self.programs["step"](self.state, np.int32(budget))
                after = self.state.counters
                take = self.plain.step(bool(after.eventful_steps > before.eventful_steps))
                assert bool(progress) == bool(take)
                assert int(after.computed_tokens - before.computed_tokens) == sum(take.values())
            if self.plain.has_finished():
                self.state, progress = self.programs["step"](self.state, np.int32(0))
                self.plain.drain()
                assert not progress
            self.compare()

    def teardown(self):
        """All that is left comes to its end, and every block comes back."""
        if hasattr(self, "plain"):
            while self.plain.is_busy():
                self.step(1)
            self.step(1)  # an aborted row gives its blocks back when the next step begins
            assert self.plain.num_free() == self.usable


TestAgainstPlainScheduler = unchecked(AgainstPlainScheduler.TestCase)
TestAgainstPlainScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[
        phase for phase in Phase if phase is not Phase.shrink
    ],  # a run costs seconds; what fails is short anyway
)
