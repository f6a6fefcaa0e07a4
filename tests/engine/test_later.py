"""A program of other widths that another process compiles, and that takes over."""

import os
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx

from paged_jax import BeamSearchParams, Engine, EngineConfig, SamplingParams
from paged_jax.default_sizes import choose_widths
from paged_jax.engine import stored_programs
from paged_jax.engine.later import LOCK, compile_elsewhere, wait_for_turn
from paged_jax.engine.stored_programs import Spec
from toy_decoder import ToyDecoder

SIZES = dict(num_blocks=30, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=9)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9]]


def make_engine(model=None, **options):
    return Engine(*nnx.split(model or ToyDecoder()), EngineConfig(**SIZES), **options)


def serve(engine):
    params = SamplingParams(temperature=0.7, max_tokens=8, seed=3)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.run(5)
    return [[t for update in engine.take(i) for t in update.token_ids] for i in ids]


def test_it_takes_over_and_gives_the_same_tokens(cache_folder):
    engine = make_engine(widths=(9,), later_widths=(1, 2, 4, 9))
    first = serve(engine)
    assert engine.finish_compiling() is None, engine.finish_compiling()
    ready = engine._runner.pick()
    assert ready is not None
    compiled = engine._programs.run._cache_size()
    calls = []
    engine._runner._compilation.program = lambda *args: calls.append(1) or ready(*args)
    assert serve(engine) == first and calls
    assert engine._programs.run._cache_size() == compiled
    # Beams make the state wider: the first program serves again, and another one is begun.
    request_id = engine.add_request([3, 1], BeamSearchParams(beam_width=2, max_tokens=3))
    count = len(calls)
    while engine.has_unfinished():
        engine.run(5)
    assert len(calls) == count and engine.take(request_id)
    engine.update_params(jax.tree.map(np.copy, engine.params))
    assert serve(engine)


def test_arguments_of_other_places_are_served_by_what_compiles_for_them(cache_folder):
    engine = make_engine(widths=(9,), later_widths=(1, 9))
    first = serve(engine)
    assert engine.finish_compiling() is None
    other = jax.devices()[1]
    engine.update_params(jax.device_put(engine.params, other))
    engine.state = jax.device_put(engine.state, other)
    assert serve(engine) == first
    assert engine.finish_compiling() == "nothing was begun"


def test_without_a_cache_folder_the_first_program_goes_on():
    engine = make_engine(widths=(9,), later_widths=(1, 9))
    first = serve(engine)
    assert engine.finish_compiling() == "JAX has no cache folder"
    assert serve(engine) == first


class Local(ToyDecoder):
    """A class that another process cannot import under this name."""


Local.__module__ = "__nowhere__"


def test_a_decoder_that_cannot_be_sent_is_served_all_the_same(cache_folder):
    engine = make_engine(Local(), widths=(9,), later_widths=(1, 9))
    assert serve(engine) == serve(make_engine(widths=(9,)))
    assert "Local" in engine.finish_compiling()


def test_what_goes_wrong_in_the_other_process_is_told(cache_folder):
    assert "Error" in compile_elsewhere(
        Spec(nnx.graphdef(ToyDecoder()), (1,), (3,), stored_programs.settings())
    )


@pytest.mark.parametrize("is_wanted", [True, False])
def test_one_process_compiles_at_a_time_and_none_whose_parent_ended_meanwhile(tmp_path, is_wanted):
    parent = os.getppid() if is_wanted else -1
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / LOCK, "w") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(wait_for_turn, str(tmp_path), parent)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert waiting.result(timeout=60) == is_wanted
    assert wait_for_turn(str(tmp_path / "nowhere"), -1)


def test_whoever_need_not_wait_compiles_also_as_an_orphan(tmp_path):
    assert wait_for_turn(str(tmp_path), -1)


def test_a_cpu_begins_with_two_widths_and_goes_on_with_powers_of_two():
    config = EngineConfig(100, 400, 48, 300)
    first, later = choose_widths(config)
    assert first == (1, 48)
    assert later == (1, 4, 8, 16, 32, 48, 64, 128, 256)
    assert choose_widths(EngineConfig(100, 400, 1, 20)) == ((1, 20), (1, 4, 8, 16))
    for budget in (1, 2):  # nothing would be gained
        assert choose_widths(EngineConfig(100, 400, 1, budget)).later is None
    assert choose_widths(EngineConfig(100, 400, 1, 1)) == ((1,), None)
