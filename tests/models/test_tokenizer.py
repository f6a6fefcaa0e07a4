"""Text to ids and back; every id list, in any pieces, gives the text of the whole."""

import json
import mmap
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paged_jax.models import Detokenizer, MissingExtraError, ModelLoadError, Tokenizer
from paged_jax.models.decoder_steps import BYTE_OF_CHAR
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.gguf_tokenizer import read_tokenizer
from paged_jax.models.hf_tokenizer import read_tokenizer as read_hf_tokenizer

CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}
SPACE = CHARS[0x20]
TOKENS = [
    *(CHARS[b] for b in range(256)),
    "he",
    "ll",
    "hell",
    SPACE + "w",
    "12",
    "<|end|>",
    "<tool>",
]
MERGES = ["h e", "l l", "he ll", f"{SPACE} w", "1 2"]


def gguf_of(**metadata):
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * 261 + [3, 4],
        "tokenizer.ggml.eos_token_id": 261,
    }
    changes = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return GGUFFile(Path("some.gguf"), base | changes, {}, mmap.mmap(-1, 1))


def byte_level(**metadata) -> Tokenizer:
    tokenizer = read_tokenizer(gguf_of(**metadata))
    assert tokenizer is not None
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: pieces with a mark for the space, bytes for the rest."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "h",
        "i",
        "▁h",
        "▁hi",
    ]
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Backend(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def test_words_merge_and_special_tokens_stay_whole():
    tokenizer = byte_level()
    assert tokenizer.encode("hell w<|end|><tool>") == [258, 259, 261, 262]
    assert tokenizer.special_ids == {261}
    assert tokenizer.decode([258, 261, 262, 259]) == "hell<tool> w"
    assert tokenizer.decode([258, 261], skip_special_tokens=False) == "hell<|end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (
        None,
        261,
        263,
    )


def test_pre_tokenizers_cut_digits_as_their_models_do():
    digits = [ord("1"), ord("2")]
    assert byte_level().encode("12") == [260]
    assert byte_level(ggml__pre="llama-bpe").encode("12") == [260]
    assert byte_level(ggml__pre="smollm").encode("12") == digits
    assert byte_level(ggml__pre="qwen2").encode("12") == digits


def test_bos_is_put_first_where_the_file_says():
    with_bos = {"ggml__bos_token_id": 261, "ggml__add_bos_token": True}
    assert byte_level(**with_bos).encode("he") == [261, 256]
    assert byte_level(**with_bos).encode("he", add_special_tokens=False) == [256]
    assert byte_level(ggml__bos_token_id=261).encode("he") == [256]


def test_eos_is_put_last_and_other_roles_reach_the_template_where_the_file_says():
    assert byte_level(ggml__add_eos_token=True).encode("he") == [256, 261]
    both = {"ggml__bos_token_id": 260, "ggml__add_bos_token": True, "ggml__add_eos_token": True}
    assert byte_level(**both).encode("he") == [260, 256, 261]
    roles = byte_level(ggml__seperator_token_id=260, ggml__mask_token_id=262).special_tokens
    assert roles == {"eos_token": "<|end|>", "sep_token": "12", "mask_token": "<tool>"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml__merges": ["he"]}, "merge 'he' is malformed"),
        ({"ggml__merges": ["he xx"]}, "the vocabulary and merges make no tokenizer"),
        ({"ggml__token_type": [1]}, "'tokenizer.ggml.token_type' has 1 entries, expected 263"),
        (
            {"ggml__eos_token_id": 900},
            "'tokenizer.ggml.eos_token_id' is 900, expected an id below 263",
        ),
    ],
)
def test_a_broken_vocabulary_is_named(metadata, message):
    with pytest.raises(ModelLoadError, match=message):
        byte_level(**metadata)


def test_a_vocabulary_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match="needs 'tokenizers'"):
        read_tokenizer(gguf_of())


