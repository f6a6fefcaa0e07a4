"""What a request finds in the cache, by the numbers, and that finding it never changes a token.

The toy decoder's next token is a function of the whole context as it stands in the pages: a wrong
block shows at once.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import make_engine, news, programs
from paged_jax import BeamSearchParams, CacheConfig, ConfigError, SamplingParams, check_integrity
from paged_jax.cache import content_hash, prefix_directory, registration
from paged_jax.cache.block_pool import free_queue
from paged_jax.cache.block_table import init_tables
from run_model import TINY
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder(max_model_len=128)
SIXTEEN = dict(max_num_seqs=4, max_num_batched_tokens=160, num_rows=8, enable_prefix_caching=True)


@pytest.fixture
def engine():
    """Ten blocks of sixteen, as in the scenarios of vLLM's tests."""
    return make_engine(MODEL, 11, 128, widths=(160,), **SIXTEEN)


def add(engine, prompt, max_tokens=1, **options):
    return engine.add_request(
        prompt, SamplingParams(temperature=0, max_tokens=max_tokens), **options
    )


def finish(engine, each_step=None):
    """Tokens, and cached tokens, of each request."""
    outputs, cached = {}, {}
    for _ in range(500):
        if not engine.has_unfinished():
            # All of a request's outputs, one behind the other.
            return {i: [t for k in sorted(of) for t in of[k]] for i, of in outputs.items()}, cached
        if each_step is not None:
            each_step(engine)
        for update in news(engine, 1):
            outputs.setdefault(update.request_id, {}).setdefault(update.index, []).extend(
                update.token_ids
            )
            cached.setdefault(update.request_id, update.num_cached_tokens)
        assert check_integrity(engine.state) == []
    raise AssertionError("it does not end")


def hits(engine, prompt, **options):
    """Cached tokens that a request finds by itself; its output must be right."""
    request_id = add(engine, prompt, 2, **options)
    tokens, cached = finish(engine)
    assert tokens[request_id] == MODEL.continuation(prompt, 2)
    return cached[request_id]


def table(engine, row):
    tables = engine.state.cache.tables
    return tables.blocks[0, row, : int(tables.num_blocks[0, row])].tolist()


def random_tokens(seed, count):
    return random_prompts(seed, [count])[0]


# ---------------------------------------------------------------- by the numbers


def test_blocks_are_shared_counted_and_kept_for_later_in_the_order_of_their_last_use(engine):
    common, rests = (
        random_tokens(0, 48),
        [random_tokens(seed, n) for seed, n in ((1, 7), (2, 5), (3, 6))],
    )
    add(engine, common + rests[0], 3)
    engine.step()
    assert table(engine, 0) == [1, 2, 3, 4]
    add(engine, common + rests[1], 3)
    engine.step()
    cache = engine.state.cache
    assert table(engine, 1) == [1, 2, 3, 5] and cache.pool.ref_count[1:6].tolist() == [
        2,
        2,
        2,
        1,
        1,
    ]
    assert int(cache.pool.num_free) == 5
    _, cached = finish(engine)
    assert list(cached.values()) == [0, 48]
    assert free_queue(engine.state.cache.pool) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    add(engine, common + rests[2], 3)
    engine.step()
    assert table(engine, 0) == [1, 2, 3, 5] and int(engine.state.cache.pool.num_free) == 6
    _, cached = finish(engine)
    assert list(cached.values()) == [48]


@pytest.mark.parametrize(
    ("length", "found"), [(48, 48), (49, 48), (16, 16), (17, 16), (15, 0), (33, 32)]
)
def test_a_hit_is_whole_blocks_and_may_cover_all_of_a_prompt(engine, length, found):
    prompt = random_tokens(4, 49)
    add(engine, prompt[:48])
    finish(engine)
    assert hits(engine, prompt[:length]) == found


