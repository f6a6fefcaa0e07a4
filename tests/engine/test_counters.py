"""Counts are exact however long an engine runs and however large they are."""

import jax
import jax.numpy as jnp
import pytest

from engines import make_engine, news
from paged_jax import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    SamplingParams,
    allocate_slots,
    check_integrity,
    init_cache,
)
from paged_jax.cache.block_pool import free_queue, init_pool, pop_head, release
from paged_jax.cache.prefix_directory import LAST_ID
from paged_jax.engine.counters import PEAKS, TOTALS, add_totals, init_counters, raise_peaks
from paged_jax.engine.roots import Roots, find_root
from paged_jax.scheduling.plan import plan_running
from paged_jax.scheduling.sequences import init_sequences
from toy_decoder import ToyDecoder, random_prompts


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**62 - 2**33 - 1])
def test_totals_go_on_past_32_bits(start):
    counters = init_counters()
    words = jnp.asarray([start % 2**32, start >> 32], jnp.uint32)
    counters = counters.replace(totals=jnp.broadcast_to(words[:, None], counters.totals.shape))
    add = jax.jit(lambda counters, n: add_totals(counters, steps=n, hit_tokens=2 * n))
    want = dict.fromkeys(TOTALS, start)
    for count in (1, 0, 2**30, 2**30, 2**30, 3):
        counters = add(counters, jnp.int32(count % 2**31))
        want["steps"] += count
        want["hit_tokens"] += 2 * count % 2**32
        assert {name: value for name, value in counters.items() if name in TOTALS} == want
    assert all(type(value) is int for _, value in counters.items())


def test_an_engine_counts_on_from_where_it_is():
    def count(start):
        engine = make_engine(
            ToyDecoder(), 16, 16, max_num_seqs=2, max_num_batched_tokens=8, block_size=4
        )
        counters = engine.state.counters
        low = jnp.stack([jnp.full(len(TOTALS), start, jnp.uint32), counters.totals[1]])
        engine.state = engine.state.replace(counters=counters.replace(totals=low))
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
        engine.run(8)
        return dict(engine.counters.items())

    usual, late = count(0), count(2**32 - 1)
    # Steps after which a sequence has 3, 4, 5 and 6 computed tokens, in blocks of 4.
    assert (usual["steps"], usual["computed_tokens"], usual["generated_tokens"]) == (4, 6, 4)
    assert (usual["block_steps"], usual["empty_slot_steps"]) == (1 + 1 + 2 + 2, 1 + 0 + 3 + 2)
    assert late == {name: n + (2**32 - 1) * (name in TOTALS) for name, n in usual.items()}


def test_in_a_program_a_total_is_its_low_word():
    @jax.jit
    def program(counters):
        counters = add_totals(counters, steps=jnp.int32(5))
        counters = raise_peaks(counters, **{name: jnp.int32(7) for name in PEAKS})
        return counters.steps, counters.peak_blocks

    assert tuple(map(int, program(init_counters()))) == (5, 7)
    with pytest.raises(AttributeError, match="no counter 'step'"):
        _ = init_counters().step


def test_a_directory_whose_ids_come_to_an_end_is_emptied_and_goes_on():
    model = ToyDecoder()
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=8, block_size=4)
    engine = make_engine(model, 16, 16, enable_prefix_caching=True, **sizes)
    directory = engine.state.cache.directory
    directory = directory.replace(next_id=jnp.full_like(directory.next_id, LAST_ID))
    engine.state = engine.state.replace(cache=engine.state.cache.replace(directory=directory))
    prompt = random_prompts(0, [9])[0]
    for _ in range(3):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=5))
        assert [t for u in news(engine) for t in u.token_ids] == model.continuation(prompt, 5)
        assert check_integrity(engine.state) == []
    assert engine.state.cache.directory.next_id < 10
    assert engine.counters.hit_tokens > 0


def test_roots_stay_within_32_bits_and_below_0():
    roots = Roots(next_root=-(2**31) + 1)
    found = [find_root(roots, salt) for salt in "abc"]
    assert found == [-(2**31) + 1, -(2**31), -1]
    assert [find_root(roots, salt) for salt in "abc"] == found


def test_a_sum_of_long_prompts_does_not_wrap():
    seqs = init_sequences(EngineConfig(2, 2, 4, 4, 4))
    seqs = seqs.replace(
        num_tokens=jnp.full(4, 2**30, jnp.int32),
        running=jnp.arange(4, dtype=jnp.int32),
        num_running=jnp.int32(4),
    )
    assert plan_running(jnp.int32(7), seqs).tolist() == [7, 0, 0, 0]
    seqs = seqs.replace(num_computed=seqs.num_tokens - jnp.asarray([1, 5, 2, 9], jnp.int32))
    assert plan_running(jnp.int32(7), seqs).tolist() == [1, 5, 1, 0]


def test_a_sum_of_what_must_fit_does_not_wrap():
    cache = init_cache(CacheConfig(2**20, 4096, 1, block_size=1))
    more, ok = allocate_slots(cache, range(4096), 1, must_fit_tokens=2**30)
    assert not ok and int(more.pool.num_free) == 2**20 - 1


def test_a_free_queue_past_32_bits_is_refused():
    with pytest.raises(ConfigError, match=f"num_blocks={2**28 + 1}: must be at most {2**28}"):
        CacheConfig(2**28 + 1, 1, 1, block_size=1)
    # The ring's positions are right up to its end and over it.
    pool = init_pool(8)
    pool = pool.replace(
        head=jnp.int32(14),
        ring=jnp.roll(pool.ring, 14),
        stamp=jnp.where(pool.stamp < 0, -1, (pool.stamp + 14) % 16),
    )
    assert free_queue(pool) == [1, 2, 3, 4, 5, 6, 7]
    pool, blocks, _ = pop_head(pool, jnp.int32(5), 5)
    pool, _ = release(pool, blocks[None], jnp.ones((1, 5), bool))
    assert free_queue(pool) == [6, 7, 5, 4, 3, 2, 1]
