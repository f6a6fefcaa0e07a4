"""Beam search inside the step finds what a plain search with a full forward pass at every step
finds.
"""

from functools import cache as memoize

import jax
import numpy as np
import pytest

import engines
from engines import news
from paged_jax import BeamSearchParams, InvalidRequestError, SamplingParams, check_integrity
from paged_jax.cache.block_pool import free_queue
from paged_jax.models import load_model
from plain_beam_search import plain_beam_search
from run_model import TINY, logits_of
from toy_decoder import random_prompts

MODEL = load_model(TINY / "llama", "float32")[0]
PROMPTS = random_prompts(21, [9, 4, 12, 17, 6], vocab_size=256)
MAX_LEN = 40


@memoize
def log_probs(context, model=MODEL):
    """Of every token after a context: a forward pass of the whole."""
    return np.asarray(jax.nn.log_softmax(logits_of(model, list(context))[-1])).tolist()


def plain(prompt, params, stop_ids=(), model=MODEL):
    max_len = min(len(prompt) + params.max_tokens, MAX_LEN)
    return plain_beam_search(
        lambda context: log_probs(tuple(context), model), prompt, params, stop_ids, max_len
    )


@pytest.fixture(scope="module")
def stop_ids():
    """Tokens that beams really come upon, early and late, as the first and as the last choice."""
    ends = set()
    for prompt in PROMPTS[:2]:
        outputs = plain(prompt, BeamSearchParams(4, max_tokens=10))
        ends |= {outputs[0][0][7], outputs[3][0][3]}
    return tuple(ends)


def make_engine(stop_ids, num_blocks, **options):
    model = load_model(TINY / "llama", "float32")[0]
    model.eos_token_ids = stop_ids
    sizes = dict(max_num_seqs=12, max_num_batched_tokens=24, num_rows=30, block_size=4)
    sizes |= dict(max_beam_width=8, widths=(24,))
    return engines.make_engine(model, num_blocks, MAX_LEN, **(sizes | options))


@pytest.fixture(scope="module")
def engine(stop_ids):
    return make_engine(stop_ids, 200)


@pytest.fixture(scope="module")
def small(stop_ids):
    """Too few blocks for two groups together, and prefixes are found again."""
    return make_engine(
        stop_ids,
        21,
        max_num_batched_tokens=13,
        max_num_seqs=9,
        widths=(13,),
        enable_prefix_caching=True,
    )


def run(engine, requests):
    """Outputs of each as (tokens, log-probabilities, reason)."""
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    got = {request_id: {} for request_id in ids}
    while engine.has_unfinished():
        for u in news(engine, 1):
            tokens, logprobs, _ = got[u.request_id].get(u.index, ([], [], None))
            got[u.request_id][u.index] = (
                tokens + u.token_ids,
                logprobs + u.logprobs,
                u.finish_reason,
            )
        assert check_integrity(engine.state) == []
    assert len(free_queue(engine.state.cache.pool)) == engine.config.num_blocks - 1
    return [
        [outputs[k] for k in sorted(outputs)] for outputs in (got[request_id] for request_id in ids)
    ]


def assert_equal(got, want):
    assert [(tokens, reason) for tokens, _, reason in got] == [
        (tokens, reason) for tokens, _, _, reason in want
    ]
    for (_, logprobs, _), (_, expected, _, _) in zip(got, want, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


POLICIES = [
    dict(),
    dict(early_stopping=True),
    dict(early_stopping="never", length_penalty=2.0),
    dict(length_penalty=0.0),
    dict(length_penalty=-1.0, ignore_eos=True),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_outputs_are_those_of_a_plain_search(engine, stop_ids, width, policy):
    params = BeamSearchParams(width, max_tokens=10, **policy)
    ends = () if params.ignore_eos else stop_ids
    for prompt in PROMPTS[:3]:
        (got,) = run(engine, [(prompt, params)])
        assert_equal(got, plain(prompt, params, ends))


def test_stops_were_among_them(stop_ids):
    """What the test above is about."""
    reasons = {
        reason
        for p in PROMPTS[:3]
        for *_, reason in plain(p, BeamSearchParams(4, max_tokens=10), stop_ids)
    }
    assert reasons == {"stop", "length"}


MIXED = [
    (PROMPTS[0], BeamSearchParams(4, max_tokens=10)),
    (PROMPTS[1], SamplingParams(temperature=0, max_tokens=12)),
    (PROMPTS[2], BeamSearchParams(3, max_tokens=8, early_stopping=True)),
    (PROMPTS[3], SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=9)),
    (PROMPTS[4], BeamSearchParams(2, max_tokens=14)),
]


@pytest.mark.parametrize("which", ["engine", "small"])
def test_beside_other_requests_and_under_preemption(request, engine, stop_ids, which):
    chosen = request.getfixturevalue(which)
    together = run(chosen, MIXED)
    for (prompt, params), got in zip(MIXED, together, strict=True):
        if isinstance(params, BeamSearchParams):
            assert_equal(got, plain(prompt, params, stop_ids))
        else:
            (alone,) = run(engine, [(prompt, params)])
            assert [tokens for tokens, *_ in got] == [tokens for tokens, *_ in alone]
    if which == "small":
        assert chosen.counters.preemptions > 0


def test_beams_over_sliding_windows():
    """Blocks that pass out of the window go back while beams share others; the second run finds the
    first one's prefixes.
    """
    model = load_model(TINY / "mistral-window", "float32")[0]
    assert any(window is not None and window < 16 for window in model.config.group_windows)
    sizes = dict(max_num_seqs=8, max_num_batched_tokens=13, num_rows=16, block_size=4)
    sizes |= dict(max_beam_width=4, enable_prefix_caching=True)
    engine = engines.make_engine(model, 34, MAX_LEN, widths=(13,), **sizes)
    requests = [(PROMPTS[3], BeamSearchParams(4, max_tokens=14, ignore_eos=True))]
    requests += [(PROMPTS[2], BeamSearchParams(3, max_tokens=9, ignore_eos=True))]
    requests += [(PROMPTS[0], SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))]
    for _ in range(2):
        got = run(engine, requests)
        for (prompt, params), outputs in zip(requests[:2], got, strict=False):
            assert_equal(outputs, plain(prompt, params, model=model))
        ((greedy, *_),) = got[2]
        assert (
            greedy == plain(requests[2][0], BeamSearchParams(1, max_tokens=14), model=model)[0][0]
        )


