"""The ids that end an answer: what the files state and the tokenizer's own, none unknown."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paged_jax.models import ModelLoadError, Tokenizer, load_model
from small_checkpoint import SIZES, tensors, write


def backend(size=40):
    """Tokens <0> to <39>, of which the last three are special."""
    made = Backend(models.BPE({f"<{i}>": i for i in range(size)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(f"<{i}>", special=True) for i in range(size - 3, size)])
    return made


def ids_of(directory, *, config=None, generation=None, eos_token=None, tokenizer=None):
    keys = {"model_type": "llama", **SIZES, **(config or {})}
    write(directory, keys, tensors(), generation=generation)
    if eos_token is not None:
        backend().save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    return load_model(directory, tokenizer=tokenizer)[0].eos_token_ids


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),  # Llama's class default 2 does not end an answer in transformers either
        ({"config": {"eos_token_id": None}}, ()),
        ({"config": {"eos_token_id": 5}}, (5,)),
        ({"config": {"eos_token_id": 5}, "generation": {"eos_token_id": [6, 7, 6]}}, (6, 7)),
        ({"config": {"eos_token_id": 5}, "generation": {"top_k": 5}}, (5,)),
        ({"config": {"eos_token_id": [5, 6]}, "eos_token": "<39>"}, (5, 6, 39)),
        ({"generation": {"eos_token_id": 39}, "eos_token": "<39>"}, (39,)),
        ({"eos_token": "<38>"}, (38,)),
    ],
)
def test_ids_are_those_that_the_files_state_and_the_tokenizers_own(files, ids, tmp_path):
    assert ids_of(tmp_path, **files) == ids


def test_the_given_tokenizers_own_counts_instead(tmp_path):
    given = Tokenizer(backend(), special_tokens={"eos_token": "<37>"})
    config = {"eos_token_id": 5}
    assert ids_of(tmp_path, config=config, eos_token="<38>", tokenizer=given) == (5, 37)


@pytest.mark.parametrize("file", ["config", "generation"])
def test_ids_outside_the_vocabulary_are_dropped_with_a_warning(file, tmp_path):
    with pytest.warns(UserWarning, match=r"end-of-text ids \[64, -1\] are ignored.* has 64 ids"):
        assert ids_of(tmp_path, **{file: {"eos_token_id": [64, 63, -1]}}) == (63,)


def test_what_are_no_ids_is_refused(tmp_path):
    for wrong in ([[1]], [True], ["2"]):
        with pytest.raises(ModelLoadError, match=r"'eos_token_id' is .*, expected ids"):
            ids_of(tmp_path, config={"eos_token_id": wrong})


@pytest.mark.parametrize("content", ["{}", "no json", "[1]"])
def test_an_unreadable_tokenizer_is_not_read_where_another_is_given(content, tmp_path):
    write(tmp_path, {"model_type": "llama", **SIZES}, tensors())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="cannot be read as a tokenizer"):
        load_model(tmp_path)
    given = Tokenizer(backend())
    assert load_model(tmp_path, tokenizer=given)[1] is given
