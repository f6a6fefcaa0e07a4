"""Logits that are no numbers, or leave nothing to choose, end their own request alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import engines
from engines import news
from paged_jax import (
    BeamSearchParams,
    InvalidRequestError,
    SamplingParams,
    check_integrity,
    generate,
)
from paged_jax.sampling.rows import init_sampling_rows
from paged_jax.sampling.sampler import sample
from paged_jax.scheduling.sequences import EMPTY, FINISHED, INVALID, LENGTH
from toy_decoder import ToyDecoder, random_prompts

WELL, NUM_BLOCKS = -1, 30
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=16, num_rows=6, block_size=4)


class SickDecoder(ToyDecoder):
    """Has `illness` for logits: everywhere (`when` 97), or where token `when` would come."""

    def __init__(self):
        super().__init__(max_model_len=40)
        self.when, self.illness = nnx.Param(jnp.int32(WELL)), nnx.Param(jnp.zeros(97))

    def logits(self, hidden):
        logits, when = super().logits(hidden), self.when[...]
        is_ill = (when == 97) | (hidden.astype(jnp.int32) == when)
        return jnp.where(is_ill, self.illness[...], logits)


MODEL = SickDecoder()
ILLNESSES = {
    "NaN": np.full(97, np.nan),
    "one NaN": np.where(np.arange(97) == 50, np.nan, 0),
    "inf": np.where(np.arange(97) == 50, np.inf, 0),
    "masked": np.full(97, -np.inf),
}
REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=6),
    "sampled": SamplingParams(seed=1, top_p=0.5, top_k=3, min_p=0.1, max_tokens=6),
    "samples": SamplingParams(seed=1, temperature=9.0, n=3, max_tokens=6, top_k=200),
    "one beam": BeamSearchParams(1, max_tokens=4),
    "beams": BeamSearchParams(3, max_tokens=4, early_stopping="never"),
    "two beams": BeamSearchParams(2, max_tokens=5, length_penalty=-1e5),
}


@pytest.fixture(scope="module")
def engine():
    return engines.make_engine(
        MODEL, NUM_BLOCKS, 40, enable_prefix_caching=True, max_beam_width=4, **SIZES
    )


def fall_ill(engine, when, illness):
    params = jax.tree.map(lambda x: x, engine.params)
    params["when"][...] = jnp.int32(when)
    params["illness"][...] = jnp.asarray(illness, jnp.float32)
    engine.update_params(params)


def serve(engine, requests):
    """Serve (prompt, params) pairs; tokens, logprobs and reason of each output."""
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    outputs = {}
    for _ in range(60):
        if not engine.has_unfinished():
            break
        for update in news(engine, 7):
            key = (ids.index(update.request_id), update.index)
            tokens, logprobs, _ = outputs.get(key, ([], [], None))
            outputs[key] = (
                tokens + update.token_ids,
                logprobs + update.logprobs,
                update.finish_reason,
            )
    assert not engine.has_unfinished(), "it never ends"
    assert int(engine.state.cache.pool.num_free) == NUM_BLOCKS - 1
    assert check_integrity(engine.state) == []
    return outputs


def all_requests(seed):
    return list(zip(random_prompts(seed, [5, 9, 7, 3, 6, 8]), REQUESTS.values(), strict=True))


@pytest.mark.parametrize("illness", ILLNESSES)
def test_every_kind_of_request_ends_as_invalid_and_the_next_are_as_ever(engine, illness):
    fall_ill(engine, WELL, 0)
    before = serve(engine, all_requests(1))
    assert {reason for _, _, reason in before.values()} == {"length"}
    fall_ill(engine, 97, ILLNESSES[illness])
    ill = serve(engine, all_requests(2))
    assert ill.keys() == before.keys()
    assert all(output == ([], [], "invalid") for output in ill.values())
    fall_ill(engine, WELL, 0)
    after = serve(engine, all_requests(1))
    assert after.keys() == before.keys()
    for key, (tokens, logprobs, reason) in before.items():
        assert after[key][0] == tokens and after[key][2] == reason
        np.testing.assert_allclose(after[key][1], logprobs, rtol=1e-6)


@pytest.mark.parametrize("illness", ILLNESSES)
def test_a_request_keeps_what_came_before_and_its_neighbours_all(engine, illness):
    prompts = random_prompts(3, [6, 4, 9])
    wholes = [MODEL.continuation(prompt, 12) for prompt in prompts]
    sick = next(
        t for t in wholes[0][3:] if all(wholes[0].index(t) >= 3 and t not in w for w in wholes[1:])
    )
    at = wholes[0].index(sick)
    fall_ill(engine, sick, ILLNESSES[illness])
    greedy = SamplingParams(temperature=0, max_tokens=12)
    outputs = serve(engine, [(prompt, greedy) for prompt in prompts])
    assert outputs[0, 0][0] == wholes[0][:at] and outputs[0, 0][2] == "invalid"
    for i in (1, 2):
        assert outputs[i, 0][0] == wholes[i] and outputs[i, 0][2] == "length"
    # In `generate`, too.
    width = max(map(len, prompts))
    padded = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    out = jax.jit(
        lambda params: generate(
            nnx.split(MODEL)[0],
            params,
            padded,
            [len(p) for p in prompts],
            jax.random.key(0),
            max_new_tokens=12,
            temperature=0.0,
            block_size=4,
        )
    )(engine.params)
    assert out.finish_reason[:, 0].tolist() == [INVALID, LENGTH, LENGTH]
    assert out.lengths[:, 0].tolist() == [at, 12, 12]
    assert out.tokens[0, 0, :at].tolist() == wholes[0][:at]
    assert out.tokens[1:, 0].tolist() == wholes[1:]


def poison(engine):
    """Overwrite everything that rows without a request still hold."""
    seqs = engine.state.seqs
    is_free = (seqs.status == EMPTY) | (seqs.status == FINISHED)
    assert bool(jnp.all(is_free))
    keep = (seqs.status, seqs.running, seqs.waiting)

    def ruin(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, jnp.nan)
        return jnp.full_like(x, True if x.dtype == bool else 2**29 + 7)

    rows = {
        f: getattr(seqs, f)
        for f in (
            "tokens",
            "logprobs",
            "num_prompt_tokens",
            "num_tokens",
            "num_computed",
            "num_hit",
            "num_cached",
            "root",
            "max_len",
            "finish_reason",
            "sampling",
            "beams",
        )
    }
    ruined = jax.tree.map(ruin, rows)
    leader = jnp.full_like(seqs.beams.leader, seqs.num_rows)
    ruined["beams"] = ruined["beams"].replace(leader=leader)
    seqs = seqs.replace(**ruined)
    assert keep == (seqs.status, seqs.running, seqs.waiting)
    engine.state = engine.state.replace(seqs=seqs)


def test_nothing_of_a_finished_row_is_read_by_the_next(engine):
    """Whatever the rows held before, requests come out the same."""
    fall_ill(engine, WELL, 0)
    clean = serve(engine, all_requests(4))
    for _ in range(2):
        poison(engine)
        engine.reset_prefix_cache()
        outputs = serve(engine, all_requests(4))
        assert outputs.keys() == clean.keys()
        for key, (tokens, logprobs, reason) in clean.items():
            assert outputs[key][0] == tokens and outputs[key][2] == reason
            np.testing.assert_allclose(outputs[key][1], logprobs, rtol=1e-6)


def test_a_row_of_which_all_tokens_are_masked_has_no_log_probability():
    """min_tokens masks the stop ids: where the model masks the rest, nothing is left."""
    rows = init_sampling_rows(4, 4)
    rows = rows.replace(
        min_len=jnp.array([9, 9, 0, 9]),
        stop_ids=jnp.array([[0, 1, 2, 3]] * 3 + [[0, -1, -1, -1]], jnp.int32),
    )
    logits = jnp.where(jnp.arange(8) < 4, 1.0, -jnp.inf) * jnp.ones((4, 1))
    for temperature in (0.0, 1.0):
        rows.parameters["temperature"] = jnp.full(4, temperature, jnp.float32)
        tokens, logprobs = sample(logits, rows, jnp.full(4, 5), jnp.ones(4, bool))
        assert jnp.isfinite(logprobs).tolist() == [False, False, True, True]
        assert 1 <= int(tokens[3]) <= 3


def test_what_can_leave_nothing_to_choose_is_refused():
    small = ToyDecoder(vocab_size=4)
    engine = engines.make_engine(small, 20, 40, **SIZES)
    stops = SamplingParams(temperature=0, max_tokens=6, min_tokens=3, stop_token_ids=[0, 1, 2, 3])
    with pytest.raises(InvalidRequestError, match="min_tokens=3: all 4 tokens"):
        engine.add_request([1, 2], stops)
    engine.eos_token_ids = (3, 9)  # 9 is no token
    rest = SamplingParams(temperature=0, max_tokens=6, min_tokens=3, stop_token_ids=[0, 1, 2])
    with pytest.raises(InvalidRequestError, match="min_tokens=3: all 4 tokens"):
        engine.add_request([1, 2], rest)
    fewer = SamplingParams(temperature=0, max_tokens=6, min_tokens=3, stop_token_ids=[0, 2])
    request_id = engine.add_request([1, 2], fewer)
    (update,) = [u for u in news(engine) if u.request_id == request_id]
    assert set(update.token_ids[:3]) == {1} and update.finish_reason in ("stop", "length")
