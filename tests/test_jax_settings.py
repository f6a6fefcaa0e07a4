"""JAX's global settings change no token: whoever embeds this package chooses them."""

from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from engines import QUICK, make_engine, news
from paged_jax import InvalidRequestError, SamplingParams, generate
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
