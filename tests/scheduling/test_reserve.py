"""Admission leaves what running rows will soon need, in all groups, and the watermark."""

import random

import pytest

from engines import make_engine, news
from paged_jax import (
    BeamSearchParams,
    ConfigError,
    EngineConfig,
    SamplingParams,
    check_integrity,
)
from toy_decoder import ToyDecoder, random_prompts


def serve(engine, requests):
    """Serve (prompt, number of tokens) pairs; computed tokens and preemptions."""
    before = engine.counters
    ids = [
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count))
        for prompt, count in requests
    ]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for update in news(engine, 9):
            tokens[update.request_id] += update.token_ids
    after = engine.counters
    assert check_integrity(engine.state) == []
    counts = [
        int(getattr(after, name)) - (int(getattr(before, name)) if before else 0)
        for name in ("computed_tokens", "preemptions", "peak_running")
    ]
    return list(tokens.values()), counts


def test_two_windows_that_do_not_fit_together_run_one_after_the_other():
    """They computed 167 tokens for 111, with 4 preemptions."""
    model = ToyDecoder(windows=(8,))
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=8, num_rows=4, block_size=4)
    engine = make_engine(model, 8, 64, **sizes)
    prompts = random_prompts(5, [40, 33])
    tokens, (computed, preemptions, _) = serve(engine, [(prompt, 20) for prompt in prompts])
    assert tokens == [model.continuation(prompt, 20) for prompt in prompts]
    assert (computed, preemptions) == (40 + 33 + 2 * 19, 0)


@pytest.mark.parametrize(("windows", "num_blocks"), [((8,), 9), ((5, 13), 19)])
def test_rows_that_fill_their_windows_are_never_preempted(windows, num_blocks):
    """What such a row may hold at once is bounded, and that much is there for it. (One that grows
    into its windows may be, like one of full attention: the watermark is for them.)
    """
    model, draw = ToyDecoder(windows=windows), random.Random(0)
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=8, num_rows=6, block_size=4)
    engine = make_engine(model, num_blocks, 64, **sizes)
    for seed in range(6):
        lengths = [draw.randint(18, 40) for _ in range(7)]
        prompts = random_prompts(seed, lengths)
        requests = [(prompt, draw.randint(1, 64 - len(prompt))) for prompt in prompts]
        tokens, (computed, preemptions, _) = serve(engine, requests)
        assert tokens == [model.continuation(prompt, count) for prompt, count in requests]
        assert computed == sum(len(prompt) + count - 1 for prompt, count in requests)
        assert preemptions == 0 and engine.counters.peak_running >= 2


@pytest.mark.parametrize(("first", "beside"), [(85, True), (86, False)])
def test_the_watermark_stays_free_while_others_run(first, beside):
    """A tenth of 101 blocks: beside 85 blocks one of 5 starts, beside 86 it waits."""
    model = ToyDecoder(max_model_len=400)
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=400, num_rows=4, block_size=4)
    engine = make_engine(model, 101, 400, watermark=0.1, **sizes)
    prompts = random_prompts(0, [4 * first, 20])
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    assert int(engine.state.seqs.num_running) == 1 + beside
    while engine.has_unfinished():
        news(engine, 5)
    # Alone, a row may have all of them.
    whole = random_prompts(1, [398])
    tokens, _ = serve(engine, [(whole[0], 2)])
    assert tokens == [model.continuation(whole[0], 2)]


def test_a_watermark_keeps_growing_rows_from_preempting_each_other():
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, num_rows=6, block_size=4)
    model, requests = ToyDecoder(), [(prompt, 10) for prompt in random_prompts(2, [15] * 5)]
    counts = []
    for watermark in (0.0, 0.4):
        engine = make_engine(model, 17, 64, watermark=watermark, **sizes)
        tokens, (_, preemptions, _) = serve(engine, requests)
        assert tokens == [model.continuation(prompt, count) for prompt, count in requests]
        counts.append(preemptions)
    assert counts[0] > counts[1] == 0


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "budget"), [(12, 0.8, 16), (30, 1.0, 16), (14, 0.15, 64)]
)
def test_a_beam_group_is_charged_the_watermark_once(num_blocks, watermark, budget):
    """Its leader runs when its followers start: they are not kept out, and it is not split."""
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=budget, num_rows=8, block_size=4)
    engine = make_engine(ToyDecoder(), num_blocks, 40, watermark=watermark, **sizes)
    engine.add_request([1] * 27, SamplingParams(temperature=0, max_tokens=8))
    engine.add_request([2] * 12, BeamSearchParams(2 if budget == 16 else 3, max_tokens=4))
    updates = [update for _ in range(12) for update in news(engine)]
    assert {update.finish_reason for update in updates} == {"length"}
    assert not engine.has_unfinished() and check_integrity(engine.state) == []


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("wrong", [-0.1, 1.1, "a", None, float("nan")])
def test_a_watermark_is_a_share(wrong):
    with pytest.raises(ConfigError, match="watermark="):
        EngineConfig(30, 40, 2, 9, watermark=wrong)
