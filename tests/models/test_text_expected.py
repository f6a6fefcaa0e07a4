"""Tokenizers and templates against what transformers made of them, see `make_expected`."""

import json

import pytest

from paged_jax.models import Detokenizer
from paged_jax.models.chat_template import render
from paged_jax.models.hf_tokenizer import read_tokenizer
from run_model import DATA
from text_cases import (
    BROKEN,
    CHAT,
    DIRECTORIES,
    TEMPLATES,
    TEXTS,
    VARIABLES,
    id_lists,
    write_directory,
)


def stored(name):
    return json.loads((DATA / "variants" / name).read_text(encoding="utf-8"))


RESULTS, PROMPTS = stored("tokenizers.json"), stored("templates.json")


@pytest.fixture
def tokenizer(request, tmp_path):
    write_directory(request.param, tmp_path)
    made = read_tokenizer(tmp_path)
    assert made is not None
    return made, RESULTS[request.param]


each_directory = pytest.mark.parametrize("tokenizer", DIRECTORIES, indirect=True)


@each_directory
def test_texts_have_the_ids_that_transformers_gives(tokenizer):
    ours, theirs = tokenizer
    assert ours.vocab_size == theirs["size"]
    assert [ours.encode(text) for text in TEXTS] == theirs["encoded"]
    assert [ours.encode(text, add_special_tokens=False) for text in TEXTS] == theirs["bare"]


@each_directory
def test_special_tokens_are_those_of_transformers(tokenizer):
    ours, theirs = tokenizer
    extra = {"additional_special_tokens"}  # transformers 4 gave them to templates
    roles = {k: v for k, v in ours.special_tokens.items() if k not in extra}
    assert roles.items() >= theirs["roles"].items()
    assert {k for k in roles if k not in theirs["roles"]} <= {"image_token"}
    assert [ours.bos_token_id, ours.eos_token_id] == theirs["ids"]


@each_directory
def test_ids_have_the_text_that_transformers_gives(tokenizer):
    """Whole, and one by one. Bytes that are no text are counted in other ways, and left out."""
    ours, theirs = tokenizer
    lists = [*id_lists(theirs["size"]), *theirs["encoded"]]
    for ids, texts in zip(lists, theirs["decoded"], strict=True):
        for skip, text in zip((True, False), texts, strict=True):
            got = ours.decode(ids, skip_special_tokens=skip)
            stream = Detokenizer(ours, skip_special_tokens=skip)
            assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == got
            if "\ufffd" not in text:
                assert got == text, [ours.backend.id_to_token(i) for i in ids]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_the_prompt_that_transformers_gives(name):
    assert render(TEMPLATES[name], CHAT, tools=None, documents=None, **VARIABLES) == PROMPTS[name]


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_a_template_raises_is_one_kind_of_error(name):
    with pytest.raises(ValueError, match=r"the chat template failed: ."):
        render(BROKEN[name], CHAT, **VARIABLES)
