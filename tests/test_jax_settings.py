"""JAX's global settings change no token: whoever embeds this package chooses them."""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from engines import QUICK, make_engine, news, windowed_llama
from paged_jax import (
    BeamSearchParams,
    CacheConfig,
    FullAttention,
    InvalidRequestError,
    SamplingParams,
    SlidingWindow,
    allocate_slots,
    check_integrity,
    fork,
    free,
    generate,
    init_cache,
)
from paged_jax.kernels import ragged_paged_attention, write_kv
from paged_jax.sampling.streams import split_seeds
from toy_decoder import ToyDecoder, random_prompts

TOY = ToyDecoder(windows=(None, 5))


@contextmanager
def settings(**values):
    """Set flags of `jax.config`, and put back what they were."""
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# ---------------------------------------------------------------- random streams

WARM = dict(temperature=3.0, num_samples=2, block_size=4, max_new_tokens=4)


def rollout(key):
    """Sampled tokens of `generate`, of shapes that all tests here share."""
    prompts, lens = np.array(random_prompts(1, [5, 5])), np.array([5, 3])
    program = partial(generate, *nnx.split(ToyDecoder()), **WARM)
    quick = jax.jit(program, compiler_options=QUICK)
    return quick(prompts, lens, key).tokens.tolist()


KEY = jax.random.key(7, impl="threefry2x32")


def test_no_setting_of_random_keys_changes_a_token():
    usual = rollout(KEY)
    other = not jax.config.jax_threefry_partitionable
    with settings(jax_default_prng_impl="rbg", jax_threefry_partitionable=other):
        assert rollout(np.asarray(jax.random.key_data(KEY))) == usual
        assert jax.random.bits(KEY, (3,)).tolist() != split_seeds(KEY, 3).tolist()
    assert jax.random.bits(KEY, (3,), "uint32").tolist() == split_seeds(KEY, 3).tolist()


def test_under_rbg_a_request_does_not_depend_on_its_neighbours():
    def tokens(others):
        engine = make_engine(TOY, 32, 16, max_num_seqs=2, max_num_batched_tokens=8, block_size=4)
        for i, seed in enumerate(others):
            engine.add_request([1 + i], SamplingParams(temperature=5, seed=seed))
        mine = engine.add_request([5, 6], SamplingParams(temperature=5, seed=7, max_tokens=8))
        return [t for u in news(engine) if u.request_id == mine for t in u.token_ids]

    alone = tokens([])
    with settings(jax_default_prng_impl="unsafe_rbg"):
        assert tokens([]) == tokens([1]) == tokens([2]) == alone


def test_keys_of_every_implementation_are_taken_and_each_of_their_words_counts():
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        words = jax.random.key_data(jax.random.key(7, impl=impl))
        drawn = split_seeds(words, 5).tolist()
        assert drawn == split_seeds(jax.random.key(7, impl=impl), 5).tolist()
        others = [split_seeds(words.at[i].add(9), 5).tolist() for i in range(words.shape[0])]
        assert len({str(seeds) for seeds in (drawn, *others)}) == 1 + words.shape[0]


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    "key",
    [
        np.zeros(3, np.uint32),
        np.zeros((1, 2), np.uint32),
        np.zeros(2, np.int32),
        np.uint32(1),
        jax.random.split(KEY, 1),
        0,
        None,
    ],
    ids=str,
)
def test_what_is_no_key_is_refused_by_name(key):
    with pytest.raises(InvalidRequestError, match=r"key=.*one key of jax.random is needed"):
        rollout(key)


# ---------------------------------------------------------------- what arrays are and how they mix

EXACTING = dict(
    jax_enable_x64=True,
    jax_numpy_dtype_promotion="strict",
    jax_numpy_rank_promotion="raise",
)
MODEL = nnx.split(windowed_llama())
exacting = pytest.mark.filterwarnings("error::FutureWarning")  # of a write that narrows a dtype


def assert_narrow(state):
    for path, x in jax.tree.leaves_with_path(state):
        assert x.dtype.itemsize <= 4 and not x.weak_type, jax.tree_util.keystr(path)


