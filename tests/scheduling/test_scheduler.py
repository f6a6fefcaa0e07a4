"""Who runs, who waits and who gives way: the scheduler's rules by their numbers, on an engine with
ten blocks of sixteen.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from engines import make_engine, news
from paged_jax import EngineConfig, InvalidRequestError, SamplingParams, check_integrity
from paged_jax.cache.block_pool import free_queue
from paged_jax.engine.requests import Output, make_request, to_rows
from paged_jax.engine.step import init_state
from paged_jax.scheduling import sequences
from paged_jax.scheduling.scheduler import schedule
from paged_jax.scheduling.waiting import waiting_rows
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder(max_model_len=128)
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=160, num_rows=8)


@pytest.fixture
def engine():
    """Ten blocks; every test leaves it with all of them free."""
    engine = make_engine(MODEL, 11, 128, **SIZES)
    yield engine
    finish(engine)
    assert len(free_queue(engine.state.cache.pool)) == 10


def add(engine, length, max_tokens, **options):
    """A request's id and prompt."""
    (prompt,) = random_prompts(length, [length])
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    return engine.add_request(prompt, params), prompt


def finish(engine):
    ended = {}
    while engine.has_unfinished():
        for update in news(engine, 1):
            tokens, _ = ended.get(update.request_id, ([], None))
            ended[update.request_id] = tokens + update.token_ids, update.finish_reason
    return ended


def running(engine):
    seqs = engine.state.seqs
    return seqs.running[: int(seqs.num_running)].tolist()


def waiting(engine):
    seqs = engine.state.seqs
    return waiting_rows(seqs.waiting)


def table(engine, row):
    tables = engine.state.cache.tables
    return tables.blocks[0, row, : int(tables.num_blocks[0, row])].tolist()


# ---------------------------------------------------------------- admission


def scheduled(lengths, *, budget, max_running):
    """The first step's plan for prompts of these lengths: running rows, their tokens and blocks,
    and how many rows wait.
    """
    config = EngineConfig(
        200, 1000, max_num_seqs=max_running, max_num_batched_tokens=budget, num_rows=6
    )
    state = init_state(config, ToyDecoder(max_model_len=1000))
    make = partial(
        make_request, config=config, cache_config=state.cache.config, vocab_size=9, eos_token_ids=()
    )
    requests = {
        row: Output(make("", [1] * length, SamplingParams()), 0)
        for row, length in enumerate(lengths)
    }
    seqs = jax.jit(sequences.add)(state.seqs, to_rows(requests, config))
    plan, _ = jax.jit(schedule)(state.cache, seqs, jnp.int32(budget))
    count = int(plan.seqs.num_running)
    rows = plan.seqs.running[:count]
    return (
        rows.tolist(),
        plan.take[:count].tolist(),
        plan.cache.tables.num_blocks[0, rows].tolist(),
        int(plan.seqs.waiting.count),
    )


def test_a_prompt_cut_by_the_budget_has_its_blocks_whole_and_lets_none_overtake_it():
    assert scheduled([800, 800, 10, 10], budget=1024, max_running=3) == (
        [0, 1],
        [800, 224],
        [50, 50],
        2,
    )


def test_no_more_run_than_may_run_at_once(engine):
    ids = [add(engine, 16, 3)[0] for _ in range(6)]
    engine.step()
    assert running(engine) == [0, 1, 2, 3] and waiting(engine) == [4, 5]
    assert [table(engine, row) for row in range(6)] == [[1], [2], [3], [4], [], []]
    assert set(finish(engine)) == set(ids)


def test_a_big_prompt_waits_at_the_head_and_holds_up_those_behind_it(engine):
    add(engine, 112, 4)  # seven blocks, and an eighth for its second token
    add(engine, 80, 4)  # five
    add(engine, 10, 4)  # one, but not before the one before
    engine.step()
    assert running(engine) == [0] and waiting(engine) == [1, 2]
    for _ in range(3):
        engine.step()
    assert running(engine) == [] and waiting(engine) == [1, 2]  # the first has ended
    engine.step()
    assert running(engine) == [1, 2] and waiting(engine) == []


def test_a_request_that_could_never_fit_is_refused_and_holds_up_nobody(engine):
    other = make_engine(MODEL, 5, 128, **SIZES)
    with pytest.raises(InvalidRequestError, match="needs up to 5 blocks of 16, the pool has 4"):
        add(other, 60, 6)  # 65 tokens are computed
    add(other, 60, 5)  # 64
    assert other.has_unfinished()


# ---------------------------------------------------------------- preemption


