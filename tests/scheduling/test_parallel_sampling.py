"""Several outputs of one prompt: the prompt is computed once, its blocks are shared, and each
output is its own.
"""

import pytest

import engines
from engines import news
from paged_jax import InvalidRequestError, SamplingParams, check_integrity
from paged_jax.cache.block_pool import free_queue
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder(max_model_len=400)


def make_engine(num_blocks=60, model=MODEL, **options):
    sizes = dict(max_model_len=64, max_num_seqs=6, max_num_batched_tokens=16, num_rows=10)
    sizes |= dict(block_size=4, widths=(16,))
    return engines.make_engine(model, num_blocks, **(sizes | options))


def outputs(engine, *requests, each_step=None):
    """Tokens by request and index; the state is sound after every step."""
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    tokens = {}
    while engine.has_unfinished():
        for update in news(engine, 1):
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        assert check_integrity(engine.state) == []
        if each_step is not None:
            each_step(engine)
    return [
        [tokens[request_id, k] for k in range(params.n)]
        for request_id, (_, params) in zip(ids, requests, strict=True)
    ]


def sampling(n, seed=1, max_tokens=10, temperature=30.0):
    return SamplingParams(n=n, seed=seed, max_tokens=max_tokens, temperature=temperature)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def over_windows():
    """Engines of a model with full and sliding-window layers: a whole prompt a step, and in chunks
    without and with caching.
    """
    model = ToyDecoder(windows=(None, 5), max_model_len=64)
    whole = make_engine(120, model, max_num_batched_tokens=40, widths=(40,))
    return whole, make_engine(120, model), make_engine(120, model, enable_prefix_caching=True)


def test_outputs_differ_repeat_and_the_first_is_that_of_a_single_request(engine):
    (prompt,) = random_prompts(1, [13])
    ((alone,),) = outputs(engine, (prompt, sampling(1)))
    (several,) = outputs(engine, (prompt, sampling(4)))
    (again,) = outputs(engine, (prompt, sampling(4)))
    assert several[0] == alone and several == again
    assert len({tuple(tokens) for tokens in several}) == 4
    assert all(len(tokens) == 10 for tokens in several)


@pytest.mark.parametrize("length", [1, 4, 13, 16, 40])
def test_the_prompt_is_computed_once_and_its_blocks_are_shared(engine, length):
    before = engine.counters
    (prompt,) = random_prompts(length, [length])
    outputs(engine, (prompt, sampling(4, max_tokens=6)))
    after = engine.counters
    spent = after.computed_tokens - (before.computed_tokens if before else 0)
    # Each of the others computes the last token of the prompt for its own first token; the last
    # token of all is never computed.
    assert spent == length + 3 + 4 * 5
    copied = after.copied_blocks - (before.copied_blocks if before else 0)
    assert copied == (3 if length % 4 else 0)
    assert len(free_queue(engine.state.cache.pool)) == 59


def test_blocks_at_peak_are_the_shared_prompt_and_each_outputs_own_rest():
    engine = make_engine(
        100,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=16,
        widths=(64,),
    )
    (prompt,) = random_prompts(3, [250])
    engine.add_request(prompt, sampling(8, max_tokens=64))
    while engine.has_unfinished():
        engine.run(8)
    ideal = 250 // 16 + 8 * (-(-(250 + 63) // 16) - 250 // 16)
    assert engine.counters is not None
    assert ideal <= engine.counters.peak_blocks <= ideal + 8


@pytest.mark.parametrize("num_blocks", [9, 20])
def test_a_small_pool_and_few_places_give_the_same_outputs(engine, num_blocks):
    """Children are preempted and resumed on their own, and wait as ordinary rows where the parent
    has ended before they start.
    """
    requests = [
        (p, sampling(n, seed=i))
        for i, (p, n) in enumerate(zip(random_prompts(5, [9, 14, 3]), [4, 3, 2], strict=True))
    ]
    expected = [outputs(engine, request)[0] for request in requests]
    small = make_engine(num_blocks, max_num_seqs=3, max_num_batched_tokens=9, widths=(9,))
    assert outputs(small, *requests) == expected
    assert small.counters is not None
    assert (small.counters.preemptions > 0) == (num_blocks < 20)


def test_a_window_that_has_passed_the_prompt_makes_a_late_child_start_by_itself(over_windows):
    _, wide, _ = over_windows
    narrow = make_engine(80, ToyDecoder(windows=(None, 5), max_model_len=64), max_num_seqs=2)
    (prompt,) = random_prompts(6, [11])
    request = (prompt, sampling(5, max_tokens=14))
    assert outputs(narrow, request) == outputs(wide, request)


@pytest.mark.parametrize("length", [37, 38, 40])
def test_a_window_and_a_prompt_in_chunks(over_windows, length):
    """Who shares a prompt whose last chunk is of this step must find the blocks of that chunk too,
    in every group.
    """
    (prompt,) = random_prompts(length, [length])
    request = (prompt, sampling(3, max_tokens=6))
    whole, *chunked = over_windows
    for engine in chunked:
        assert outputs(engine, request) == outputs(whole, request)


def test_aborting_a_request_ends_all_its_outputs(engine):
    (prompt,) = random_prompts(7, [6])
    request_id = engine.add_request(prompt, sampling(8, max_tokens=30))
    engine.run(4)
    assert engine.abort(request_id)
    ended = [u for u in news(engine, 2) if u.finish_reason]
    assert sorted(u.index for u in ended) == list(range(8)) and {
        u.finish_reason for u in ended
    } == {"abort"}
    assert not engine.has_unfinished() and len(free_queue(engine.state.cache.pool)) == 59


def test_a_row_reused_while_a_child_waits_is_nobodys_parent(engine):
    """The first output ends at once; its row goes to another request before the last output has
    started.
    """
    narrow = make_engine(60, max_num_seqs=1, num_rows=2)
    first, second = random_prompts(8, [7, 9])
    requests = [(first, sampling(2, max_tokens=1)), (second, sampling(1, seed=5, max_tokens=9))]
    assert outputs(narrow, *requests) == [outputs(engine, request)[0] for request in requests]


def test_what_cannot_be_is_refused(engine):
    with pytest.raises(InvalidRequestError, match="n=2: greedy outputs would all be equal"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidRequestError, match="n=0: must be at least 1"):
        SamplingParams(n=0)
    with pytest.raises(InvalidRequestError, match="n=11: at most num_rows=10"):
        engine.add_request([1, 2], sampling(11))
