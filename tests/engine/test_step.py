"""The step as a pure function: right tokens under every pressure, and nothing left behind."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import EngineConfig
from paged_jax.cache import block_pool
from paged_jax.engine import step
from paged_jax.sampling.rows import init_sampling_rows
from paged_jax.scheduling import sequences
from toy_decoder import ToyDecoder, random_prompts


def greedy_rows(prompts, num_rows, max_len, new_tokens):
    """Requests for the first rows, each to be continued greedily by `new_tokens`."""
    k = len(prompts)
    tokens = np.zeros((k, max_len), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
    ints = jnp.zeros(k, jnp.int32)
    sampling = init_sampling_rows(k, 8)
    nobody = jnp.full(k, num_rows)
    return sequences.NewSequences(
        jnp.arange(k),
        jnp.asarray(tokens),
        lengths,
        lengths + new_tokens,
        ints - 1,
        nobody,
        sampling,
    )


@pytest.mark.parametrize(
    ("windows", "num_blocks"), [((None,), 12), ((5,), 12), ((None, 5), 12), ((None, 5), 100)]
)
def test_tokens_do_not_depend_on_the_pool_or_on_the_batch(windows, num_blocks):
    model = ToyDecoder(windows=windows)
    config = EngineConfig(
        num_blocks, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16, block_size=4
    )
    prompts = random_prompts(0, [3, 17, 8, 20, 1, 12, 6, 9])
    state = step.init_state(config, model)
    state = state.replace(
        seqs=sequences.add(state.seqs, greedy_rows(prompts, config.num_rows, 40, 15))
    )
    state, _ = jax.jit(partial(step.run, model), donate_argnums=0)(state, jnp.int32(500))
    for row, prompt in enumerate(prompts):
        output = state.seqs.tokens[row, len(prompt) : len(prompt) + 15].tolist()
        assert output == model.continuation(prompt, 15)
    assert len(block_pool.free_queue(state.cache.pool)) == num_blocks - 1
    assert (int(state.counters.preemptions) > 0) == (num_blocks == 12 and None in windows)
