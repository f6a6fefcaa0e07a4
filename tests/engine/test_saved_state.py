"""An engine's state can be written to a file, array by array, and gone on from."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engines import make_engine
from paged_jax import EngineConfig, SamplingParams
from paged_jax.engine.step import init_state
from toy_decoder import ToyDecoder, random_prompts

GROUPS = [(None,), (None, 5), (5, None, 7)]


@pytest.mark.parametrize(
    ("windows", "caching", "beams"), [*itertools.product(GROUPS, (False, True), (0, 1, 2))]
)
def test_no_array_of_a_state_is_empty(windows, caching, beams):
    """Orbax refuses to write an array without elements."""
    sizes = dict(enable_prefix_caching=caching, max_beam_width=beams, block_size=1)
    config = EngineConfig(2, 2, 2, 2, 2, max_stop_ids=1, **sizes)
    model = ToyDecoder(windows=windows)
    state = jax.eval_shape(lambda: init_state(config, model))
    empty = [
        jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(state) if x.size == 0
    ]
    assert empty == []


def test_a_state_read_back_from_a_file_goes_on_as_the_one_that_was_written():
    model = ToyDecoder(windows=(None, 5))
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=6, block_size=4)
    engine = make_engine(model, 24, 24, enable_prefix_caching=True, **sizes)
    for seed, prompt in enumerate(random_prompts(0, [9, 5, 7])):
        engine.add_request(prompt, SamplingParams(temperature=5, seed=seed, max_tokens=9))
    engine.run(4)

    file, names = io.BytesIO(), [*map(str, range(len(jax.tree.leaves(engine.state))))]
    np.savez(file, **dict(zip(names, jax.tree.leaves(engine.state), strict=True)))
    file.seek(0)
    with np.load(file) as arrays:
        leaves = [jnp.asarray(arrays[name]) for name in names]
    read = jax.tree.unflatten(jax.tree.structure(engine.state), leaves)

    run, nobody = engine._programs.run, np.zeros(engine.config.num_rows, bool)
    ends = [run(engine.params, s, np.int32(32), nobody)[0] for s in (engine.state, read)]
    want, got = jax.device_get(ends)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert want.counters.generated_tokens == 27
