"""Tokens that Hugging Face transformers made in float32, through the whole engine."""

import json
import pathlib

import numpy as np
import pytest

from engines import make_engine, news
from paged_jax import LLM, SamplingParams
from paged_jax.models import ModelLoadError, load_model

DATA = pathlib.Path(__file__).parent / "data"
TINY = sorted(path.name for path in (DATA / "tiny").iterdir())


@pytest.mark.slow
def test_smollm2_gives_every_recorded_token_in_chunks_and_under_preemption(record_property):
    rows = json.loads((DATA / "smollm2-greedy.json").read_text())["rows"]
    try:
        # 57 blocks: the longest prompt alone takes 53. 64 tokens a step: it is prefilled in 14
        # chunks.
        llm = LLM(
            "smollm2-135m",
            num_blocks=58,
            max_model_len=1024,
            max_num_seqs=24,
            max_num_batched_tokens=64,
        )
    except ModelLoadError as error:
        pytest.skip(str(error))
    params = [SamplingParams(temperature=0, max_tokens=row["max_tokens"]) for row in rows]
    tokens = [row["prompt_token_ids"] for row in rows]
    outputs = llm.generate(tokens, params, progress=False)
    worst = 0.0
    for row, output in zip(rows, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == row["token_ids"]
        assert completion.finish_reason == row["finish"]
        worst = max(worst, float(np.abs(np.subtract(completion.logprobs, row["logprobs"])).max()))
        assert llm.tokenizer is not None
        assert completion.text == llm.tokenizer.decode(row["token_ids"])
    assert worst < 1e-3
    assert llm.stats()["preemptions"] >= 2
    record_property(
        "measured", f"SmolLM2: log-probabilities within {worst:.1e} of transformers; {llm.stats()}"
    )
    # As messages and as a stream the same prompt gives the same.
    chat = next(row for row in rows if row["kind"] == "chat")
    question = chat["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    answered = llm.chat([{"role": "user", "content": question}], greedy, progress=False)
    assert answered[0].prompt_token_ids == chat["prompt_token_ids"]
    assert answered[0].outputs[0].token_ids == chat["token_ids"][:8]
    # A second turn finds the first one's blocks, those of its answer too.
    question = "Write a short story about a lost key."
    longer = SamplingParams(temperature=0, max_tokens=40)
    first = llm.chat([{"role": "user", "content": question}], longer, progress=False)[0]
    turns = [
        ("user", question),
        ("assistant", first.outputs[0].text),
        ("user", "Say that in other words."),
    ]
    second = llm.chat(
        [dict(role=role, content=text) for role, text in turns], greedy, progress=False
    )[0]
    length = len(first.prompt_token_ids) + len(first.outputs[0].token_ids)
    assert (
        second.prompt_token_ids[: length - 1]
        == (first.prompt_token_ids + first.outputs[0].token_ids)[:-1]
    )
    assert second.num_cached_tokens == (length - 1) // 16 * 16 > len(first.prompt_token_ids)
    streamed = list(llm.stream(chat["prompt_token_ids"], greedy))
    assert [token for delta in streamed for token in delta.token_ids] == chat["token_ids"][:8]
    assert "".join(delta.text or "" for delta in streamed) == answered[0].outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_checkpoint_gives_its_recorded_tokens_through_the_engine(name):
    model, _ = load_model(DATA / "tiny" / name, "float32")
    expected = np.load(DATA / "tiny" / name / "expected.npz")
    # The tool that recorded the greedy tokens took id 0 for padding: it neither saw nor counted
    # those.
    prompt = expected["input_ids"][0]
    prompt = prompt[prompt != 0].tolist()
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=16, block_size=4)
    engine = make_engine(model, 40, 64, widths=(16,), **sizes)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    ids = [engine.add_request(prompt, params), engine.add_request(prompt[:7], params)]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for update in news(engine, 32):
            tokens[update.request_id] += update.token_ids
    assert tokens[ids[0]] == expected["greedy"].tolist()