def test_a_prompt_that_is_covered_whole_computes_one_token_and_writes_nothing(engine):
    prompt = random_tokens(5, 32)
    add(engine, prompt)
    finish(engine)
    before, pages = engine.counters, jax.device_get(engine.state.cache.kv)
    add(engine, prompt)
    engine.step()
    assert int(engine.counters.computed_tokens - before.computed_tokens) == 1
    assert int(engine.state.cache.pool.num_free) == 10, "no new block; the first token ended it"
    for old, new in zip(
        jax.tree.leaves(pages), jax.tree.leaves(engine.state.cache.kv), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    finish(engine)


def test_twins_that_start_in_one_step_share_what_that_step_writes(engine):
    first, second = random_tokens(6, 33), random_tokens(7, 32)
    for prompt in (first, first, second, second):
        add(engine, prompt, 4)
    engine.step()
    assert [table(engine, row) for row in range(4)] == [[1, 2, 3], [1, 2, 4], [5, 6], [5, 6]]
    assert int(engine.counters.computed_tokens) == 33 + 1 + 32 + 1
    tokens, _ = finish(engine)
    assert list(tokens.values()) == [
        MODEL.continuation(p, 4) for p in (first, first, second, second)
    ]
    assert (int(engine.counters.queried_tokens), int(engine.counters.hit_tokens)) == (130, 64)


def test_generated_blocks_are_found_by_the_next_turn(engine):
    turn = random_tokens(8, 20)
    request_id = add(engine, turn, 30)
    answer = finish(engine)[0][request_id]
    # 50 tokens, of which the last was never computed: three full blocks.
    assert hits(engine, turn + answer + random_tokens(9, 5)) == 48


def test_a_block_that_was_given_to_another_is_found_no_more(engine):
    first, second, third = random_tokens(10, 17), random_tokens(11, 120), random_tokens(12, 120)
    assert hits(engine, first) == 0
    assert hits(engine, first) == 16
    hits(engine, second)  # takes eight blocks that are not worth keeping, or older
    assert hits(engine, first) == 16
    hits(engine, second[::-1])
    hits(engine, third)  # sixteen blocks later the first has none
    assert hits(engine, first) == 0


def test_a_hit_that_does_not_fit_changes_nothing(engine):
    """Six blocks of a prefix, three of them in use; three more are needed and too few are free."""
    prefix = random_tokens(12, 96)
    add(engine, prefix)
    finish(engine)
    add(
        engine, prefix[:48] + random_tokens(13, 65), 20
    )  # holds 3 + 5 blocks, and will need another
    engine.step()
    before = jax.device_get(engine.state.cache.pool)
    add(engine, prefix + random_tokens(14, 30))
    engine.step()
    assert int(engine.state.seqs.waiting.count) == 1
    np.testing.assert_array_equal(before.ref_count, engine.state.cache.pool.ref_count)
    tokens, cached = finish(engine)
    assert len(tokens) == 2 and min(cached.values()) == 48


def test_reset_forgets_everything_but_not_while_blocks_are_in_use(engine):
    prompt = random_tokens(15, 40)
    add(engine, prompt, 5)
    engine.step()
    assert not engine.reset_prefix_cache()
    finish(engine)
    assert hits(engine, prompt) == 32
    queue = free_queue(engine.state.cache.pool)
    assert engine.reset_prefix_cache() and free_queue(engine.state.cache.pool) == queue
    assert hits(engine, prompt) == 0


def test_salts_keep_what_they_computed_apart(engine):
    prompt = random_tokens(16, 48)
    for salt in ("one", None, "two", ""):
        assert hits(engine, prompt, cache_salt=salt) == 0
        assert hits(engine, prompt, cache_salt=salt) == 48


def test_new_params_never_hit_what_the_old_computed(engine):
    first, running, waiting = random_tokens(17, 32), random_tokens(18, 32), random_tokens(19, 64)
    assert hits(engine, first) == 0
    add(engine, running, 9)
    engine.step()
    add(engine, waiting, 9)
    engine.update_params(engine.params)
    finish(engine)
    assert hits(engine, first) == 0 and hits(engine, running) == 0
    assert hits(engine, waiting) == 64, "it started with the new params"
    with pytest.raises(ConfigError, match="is not of this model"):
        engine.update_params({"more": jnp.zeros(3)})


def test_samples_that_start_after_an_update_share_old_content_but_do_not_make_it_known(engine):
    prompt = random_tokens(40, 64)
    for seed in range(3):
        add(engine, random_tokens(41 + seed, 5), 4)
    engine.add_request(prompt, SamplingParams(n=2, temperature=30.0, max_tokens=12))
    engine.step()
    assert int(engine.state.seqs.waiting.count) == 1, "no place for the second sample"
    engine.update_params(engine.params)
    before = int(engine.counters.computed_tokens)
    finish(engine)
    assert int(engine.counters.computed_tokens) - before < 64, (
        "it shared what the first had computed"
    )
    assert hits(engine, prompt) == 0


def test_a_preempted_request_finds_its_own_blocks_again(engine):
    """Two prompts of 80 tokens in ten blocks: the second gives way, and resumes with what was not
    taken from it.
    """
    prompts = random_tokens(20, 80), random_tokens(21, 80)
    ids = [add(engine, prompt, 12) for prompt in prompts]
    tokens, cached = finish(engine)
    assert [tokens[i] for i in ids] == [MODEL.continuation(prompt, 12) for prompt in prompts]
    assert int(engine.counters.preemptions) == 1 and list(cached.values()) == [0, 0]
    assert int(engine.counters.computed_tokens) < 2 * (80 + 11) + 80


@pytest.mark.parametrize(("bits", "known"), [(32, 20), (1, 14), (2, 20)])
def test_contents_that_differ_in_their_last_token_alone_have_places_of_their_own(bits, known):
    """20 blocks; were the hash blind to the last token, a set of eight would have to hold them all.
    Sets that are full (two of them with one bit of hash) take no more, and nothing else is lost.
    """
    tables = init_tables(1, 20, 1)
    tables = tables.replace(
        blocks=jnp.arange(1, 21, dtype=jnp.int32).reshape(1, 20, 1),
        num_blocks=jnp.ones((1, 20), jnp.int32),
    )
    tokens = jnp.asarray([[5, 6, 7, 30 + row] for row in range(20)], jnp.int32)
    rows, root = jnp.arange(20, dtype=jnp.int32), jnp.int32(-1)
    with mock.patch.object(content_hash, "HASH_BITS", bits):
        directory = prefix_directory.init_directory(CacheConfig(64, 20, 1, block_size=4))
        hashed = content_hash.root_hash(root)
        directory = prefix_directory.start_rows(directory, rows, 0, root, hashed)
        register = jax.jit(
            lambda d: registration.register(d, tables, tokens, rows, jnp.ones_like(rows))
        )
        directory = register(directory)
        find = jax.jit(
            lambda t: prefix_directory.find_prefix(directory, t, 1, root, 1).blocks[0, 0]
        )
        found = [int(find(row)) for row in tokens]
    assert sum(block != 0 for block in found) == known
    assert all(block in (0, row + 1) for row, block in enumerate(found))
    assert int(directory.next_id) == known + 1


def test_lookups_do_not_touch_the_pool():
    """No operation of a lookup has a pool dimension but as what it gathers from."""
    directory = prefix_directory.init_directory(CacheConfig(131071, 4, 1))
    program = jax.jit(lambda d, t: prefix_directory.find_prefix(d, t, 5, jnp.int32(-1), 8))
    text = program.lower(directory, jnp.zeros(128, jnp.int32)).compile().as_text()
    produced = [
        line
        for line in text.splitlines()
        if " = " in line and "131071" in line.split(" = ")[1].split("(")[0]
    ]
    assert all("parameter(" in line or "get-tuple-element" in line for line in produced), produced


def test_what_many_prompts_share_is_computed_once():
    """32 prompts of 512 equal tokens and 32 of their own: beside those, a block each at most."""
    model = ToyDecoder(max_model_len=560)
    sizes = dict(max_num_seqs=32, max_num_batched_tokens=256, enable_prefix_caching=True)
    engine = make_engine(model, 180, 560, widths=(256,), **sizes)
    common = random_tokens(70, 512)
    prompts = [common + rest for rest in random_prompts(71, [32] * 32)]
    ids = [add(engine, prompt) for prompt in prompts]
    tokens, _ = finish(engine)
    assert [tokens[i] for i in ids] == [model.continuation(prompt, 1) for prompt in prompts]
    assert int(engine.counters.computed_tokens) <= 512 + 32 * 32 + 32 * 16
    assert int(engine.counters.peak_blocks) <= 32 + 32 * 2


# ---------------------------------------------------------------- never a wrong token

SMALL = dict(num_blocks=17, max_num_seqs=3, max_num_batched_tokens=12, widths=(12,))
SMALL |= dict(enable_prefix_caching=True)
PLAIN = dict(num_blocks=80, max_num_seqs=6, max_num_batched_tokens=40, widths=(40,))


def engine_with_bits(bits, windows=(None,), sizes=SMALL):
    """An engine of which hashes have so many bits: with few nearly all collide."""
    model = ToyDecoder(windows=windows, max_model_len=128)
    engine = make_engine(model, max_model_len=40, num_rows=6, block_size=4, **sizes)
    engine._programs = programs.__wrapped__(nnx.split(model)[0], engine.widths)  # for these bits
    with mock.patch.object(content_hash, "HASH_BITS", bits):
        engine.run(1)
        add(engine, [1, 2, 3])
        finish(engine)  # compiled now
    return engine


@pytest.fixture(scope="module")
def engines():
    return {
        "full": engine_with_bits(32),
        "window": engine_with_bits(32, windows=(None, 6)),
        "collisions": engine_with_bits(2),
        "plain": engine_with_bits(32, sizes=PLAIN),
        "plain, window": engine_with_bits(32, windows=(None, 6), sizes=PLAIN),
    }


def poison(engine):
    """NaN wherever nothing is that anyone may read: not a running row's computed token, nor a block
    worth keeping.
    """
    cache, seqs = engine.state.cache, jax.device_get(engine.state.seqs)
    tables, directory = jax.device_get((cache.tables, cache.directory))
    size = engine.config.block_size
    live = np.broadcast_to(
        (directory.content_id > 0)[:, None], (len(directory.content_id), size)
    ).copy()
    for row in seqs.running[: seqs.num_running]:
        positions = np.arange(max(seqs.num_computed[row], seqs.num_hit[row]))
        for group in range(len(tables.blocks)):
            live[tables.blocks[group, row, positions // size], positions % size] = True
    mask = jnp.asarray(live)[:, :, None, None]
    kv = jax.tree.map(lambda pages: jnp.where(mask, pages, jnp.nan), cache.kv)
    engine.state = engine.state.replace(cache=cache.replace(kv=kv))


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("which", ["full", "window", "collisions"])
def test_tokens_are_the_same_with_and_without_caching(engines, which):
    """Workloads that share beginnings, run into the cache that earlier ones left, with eviction,
    preemption, forks and aborts.
    """

    @settings(
        max_examples=200 if which == "full" else 100,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**20))
    def check(seed):
        serve_random_workload(engines, which, seed)

    check()


def serve_random_workload(engines, which, seed):
    engine, rng = engines[which], np.random.default_rng(seed)
    model = ToyDecoder(windows=(None, 6) if which == "window" else (None,), max_model_len=128)
    plain, wanted = engines["plain, window" if which == "window" else "plain"], {}
    for _ in range(rng.integers(2, 6)):
        family = random_prompts(int(rng.integers(3)), [24], vocab_size=3)[0]
        prompt = family[: rng.integers(1, 25)] + rng.integers(0, 2, rng.integers(0, 4)).tolist()
        salt = ("a", None)[rng.integers(2)]
        count = int(rng.integers(1, 12))
        if (
            rng.random() < 0.3
        ):  # several samples: each as an engine without caching gives it, by itself
            params = SamplingParams(n=3, temperature=30.0, seed=count, max_tokens=count)
            request_id = engine.add_request(prompt, params, cache_salt=salt)
            alone = plain.add_request(prompt, params)
            wanted[request_id] = finish(plain)[0][alone]
            assert len(wanted[request_id]) == 3 * count
        else:
            wanted[add(engine, prompt, count, cache_salt=salt)] = model.continuation(prompt, count)
    if rng.random() < 0.3:
        engine.abort(min(wanted))
        del wanted[min(wanted)]
    tokens, _ = finish(engine, each_step=poison)
    assert {request_id: tokens[request_id] for request_id in wanted} == wanted


@pytest.mark.usefixtures("no_annotation_checks")
def test_a_sample_that_goes_on_in_its_parents_last_block_makes_nobody_hit_it(engines):
    """The second sample starts in the step in which the first ends, and shares its last block. The
    first one's tokens fill the block and are registered when it is released; the second writes its
    own into it, alone.
    """
    engine, model = engines["full"], ToyDecoder(max_model_len=128)
    assert engine.reset_prefix_cache()
    prompt, *others = random_prompts(60, [5, 2, 3])
    for other in others:
        add(engine, other, 3)
    sampled = SamplingParams(n=2, temperature=30.0, seed=3, max_tokens=4)
    request_id = engine.add_request(prompt, sampled)
    tokens = {0: [], 1: []}
    for _ in range(5):
        for update in news(engine, 1):
            if update.request_id == request_id:
                tokens[update.index] += update.token_ids
    assert len(tokens[0]) == 4 and len(tokens[1]) == 2, "one has ended, the other goes on"
    assert tokens[0][0] != tokens[1][0]
    probe = prompt + tokens[0][:3] + [1]
    probe_id = add(engine, probe, 1)
    outputs, _ = finish(engine)
    assert outputs[probe_id] == model.continuation(probe, 1)


def test_the_workloads_did_hit_and_evict(engines):
    """What the test above is about (it runs before this one, but in a quick run it does not)."""
    engine = engines["full"]
    prompt = random_prompts(1, [24], vocab_size=3)[0]
    for _ in range(2):
        add(engine, prompt, 2)
        finish(engine)
    assert engine.counters.hit_tokens >= 24


def test_a_model_gives_the_same_tokens_with_caching_cold_warm_and_under_pressure():
    from paged_jax.models import load_model

    graphdef, params = nnx.split(load_model(TINY / "llama", "float32")[0])
    system = random_prompts(30, [29], vocab_size=256)[0]
    prompts = [system + rest for rest in random_prompts(31, [3, 9, 1, 14, 3], vocab_size=256)] + [
        system[:16]
    ]
    kinds = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=0.9, seed=4, max_tokens=9),
        SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=9),
    ]

    def run(engine):
        ids = [engine.add_request(prompt, kinds[i % 3]) for i, prompt in enumerate(prompts)]
        ids.append(engine.add_request(prompts[0], BeamSearchParams(2, max_tokens=6)))
        tokens = {}
        while engine.has_unfinished():
            for update in news(engine, 8):
                tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        return [tokens[i, k] for i in ids for k in range(4) if (i, k) in tokens]

    sizes = dict(max_model_len=64, max_num_seqs=6, max_num_batched_tokens=24, block_size=4)
    sizes |= dict(widths=(24,), max_beam_width=2)
    expected = run(make_engine((graphdef, params), 120, **sizes))
    engine = make_engine((graphdef, params), 22, **sizes, enable_prefix_caching=True)
    assert run(engine) == expected and run(engine) == expected
    assert engine.counters.hit_tokens > 100 and engine.counters.preemptions > 0