def test_the_last_gives_way_when_the_first_needs_its_sixth_block_and_resumes_with_all_its_tokens(
    engine,
):
    a, b = add(engine, 80, 20)[1], add(engine, 80, 10)[1]
    engine.step()
    assert [table(engine, row) for row in (0, 1)] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    engine.step()
    seqs = engine.state.seqs
    assert running(engine) == [0] and waiting(engine) == [1]
    assert table(engine, 0) == [1, 2, 3, 4, 5, 10] and table(engine, 1) == []
    assert (int(seqs.status[1]), int(seqs.num_computed[1]), int(seqs.num_tokens[1])) == (
        sequences.WAITING,
        0,
        81,
    )
    assert int(engine.state.counters.preemptions) == 1
    for _ in range(17):
        engine.step()
        assert running(engine) == [0]
    assert table(engine, 0) == [1, 2, 3, 4, 5, 10, 9]
    engine.step()  # the first ends with its twentieth token
    assert running(engine) == [] and free_queue(engine.state.cache.pool) == [
        9,
        10,
        5,
        4,
        3,
        2,
        1,
        8,
        7,
        6,
    ]
    before = int(engine.state.counters.computed_tokens)
    engine.step()
    assert running(engine) == [1] and table(engine, 1) == [9, 10, 5, 4, 3, 2]
    assert int(engine.state.counters.computed_tokens) - before == 81
    finish(engine)
    tokens = engine.state.seqs.tokens
    assert tokens[0, 80:100].tolist() == MODEL.continuation(a, 20)
    assert tokens[1, 80:90].tolist() == MODEL.continuation(b, 10)
    assert int(engine.state.counters.preemptions) == 1


def test_the_preempted_stands_before_those_that_waited_already(engine):
    for length in (80, 79, 16):  # 5 + 5 blocks; the third finds none
        add(engine, length, 8)
    engine.step()
    assert running(engine) == [0, 1] and waiting(engine) == [2]
    engine.step()
    assert running(engine) == [0] and waiting(engine) == [
        1,
        2,
    ]  # and none is admitted in the step that preempts
    for _ in range(5):
        engine.step()
        assert waiting(engine) == [1, 2]  # the third would fit, but waits for the second
    assert free_queue(engine.state.cache.pool) == [9, 8, 7, 6]
    engine.step()
    engine.step()
    assert running(engine) == [1, 2]


def test_several_give_way_at_once_the_last_first(engine):
    for length in (48, 48, 32, 32):  # 3 + 3 + 2 + 2 blocks, all full: the next step needs four more
        add(engine, length, 40 if length == 48 else 3)
    engine.step()
    assert running(engine) == [0, 1, 2, 3] and free_queue(engine.state.cache.pool) == []
    engine.step()
    # Three need three blocks, two come back with the fourth row; then the third's two as well.
    assert running(engine) == [0, 1] and waiting(engine) == [2, 3]
    assert [table(engine, row) for row in (0, 1)] == [[1, 2, 3, 8], [4, 5, 6, 7]]
    assert free_queue(engine.state.cache.pool) == [10, 9]
    assert check_integrity(engine.state) == []


# ---------------------------------------------------------------- endings


def test_rows_that_end_in_one_step_give_all_blocks_back_in_running_order(engine):
    ids = [add(engine, length, 1)[0] for length in (16, 20, 7, 40)]
    assert [(u.request_id, u.finish_reason, len(u.token_ids)) for u in news(engine, 1)] == [
        (i, "length", 1) for i in ids
    ]
    assert running(engine) == [] and not engine.has_unfinished()
    assert free_queue(engine.state.cache.pool) == [7, 6, 5, 4, 3, 2, 1, 8, 9, 10]


def test_max_model_len_ends_a_row(engine):
    _, prompt = add(engine, 126, None)
    assert [update.finish_reason for update in news(engine, 1)] == [None]
    (update,) = news(engine, 1)
    assert update.finish_reason == "length"
    assert engine.state.seqs.tokens[0, 126:].tolist() == MODEL.continuation(prompt, 2)


def test_max_tokens_ends_a_row(engine):
    request_id, prompt = add(engine, 9, 2)
    assert finish(engine) == {request_id: (MODEL.continuation(prompt, 2), "length")}


def test_a_stop_id_ends_a_row_also_as_its_last_token(engine):
    (prompt,) = random_prompts(9, [9])
    whole = MODEL.continuation(prompt, 10)
    at = max(k for k in range(8) if whole[k] not in whole[:k])
    for max_tokens in (10, at + 1):
        request_id, _ = add(engine, 9, max_tokens, stop_token_ids=[whole[at]])
        assert finish(engine) == {request_id: (whole[: at + 1], "stop")}


def test_a_row_does_not_end_before_its_least_length(engine):
    (prompt,) = random_prompts(9, [9])
    stop = MODEL.continuation(prompt, 1)[0]
    below = stop - 1 if stop > 0 else 1  # the toy's next best
    request_id, _ = add(engine, 9, 20, stop_token_ids=[stop], min_tokens=1)
    tokens, _ = finish(engine)[request_id]
    assert tokens[0] == below and tokens[1] == MODEL.next_token([*prompt, below])
    # Of two stop ids the second comes once the least length is reached, not a token later.
    request_id, _ = add(engine, 9, 20, stop_token_ids=[stop, tokens[1]], min_tokens=1)
    assert finish(engine)[request_id] == (tokens[:2], "stop")
    request_id, _ = add(engine, 9, 20, stop_token_ids=[stop, tokens[1]], min_tokens=2)
    assert finish(engine)[request_id][0][1] != tokens[1]