def test_a_search_goes_on_over_an_update_of_the_params_but_leaves_nothing_known(small, stop_ids):
    prompt, params = random_prompts(22, [12], vocab_size=256)[0], BeamSearchParams(3, max_tokens=8)
    request_id = small.add_request(prompt, params)
    small.run(4)
    small.update_params(small.params)
    outputs = {}
    while small.has_unfinished():
        for u in news(small, 1):
            assert u.request_id == request_id
            outputs[u.index] = (u.token_ids, u.logprobs, u.finish_reason)
        assert check_integrity(small.state) == []
    assert_equal([outputs[k] for k in sorted(outputs)], plain(prompt, params, stop_ids))
    small.add_request(prompt, SamplingParams(temperature=0, max_tokens=1))
    assert [u.num_cached_tokens for u in news(small, 4)] == [0], (
        "older params computed some of what is there"
    )


def test_width_one_is_greedy(engine):
    for prompt in PROMPTS:
        (((beam, *_),),) = run(engine, [(prompt, BeamSearchParams(1, max_tokens=12))])
        (((greedy, *_),),) = run(engine, [(prompt, SamplingParams(temperature=0, max_tokens=12))])
        assert beam == greedy


def test_a_prompt_is_computed_once_and_only_last_blocks_are_copied(engine):
    before = engine.counters
    run(engine, [(PROMPTS[2], BeamSearchParams(4, max_tokens=9, ignore_eos=True))])
    after = engine.counters
    assert after.computed_tokens - before.computed_tokens == len(PROMPTS[2]) + 4 * 8
    # 12 prompt tokens fill 3 blocks; in each of the 8 steps at most the four beams' last blocks.
    assert 0 < after.copied_blocks - before.copied_blocks <= 3 * 6


def test_an_aborted_group_leaves_nothing(engine):
    request_id = engine.add_request(PROMPTS[0], BeamSearchParams(4, max_tokens=10))
    engine.run(4)
    assert engine.abort(request_id)
    ended = [u for u in news(engine, 2) if u.finish_reason]
    assert sorted(u.index for u in ended) == [0, 1, 2, 3] and {u.finish_reason for u in ended} == {
        "abort"
    }
    assert len(free_queue(engine.state.cache.pool)) == engine.config.num_blocks - 1
    (got,) = run(engine, [(PROMPTS[0], BeamSearchParams(2, max_tokens=5, ignore_eos=True))])
    assert_equal(got, plain(PROMPTS[0], BeamSearchParams(2, max_tokens=5)))


def test_what_cannot_be_is_refused(engine, small):
    with pytest.raises(
        InvalidRequestError, match="beam_width=13: beams run together, at most max_num_seqs=12"
    ):
        engine.add_request([1, 2], BeamSearchParams(13))
    with pytest.raises(
        InvalidRequestError, match="beam_width=8: needs up to 72 blocks of 4, the pool has 20"
    ):
        small.add_request([1] * 20, BeamSearchParams(8, max_tokens=16))
    for options, says in (
        (dict(beam_width=0), "beam_width=0: must be at least 1"),
        (dict(beam_width=2, max_tokens=0), "max_tokens=0"),
        (dict(beam_width=2, length_penalty=float("nan")), "length_penalty=nan"),
        (dict(beam_width=2, early_stopping=1), "early_stopping=1: must be True, False or 'never'"),
        (dict(beam_width=2, ignore_eos=1), "ignore_eos=1"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            BeamSearchParams(**options)