@exacting
@pytest.mark.slow
def test_an_engine_with_all_it_has_gives_the_same_tokens():
    def tokens():
        sizes = dict(max_num_seqs=4, max_num_batched_tokens=8, block_size=4, max_beam_width=3)
        engine = make_engine(MODEL, 24, 32, enable_prefix_caching=True, **sizes)
        prompt = [1, 2, 3, 4, 5, 6]
        filters = dict(top_k=5, top_p=0.9, min_p=0.01, min_tokens=2, stop_token_ids=[3])
        engine.add_request(prompt, SamplingParams(n=3, seed=3, max_tokens=6, **filters))
        engine.add_request(prompt, BeamSearchParams(3, max_tokens=5))
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=9))
        found = [(u.request_id, u.index, u.token_ids) for u in news(engine)]
        engine.update_params(jax.tree.map(lambda x: -x, MODEL[1]))
        last = engine.add_request(prompt, SamplingParams(temperature=0), cache_salt="a")
        found += [u.token_ids for u in news(engine, 3)]
        engine.abort(last)
        engine.run(1)
        assert check_integrity(engine.state) == [] and engine.reset_prefix_cache()
        assert_narrow(engine.state)
        return found, engine.counters.items()

    usual = tokens()
    with settings(**EXACTING):
        assert tokens() == usual


@exacting
@pytest.mark.slow
def test_generate_gives_the_same_tokens():
    def tokens(dtype=np.int32):
        program = jax.jit(partial(generate, *MODEL, **options), compiler_options=QUICK)
        prompts, lens = np.array([[1, 2, 3], [4, 5, 0]], dtype), np.array([3, 2], dtype)
        out = program(prompts, lens, KEY, temperature=np.array([1, 2.0]), top_k=np.array([5, 0]))
        assert_narrow(out)
        return out.tokens.tolist()

    options = dict(max_new_tokens=4, num_samples=2, block_size=4, top_p=0.9, min_p=0.01)
    usual = tokens()
    with settings(**EXACTING):
        assert tokens(np.int64) == usual


@exacting
def test_the_cache_by_hand_is_the_same():
    def state():
        groups = (FullAttention(1), SlidingWindow(5, 1))
        cache = init_cache(CacheConfig(32, 4, 4, 4, groups, enable_prefix_caching=True))
        cache, _ = allocate_slots(cache, [0, 1], [5, 6], reserved_blocks=2, must_fit_tokens=9)
        cache, _ = fork(cache, 0, np.array([2, 3]))
        cache, _ = allocate_slots(cache, jnp.asarray(2), 3)
        cache, ok = free(cache, [0, 2])
        assert ok and check_integrity(cache) == []
        assert_narrow(cache)
        return jax.device_get(cache)

    usual = state()
    with settings(**EXACTING):
        jax.tree.map(np.testing.assert_array_equal, state(), usual)


@exacting
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_the_same(dtype):
    q = np.sin(np.arange(5 * 4 * 8)).reshape(5, 4, 8)
    pages = np.cos(np.arange(6 * 4 * 2 * 8)).reshape(6, 4, 2, 8)
    q, pages = (jnp.asarray(x, dtype) for x in (q, pages))
    index = [[9, 3, 0], [[1, 2, 3], [4, 0, 0], [0, 0, 0]], [0, 3, 5, 5], 2]
    index = [np.array(x, np.int32) for x in index]
    options = dict(window=6, soft_cap=20.0, sinks=jnp.ones(4, dtype), return_lse=True)

    def attend():
        slots = np.array([5, 6, 99, 8, 9], np.int32)
        k, v = write_kv(pages, pages, q[:, :2], q[:, 2:], slots)
        return ragged_paged_attention(q, k, v, *index, implementation="xla", **options)

    usual = attend()
    with settings(**EXACTING):
        jax.tree.map(np.testing.assert_array_equal, attend(), usual)


# ---------------------------------------------------------------- what JAX watches over


@pytest.mark.slow
def test_running_transfers_nothing_unsaid_and_makes_no_nan():
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=8, block_size=4, max_beam_width=2)
    engine = make_engine(MODEL, 24, 32, enable_prefix_caching=True, **sizes)
    cache, key = init_cache(CacheConfig(16, 4, 4, 4)), jax.random.key(0)
    with settings(jax_transfer_guard="disallow", jax_debug_nans=True):
        engine.add_request([1, 2, 3], SamplingParams(n=2, top_p=0.9, max_tokens=4))
        engine.add_request([1, 2, 3], BeamSearchParams(2, max_tokens=4))
        assert len(news(engine)) == 4
        engine.update_params(MODEL[1])
        engine.abort(engine.add_request([1, 2, 3]))
        engine.run(2)
        out = generate(*MODEL, np.array([[1, 2], [3, 4]]), [2, 1], key, max_new_tokens=2, top_k=3)
        assert out.lengths.tolist() == [[2], [2]]
        cache, _ = allocate_slots(cache, [0, 1], [5, 6])
        cache, _ = fork(cache, 0, [2, 3])
        cache, ok = free(cache, 0)
        assert ok and check_integrity(cache) == []
