"""`LLM` on token ids: lists, single prompts, streams; what is wrong with one prompt is that
prompt's own affair.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import (
    LLM,
    BeamSearchParams,
    ConfigError,
    Engine,
    EngineConfig,
    InvalidRequestError,
    NoProgressError,
    SamplingParams,
    allocate_slots,
    check_integrity,
    free,
)
from paged_jax.engine import roots
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder(max_model_len=40)
GREEDY = SamplingParams(temperature=0, max_tokens=9)
SIZES = dict(block_size=4, num_blocks=30, max_num_seqs=4, max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def llm():
    return LLM(MODEL, **SIZES)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_come_in_the_prompts_order_with_parameters_for_all_or_for_each(llm):
    prompts = random_prompts(0, [3, 9, 1, 5, 7])
    assert tokens_of(llm.generate(prompts, GREEDY, progress=False)) == [
        MODEL.continuation(p, 9) for p in prompts
    ]
    each = [SamplingParams(temperature=0, max_tokens=2 + i) for i in range(5)]
    outputs = llm.generate([np.array(p) for p in prompts], each)
    assert tokens_of(outputs) == [MODEL.continuation(p, 2 + i) for i, p in enumerate(prompts)]
    first = outputs[0]
    assert (
        first.prompt is None
        and first.prompt_token_ids == prompts[0]
        and first.outputs[0].text is None
    )
    assert first.outputs[0].finish_reason == "length" and first.num_cached_tokens == 0
    assert first.outputs[0].cumulative_logprob == pytest.approx(sum(first.outputs[0].logprobs))
    assert (
        first.metrics.arrival_time <= first.metrics.first_token_time <= first.metrics.finished_time
    )
    assert llm.generate([], GREEDY) == []


def test_a_single_prompt_needs_no_list(llm):
    (prompt,) = random_prompts(1, [6])
    for given in (prompt, tuple(prompt), np.array(prompt), [prompt]):
        assert tokens_of(llm.generate(given, GREEDY, progress=False)) == [
            MODEL.continuation(prompt, 9)
        ]


@pytest.mark.usefixtures("no_annotation_checks")
def test_a_bad_prompt_in_a_list_is_told_of_and_the_others_are_served(llm):
    good = random_prompts(2, [3, 5])
    with pytest.warns(UserWarning, match=r"prompts\[1\] is not served: prompt\[0\]=97"):
        outputs = llm.generate([good[0], [97], good[1]], GREEDY, progress=False)
    assert tokens_of([outputs[0], outputs[2]]) == [MODEL.continuation(p, 9) for p in good]
    assert outputs[1].outputs == [] and "prompt[0]=97" in str(outputs[1].error)
    with pytest.raises(InvalidRequestError, match=r"prompt\[0\]=97"):
        llm.generate([97], GREEDY)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    for wrong in (5, np.array(5)):
        with pytest.raises(InvalidRequestError, match=r"prompts=.*5"):
            llm.generate(wrong, GREEDY)
    with pytest.raises(InvalidRequestError, match=r"sampling_params=0\.5"):
        llm.generate(good, 0.5)
    with pytest.raises(InvalidRequestError, match="sampling_params: 1 for 2 prompts"):
        llm.generate(good, [GREEDY])
    assert not llm.engine.has_unfinished()


def test_a_stream_gives_the_same_tokens_and_closing_it_leaves_nothing_behind(llm):
    (prompt,) = random_prompts(3, [6])
    deltas = list(llm.stream(prompt, GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == MODEL.continuation(prompt, 9)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) == 9
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=30))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished()
    llm.engine.run(1)  # what was abandoned gives its blocks back with the next dispatch
    assert int(llm.engine.state.cache.pool.num_free) == 29
    assert check_integrity(llm.engine.state) == []


def test_requests_of_the_engines_own_users_get_their_news(llm):
    mine, theirs = random_prompts(4, [5, 4])
    request_id = llm.engine.add_request(theirs, SamplingParams(temperature=0, max_tokens=3))
    assert tokens_of(llm.generate(mine, GREEDY, progress=False)) == [MODEL.continuation(mine, 9)]
    (update,) = llm.engine.take(request_id)
    assert update.token_ids == MODEL.continuation(theirs, 3)
    assert update.finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="is not in use"):
        llm.engine.take(request_id)


def test_samples_and_beams_come_in_order_beside_other_prompts(llm):
    prompts = random_prompts(20, [6, 5, 7])
    params = [
        SamplingParams(n=3, temperature=40.0, seed=2, max_tokens=5),
        GREEDY,
        BeamSearchParams(2, max_tokens=4),
    ]
    sampled, greedy, beams = llm.generate(prompts, params, progress=False)
    assert [o.index for o in sampled.outputs] == [0, 1, 2] and len(
        {tuple(o.token_ids) for o in sampled.outputs}
    ) == 3
    assert greedy.outputs[0].token_ids == MODEL.continuation(prompts[1], 9)
    scores = [o.cumulative_logprob / len(o.token_ids) for o in beams.outputs]
    assert [o.index for o in beams.outputs] == [0, 1] and scores == sorted(scores, reverse=True)
    deltas = list(llm.stream(prompts[0], params[0]))
    for output in sampled.outputs:
        assert [
            t for d in deltas if d.index == output.index for t in d.token_ids
        ] == output.token_ids
    assert not llm.engine.has_unfinished()


@pytest.mark.usefixtures("no_annotation_checks")
def test_what_was_computed_is_found_again_until_salt_params_or_a_reset_say_otherwise(llm):
    (prompt,) = random_prompts(21, [13])

    def cached(**options):
        (output,) = llm.generate(prompt, GREEDY, progress=False, **options)
        assert output.outputs[0].token_ids == MODEL.continuation(prompt, 9)
        return output.num_cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 12, 0, 12]
    assert 0 < llm.stats()["hit_rate"] < 1
    llm.update_params(llm.engine.params)
    assert [cached(), cached()] == [0, 12]
    assert llm.reset_prefix_cache() and cached() == 0
    with pytest.warns(UserWarning, match="cache_salt=5: a str is needed"):
        llm.generate([prompt], GREEDY, cache_salt=[5])
    with pytest.raises(InvalidRequestError, match="cache_salt: 2 for 1 prompts"):
        llm.generate([prompt], GREEDY, cache_salt=["a", "b"])
    with pytest.raises(ConfigError, match="params"):
        llm.update_params({"more": np.zeros(2)})


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    "messages", [5, "hello", [], [[]], [5], [{"role": "user"}], [[{"role": "user", "content": 3}]]]
)
def test_messages_that_are_none_are_refused_by_name(llm, messages):
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat(messages, GREEDY)


def test_stats_count_what_was_done(llm):
    before = llm.stats()
    (prompt,) = random_prompts(5, [6])
    llm.generate(prompt, GREEDY, progress=False)
    after = llm.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == 9
    assert after["computed_tokens"] - before["computed_tokens"] == 6 + 8
    assert 0 < after["waste"] < 1 and after["num_blocks"] == 30 and after["peak_blocks"] <= 29


def test_a_seed_repeats_what_requests_without_one_of_their_own_draw():
    prompts = random_prompts(6, [5, 5, 5])
    params = SamplingParams(temperature=50.0, max_tokens=9)
    narrow = SIZES | {
        "max_num_batched_tokens": 4,
        "enable_prefix_caching": False,
    }  # less to compile
    llms = [LLM(MODEL, **narrow, seed=seed) for seed in (1, 1, 2)]
    for other in llms[1:]:
        other.engine._programs = llms[0].engine._programs  # compiled once
    draws = [tokens_of(llm.generate(prompts, params, progress=False)) for llm in llms]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"max_model_len": 41}, "max_model_len=41: the model was made for 40"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4"),
        ({"num_blocks": 1}, "num_blocks=1: must be at least 2"),
        ({"num_blocks": "64"}, "num_blocks='64'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"block_size": 0}, "block_size=0: must be at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        LLM(MODEL, **(SIZES | options))


def test_two_streams_side_by_side_give_each_its_own_tokens(llm):
    prompts = random_prompts(7, [6, 4])
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    tokens = [[], []]
    for deltas in zip(*streams, strict=False):
        for mine, delta in zip(tokens, deltas, strict=True):
            mine += delta.token_ids
    for mine, stream in zip(tokens, streams, strict=True):
        mine += [token for delta in stream for token in delta.token_ids]
    assert tokens == [MODEL.continuation(prompt, 9) for prompt in prompts]
    assert not llm.engine.has_unfinished()


def test_a_stream_that_was_never_read_queued_nothing(llm):
    llm.stream([1, 2], GREEDY).close()
    assert not llm.engine.has_unfinished()
    with pytest.raises(InvalidRequestError, match="97"):
        llm.stream([97], GREEDY)


def test_a_stream_that_has_ended_abandons_nobody_and_keeps_its_own_prompt(llm):
    prompt, (other,) = random_prompts(9, [6])[0], random_prompts(10, [4])
    given = list(prompt)
    stream = llm.stream(given, GREEDY)
    given[:] = other
    tokens = []
    for delta in stream:
        tokens += delta.token_ids
        if delta.finish_reason:
            break
    assert tokens == MODEL.continuation(prompt, 9)
    again = f"request-{llm.engine._num_added - 1}"  # its id is free
    llm.engine.add_request(other, GREEDY, request_id=again)
    stream.close()
    llm.engine.run(32)
    (update,) = llm.engine.take(again)
    assert update.token_ids == MODEL.continuation(other, 9)


class WithParams(ToyDecoder):
    def __init__(self):
        super().__init__(max_model_len=40)
        self.illness = nnx.Param(jnp.zeros(97))


@pytest.mark.usefixtures("no_annotation_checks")
def test_params_that_hold_no_numbers_are_refused():
    graphdef, params = nnx.split(WithParams())
    config = EngineConfig(20, 40, 2, 8, block_size=4)
    engine = Engine(graphdef, params, config)
    dead = jnp.zeros(97)
    dead.delete()
    for wrong in (jax.ShapeDtypeStruct((97,), jnp.float32), dead, "abc", None):
        other = jax.tree.map(lambda x: wrong, params)  # noqa: B023
        with pytest.raises(ConfigError, match=r"params.*illness"):
            engine.update_params(other)


def test_a_model_of_many_ends_of_text_serves():
    model = ToyDecoder(max_model_len=40)
    model.eos_token_ids = tuple(range(60, 72))
    llm = LLM(model, **SIZES)
    assert llm.engine.config.max_stop_ids == 16
    llm.engine.check_request([1], SamplingParams(stop_token_ids=[1, 2, 3, 4]))


def test_salts_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(roots, "MOST_SALTS", 3)
    some = roots.Roots()
    found = [roots.find_root(some, salt) for salt in "abcab"]
    assert found[3:] == found[:2] and len(set(found)) == 3
    assert roots.find_root(some, "d") not in found and list(some.by_salt) == ["b", "c", "d"]
    assert roots.find_root(some, "a") not in found


def test_what_can_never_start_leaves_the_engine_free_for_others(llm):
    """Rows of somebody else hold the blocks: the error comes through, nothing stays behind."""
    engine, rows = llm.engine, [7, 6, 5]
    state, free_before = engine.state, int(engine.state.cache.pool.num_free)
    held, ok = allocate_slots(state.cache, rows, [40, 40, 36])
    assert ok
    engine.state = state.replace(cache=held)
    with pytest.raises(NoProgressError, match="2 requests wait, none runs"):
        llm.generate([[5] * 20, [6] * 3], GREEDY, progress=False)
    assert not engine.has_unfinished() and engine.run(1) == []
    cache, _ = free(engine.state.cache, rows)
    engine.state = engine.state.replace(cache=cache)
    (prompt,) = random_prompts(8, [6])
    (output,) = llm.generate([prompt], GREEDY, progress=False)
    assert output.outputs[0].token_ids == MODEL.continuation(prompt, 9)
    assert int(engine.state.cache.pool.num_free) == free_before
    assert check_integrity(engine.state) == []