def test_a_file_without_a_vocabulary_has_no_tokenizer():
    assert read_tokenizer(GGUFFile(Path("a"), {}, {}, mmap.mmap(-1, 1))) is None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_join_to_the_whole(kind, data):
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        parts = [
            detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)
        ]
        assert "".join([*parts, detokenizer.flush()]) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.parametrize("kind", KINDS)
# SentencePiece writes a space as U+2581, so it cannot tell the two apart.
@given(text=st.text(st.characters(exclude_characters="\u2581", codec="utf-8"), max_size=20))
def test_text_survives_and_no_piece_holds_a_broken_character(kind, text):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if any(i in tokenizer.special_ids for i in ids):
        return
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push([i]) for i in ids]
    assert "".join(parts) == text == tokenizer.backend.decode(ids)
    assert detokenizer.flush() == ""
    assert "�" in text or not any("�" in part for part in parts)


def test_incomplete_bytes_appear_only_at_flush_and_invalid_ones_at_once():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    smile = list("😊".encode())
    assert [detokenizer.push([i]) for i in smile] == ["", "", "", "😊"]
    assert detokenizer.push(smile[:2]) == ""
    assert detokenizer.flush() == "�"
    assert detokenizer.push([0xFF, ord("a")]) == "�a"
    assert detokenizer.flush() == ""


def test_a_text_that_continues_keeps_its_leading_space():
    tokenizer = byte_fallback()
    ids = tokenizer.encode("hi")
    assert tokenizer.decode(ids) == "hi"
    assert Detokenizer(tokenizer, continues=True).push(ids) == " hi"


def chat(template, messages=({"role": "user", "content": "<hi> & 'bye'"},), **variables):
    tokenizer = Tokenizer(
        Backend(models.BPE()), chat_template=template, special_tokens={"bos_token": "<s>"}
    )
    return tokenizer.apply_chat_template(messages, **variables)


def test_templates_have_what_hugging_face_gives_them():
    assert chat("{{ bos_token }}{{ messages[0]['content'] | tojson }}") == "<s>\"<hi> & 'bye'\""
    assert chat("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert chat("  {% for m in messages %}\n{{ m.role }}{% break %}{% endfor %}") == "user"
    assert len(chat("{{ strftime_now('%Y') }}")) == 4
    assert chat("{{ tools is none }}{{ thinking }}", thinking=True) == "TrueTrue"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this model has no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template failed: roles must alternate",
        ),
        ("{% if %}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "the chat template failed"),
    ],
)
def test_a_template_that_fails_says_why(template, message):
    with pytest.raises(ValueError, match=message):
        chat(template)


