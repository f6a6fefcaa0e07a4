"""Updates wait for their own reader, whoever ran the engine."""

import pytest

import engines
from engines import news
from paged_jax import BeamSearchParams, InvalidRequestError, SamplingParams
from paged_jax.engine.mailbox import empty_mailbox, file, take
from paged_jax.engine.report import Update
from toy_decoder import ToyDecoder, random_prompts

MODEL = ToyDecoder()


@pytest.fixture
def engine():
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, num_rows=6, block_size=4)
    return engines.make_engine(MODEL, 30, 40, **sizes)


def test_updates_of_one_output_are_joined_until_they_are_taken():
    mailbox = empty_mailbox(2, num_prompt_tokens=3)
    mailbox = file(mailbox, [Update("a", [5, 6], [-1.0, -2.0])])
    mailbox = file(
        mailbox,
        [Update("a", [7], [-3.0], "stop", 7), Update("a", [1], [-4.0], index=1)],
    )
    assert mailbox.num_seen == (6, 4) and mailbox.has_ended == (True, False)
    mailbox, updates = take(mailbox)
    assert updates == [
        Update("a", [5, 6, 7], [-1.0, -2.0, -3.0], "stop", 7),
        Update("a", [1], [-4.0], index=1),
    ]
    assert take(mailbox) == (mailbox, []) and mailbox.num_seen == (6, 4)


def test_several_readers_each_get_all_of_their_own(engine):
    """Three readers run the engine in turn, each by other steps, and read at other times."""
    prompts = random_prompts(0, [3, 9, 5])
    greedy = SamplingParams(temperature=0, max_tokens=20)
    ids = [engine.add_request(prompt, greedy) for prompt in prompts]
    tokens = {request_id: [] for request_id in ids}
    for turn in range(60):
        if not engine.has_unfinished():
            break
        reader = turn % 3
        (engine.step, lambda: engine.run(3), engine.advance)[reader]()
        if turn % 2 == 0 and not engine.is_finished(ids[reader]):
            for update in engine.take(ids[reader]):
                tokens[update.request_id] += update.token_ids
    engine.collect_all()
    for request_id, prompt in zip(ids, prompts, strict=True):
        for update in engine.take(request_id):
            tokens[request_id] += update.token_ids
        assert tokens[request_id] == MODEL.continuation(prompt, 20)


def test_run_says_who_has_updates_and_keeps_them(engine):
    greedy = SamplingParams(temperature=0, max_tokens=2)
    ids = [engine.add_request(prompt, greedy) for prompt in random_prompts(1, [3, 4])]
    assert sorted(engine.run(1)) == sorted(ids) == sorted(engine.run(8))
    assert not engine.has_unfinished() and engine.run(1) == engine.run(1)
    for request_id in ids:
        (update,) = engine.take(request_id)
        assert len(update.token_ids) == 2 and update.finish_reason == "length"
        with pytest.raises(InvalidRequestError, match="is not in use"):
            engine.take(request_id)
    assert engine.run(1) == []


def test_an_aborted_search_has_one_last_update_for_each_output(engine):
    request_id = engine.add_request([1, 2, 3], BeamSearchParams(2, max_tokens=9))
    engine.run(2)
    assert engine.abort(request_id)
    assert [u.finish_reason for u in news(engine)] == ["abort", "abort"]


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("wrong", [0, -1, 1.5, None, "a"])
def test_steps_are_counted_in_ints_above_zero(engine, wrong):
    for run in (engine.run, engine.advance):
        with pytest.raises(InvalidRequestError, match="max_steps="):
            run(wrong)
    with pytest.raises(InvalidRequestError, match="request_id="):
        engine.is_finished([wrong])
