"""The host's side: requests in any number and order, at any time; each gets its own tokens and one
end.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import engines
from engines import news
from paged_jax import ConfigError, Engine, EngineConfig, InvalidRequestError, SamplingParams
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder()


def make_engine(num_blocks=30, **options):
    sizes = dict(
        max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16, num_rows=6, block_size=4
    )
    return engines.make_engine(MODEL, num_blocks, **(sizes | options))


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def finish(engine, steps=32):
    """Run to the end; tokens and last update of each request."""
    tokens, last = {}, {}
    while engine.has_unfinished():
        for update in news(engine, steps):
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            assert last.get(update.request_id) is None, "an update after the end"
            last[update.request_id] = update if update.finish_reason else None
    return tokens, last


@pytest.mark.parametrize("steps", [1, 5, 32, 100])
def test_more_requests_than_rows_all_get_their_tokens(engine, steps):
    prompts = random_prompts(steps, [3, 17, 8, 20, 1, 12, 6, 9, 2, 2, 14])
    ids = [
        engine.add_request(p, SamplingParams(temperature=0, max_tokens=7 + i))
        for i, p in enumerate(prompts)
    ]
    tokens, last = finish(engine, steps)
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert tokens[request_id] == MODEL.continuation(prompt, 7 + i)
        assert last[request_id].finish_reason == "length"


def test_a_request_added_while_others_run_is_served(engine):
    first, second = random_prompts(3, [5, 9])
    a = engine.add_request(first, SamplingParams(temperature=0, max_tokens=20))
    early = {update.request_id: update.token_ids for update in news(engine, 4)}
    b = engine.add_request(second, SamplingParams(temperature=0, max_tokens=3))
    tokens, _ = finish(engine)
    assert early[a] + tokens[a] == MODEL.continuation(first, 20)
    assert tokens[b] == MODEL.continuation(second, 3)


def test_abort_in_every_state(engine):
    prompts = random_prompts(4, [4] * 9)  # 4 run, 2 wait in rows, 3 in the queue
    ids = [engine.add_request(p, SamplingParams(temperature=0, max_tokens=30)) for p in prompts]
    engine.run(3)
    for k in (0, 4, 8):
        assert engine.abort(ids[k])
    assert not engine.abort("nobody")
    tokens, last = finish(engine)
    for k, request_id in enumerate(ids):
        aborted = k in (0, 4, 8)
        assert last[request_id].finish_reason == ("abort" if aborted else "length")
        if not aborted:
            whole = MODEL.continuation(prompts[k], 30)
            assert whole[-len(tokens[request_id]) :] == tokens[request_id]
    assert int(engine.state.cache.pool.num_free) == 29


def test_stop_tokens_and_end_of_text(engine):
    (prompt,) = random_prompts(5, [6])
    whole = MODEL.continuation(prompt, 10)
    stop = whole[4]
    at = whole.index(stop)

    def run(**params):
        request_id = engine.add_request(
            prompt, SamplingParams(temperature=0, max_tokens=10, **params)
        )
        tokens, last = finish(engine)
        return tokens[request_id], last[request_id]

    tokens, last = run(stop_token_ids=[stop])
    assert tokens == whole[: at + 1] and (last.finish_reason, last.stop_reason) == ("stop", stop)
    engine.eos_token_ids = (stop,)
    tokens, last = run()
    assert tokens == whole[: at + 1] and (last.finish_reason, last.stop_reason) == ("stop", None)
    tokens, last = run(ignore_eos=True)
    assert tokens == whole and last.finish_reason == "length"
    tokens, last = run(min_tokens=9)
    assert stop not in tokens[:9] and len(tokens) >= 9
    engine.eos_token_ids = ()


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "prompt=[]"),
        ([97], {}, "prompt[0]=97"),
        ([1, -1], {}, "prompt[1]=-1"),
        ([1] * 40, {}, "max_model_len=40"),
        ("text", {}, "prompt='text'"),
        ([1.5], {}, "prompt[0]=1.5"),
        ([True], {}, "prompt[0]=True"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"max_tokens": -3}, "max_tokens=-3"),
        ([1], {"max_tokens": "7"}, "max_tokens='7'"),
        ([1], {"temperature": -0.1}, "temperature=-0.1"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"top_p": 0.0}, "top_p=0"),
        ([1], {"top_p": 1.1}, "top_p=1.1"),
        ([1], {"top_k": -2}, "top_k=-2"),
        ([1], {"min_p": 2}, "min_p=2"),
        ([1], {"min_tokens": 3, "max_tokens": 2}, "min_tokens=3"),
        ([1], {"stop_token_ids": [97]}, "97"),
        ([1], {"stop_token_ids": list(range(9))}, "max_stop_ids=8"),
        ([1], {"seed": "x"}, "seed='x'"),
    ],
)
def test_a_bad_request_is_refused_alone(engine, prompt, params, says):
    (good,) = random_prompts(6, [5])
    a = engine.add_request(good, SamplingParams(temperature=0, max_tokens=4))
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request(prompt, SamplingParams(**params))
    assert says in str(error.value)
    tokens, _ = finish(engine)
    assert tokens == {a: MODEL.continuation(good, 4)}


def test_prompts_may_be_arrays_of_numpy_and_jax_but_of_one_dimension(engine):
    prompt = random_prompts(9, [6])[0]
    ids = [
        engine.add_request(kind(prompt), SamplingParams(temperature=0, max_tokens=3))
        for kind in (np.array, jnp.array)
    ]
    assert finish(engine)[0] == dict.fromkeys(ids, MODEL.continuation(prompt, 3))
    with pytest.raises(InvalidRequestError, match=r"prompt: an array of shape \(\)"):
        engine.add_request(np.array(5))


@pytest.mark.usefixtures("no_annotation_checks")
def test_wrong_arguments_of_the_engine_itself_are_named(engine):
    graphdef, params = nnx.split(MODEL)
    for args in ((MODEL, params, engine.config), (graphdef, params, None)):
        with pytest.raises(ConfigError, match="graphdef, config"):
            Engine(*args)
    for seed in (-1, "a", 1.5):
        with pytest.raises(ConfigError, match="seed="):
            Engine(graphdef, params, engine.config, seed=seed)
    assert not engine.abort([])
    for widths in ((2, "a"), (None, 9), (9, 2)):
        with pytest.raises(ConfigError, match="widths="):
            Engine(*nnx.split(MODEL), EngineConfig(30, 40, 2, 9), widths=widths)


def test_a_request_that_can_never_fit_is_refused_and_the_rest_go_on():
    small = make_engine(num_blocks=4)  # 3 usable blocks of 4 tokens
    with pytest.raises(InvalidRequestError, match="needs up to 4 blocks of 4, the pool has 3"):
        small.add_request([1] * 8, SamplingParams(temperature=0, max_tokens=6))
    fits = small.add_request([1] * 8, SamplingParams(temperature=0, max_tokens=5))
    tokens, _ = finish(small)
    assert tokens[fits] == MODEL.continuation([1] * 8, 5)


def test_a_duplicate_id_is_refused_and_the_first_is_unaffected(engine):
    (prompt,) = random_prompts(7, [5])
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=4), request_id="twin")
    with pytest.raises(InvalidRequestError, match="twin"):
        engine.add_request(prompt, request_id="twin")
    assert finish(engine)[0] == {"twin": MODEL.continuation(prompt, 4)}


def test_calls_of_equal_shapes_trace_once(engine):
    first = None  # engines share programs: others have left their traces in them
    for seed in range(3):
        for prompt in random_prompts(seed, [3 + seed, 11]):
            engine.add_request(
                prompt, SamplingParams(max_tokens=4 + seed, top_k=seed, temperature=seed / 2)
            )
        finish(engine, 3 + seed)
        sizes = [program._cache_size() for program in engine._programs]
        first = first or sizes
    assert sizes == first


def test_an_absurd_minimum_is_bounded_by_the_sequence(engine):
    (good,) = random_prompts(8, [5])
    a = engine.add_request(good, SamplingParams(temperature=0, max_tokens=4))
    engine.add_request([1], SamplingParams(temperature=0, max_tokens=None, min_tokens=2**40))
    tokens, last = finish(engine)
    assert tokens[a] == MODEL.continuation(good, 4)
    assert {update.finish_reason for update in last.values()} == {"length"}


def test_abort_twice_ends_once(engine):
    ids = [
        engine.add_request([1, 2], SamplingParams(max_tokens=30)) for _ in range(8)
    ]  # the last two stay in the queue
    engine.run(1)
    assert engine.abort(ids[-1]) and not engine.abort(ids[-1])
    assert engine.abort(ids[0]) and engine.abort(ids[0])
    _, last = finish(engine)
    assert [last[i].finish_reason for i in ids] == ["abort", *["length"] * 6, "abort"]


def test_ids_are_in_use_until_their_last_news_is_told_and_automatic_ones_step_aside(engine):
    (prompt,) = random_prompts(9, [5])
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2), request_id="mine")
    engine.run(32)
    with pytest.raises(InvalidRequestError, match="mine"):
        engine.add_request(prompt, request_id="mine")
    (update,) = engine.take("mine")
    assert update.request_id == "mine" and update.finish_reason == "length"
    taken = f"request-{engine._num_added}"
    engine.add_request(prompt, SamplingParams(max_tokens=1), request_id=taken)
    assert engine.add_request(prompt, SamplingParams(max_tokens=1)) != taken
    finish(engine)