def test_a_hugging_face_directory_gives_tokenizer_template_and_special_tokens(tmp_path):
    backend = KINDS["byte level"].backend
    backend.save(str(tmp_path / "tokenizer.json"))
    plain = read_hf_tokenizer(tmp_path)
    assert plain is not None and plain.chat_template is None and plain.eos_token_id is None
    settings = {"eos_token": {"content": "<|end|>"}, "bos_token": None, "chat_template": "one"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    full = read_hf_tokenizer(tmp_path)
    assert full is not None and full.eos_token_id == 261 and full.bos_token_id is None
    assert full.apply_chat_template([]) == "one"
    assert full.encode("hell w") == [258, 259]
    (tmp_path / "chat_template.jinja").write_text("two")
    assert read_hf_tokenizer(tmp_path).apply_chat_template([]) == "two"  # pyright: ignore[reportOptionalMemberAccess]


def test_split_patterns_are_valid():
    for pre in ("llama-bpe", "qwen2"):
        text = "I'll go,  then 12345!\n\n ok"
        tokenizer = byte_level(ggml__pre=pre)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert pre_tokenizers.Split(Regex(r"\p{N}"), "isolated") is not None


def hf_directory(directory, **files):
    """Write the byte-level tokenizer.json and JSON files by name."""
    KINDS["byte level"].backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    return directory


def test_additional_special_tokens_are_special_and_reach_the_template(tmp_path):
    config = {"chat_template": "{{ additional_special_tokens | join('+') }}{{ sep_token }}"}
    special_map = {"additional_special_tokens": ["<a>", {"content": "<b>"}], "sep_token": "<sep>"}
    tokenizer = read_hf_tokenizer(
        hf_directory(
            tmp_path,
            tokenizer_config=config,
            special_tokens_map=special_map,
            added_tokens={"<b>": 264, "<a>": 263},
        )
    )
    assert tokenizer is not None and tokenizer.encode("<a><b><sep>") == [263, 264, 265]
    assert tokenizer.special_ids >= {263, 264, 265}
    assert tokenizer.apply_chat_template([]) == "<a>+<b><sep>"


BAD_FILES = [
    ({"added_tokens": {"<x>": 300}}, "token '<x>' is to have the id 300, but the next .* is 263"),
    ({"added_tokens": {"<x>": "263"}}, "key '<x>' must be int, got '263'"),
    ({"added_tokens": "{"}, "added_tokens.json: cannot be read as JSON"),
    ({"special_tokens_map": "[]"}, "special_tokens_map.json: expected a JSON object, got list"),
    ({"special_tokens_map": {"eos_token": {"a": 1}}}, "key 'eos_token' has {'a': 1}, expected"),
    ({"tokenizer_config": {"extra_special_tokens": [5]}}, "'extra_special_tokens' has 5, expected"),
    (
        {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}},
        "key 'added_tokens_decoder' has 'x', expected ids",
    ),
    (
        {"tokenizer_config": {"added_tokens_decoder": {"300": {"content": "<x>"}}}},
        "token '<x>' is to have the id 300",
    ),
    (
        {"tokenizer_config": {"added_tokens_decoder": {"3": "a b"}}},
        "token 'a b' is to have the id 3",
    ),
    ({"tokenizer_config": {"chat_template": [{"name": "default"}]}}, "key 'chat_template' must be"),
]


@pytest.mark.parametrize(("files", "message"), BAD_FILES)
def test_a_bad_file_beside_the_tokenizer_is_named(files, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message) as error:
        read_hf_tokenizer(hf_directory(tmp_path, **files))
    assert str(tmp_path) in str(error.value)


def test_a_token_of_the_vocabulary_keeps_its_id(tmp_path):
    directory = hf_directory(tmp_path, added_tokens={"hell": 900})
    tokenizer = read_hf_tokenizer(directory)
    assert tokenizer is not None and tokenizer.encode("hell") == [258]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}},
            "is 'LlamaTokenizer', expected",
        ),
        (
            {"tokenizer_config": {}},
            "'tokenizer_class' is None, expected one of GPT2Tokenizer, Qwen2",
        ),
        ({"config": {"model_type": "llama"}}, "'tokenizer_class' is None, expected one of"),
        (
            {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}, "vocab": "["},
            r"vocab.json, merges.txt: cannot be read",
        ),
        (
            {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}, "vocab": {"a": 0}},
            "the vocabulary and merges make no tokenizer",
        ),
    ],
)
def test_a_vocabulary_of_an_unknown_class_or_form_is_refused(files, message, tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    hf_directory(tmp_path, **({"vocab": {"h": 0, "e": 1, "he": 2}} | files))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=message) as error:
        read_hf_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_vocabulary_without_a_class_is_of_the_family_of_the_model(tmp_path):
    (tmp_path / "merges.txt").write_text("h e\n")
    hf_directory(tmp_path, vocab={"h": 0, "e": 1, "he": 2}, config={"model_type": "qwen3"})
    (tmp_path / "tokenizer.json").unlink()
    tokenizer = read_hf_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.encode("he") == [2]
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.CTC(), decoders.Strip(" ", 0, 1), decoders.BPEDecoder()],
    ids=lambda decoder: type(decoder).__name__,
)
def test_a_decoder_that_needs_the_whole_list_is_refused(decoder, tmp_path):
    backend = Backend(models.BPE())
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=r"tokenizer.json: decoder .* is unsupported"):
        read_hf_tokenizer(tmp_path)
