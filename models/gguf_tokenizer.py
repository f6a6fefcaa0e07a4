"""A tokenizer from the vocabulary inside a GGUF file."""

from typing import Any

from paged_jax.models.errors import ModelLoadError, require
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.tokenizer import Tokenizer

# How text is cut before merging, by the file's name for it; None is GPT-2's pattern, built into byte-level BPE.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = _WORDS % "1,3", _WORDS % "1"
PATTERNS = {
    **dict.fromkeys(("default", "gpt-2", "smollm"), None),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
}
CONTROL, USER_DEFINED = 3, 4  # token types that stand for themselves and are never cut


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The file's byte-level BPE tokenizer, None if it has no vocabulary. Raises ModelLoadError for another kind."""
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind != "gpt2":
        raise ModelLoadError(f"{file.path}: tokenizer {kind!r} is unsupported, expected 'gpt2' (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ModelLoadError(f"{file.path}: pre-tokenizer {pre!r} is unknown, known are {', '.join(PATTERNS)}")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    merges = [_pair(file, merge) for merge in _strings(file, "tokenizer.ggml.merges")]
    types = metadata.get("tokenizer.ggml.token_type", [])
    if types and len(types) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: 'tokenizer.ggml.token_type' has {len(types)} entries, expected {len(tokens)}"
        )
    try:
        backend = _bpe(tokens, merges, PATTERNS[pre], whole_words=PATTERNS[pre] is LLAMA3)
    except Exception as error:  # the package raises a bare Exception
        raise ModelLoadError(f"{file.path}: the vocabulary and merges make no tokenizer: {error}") from error
    if pre == "smollm":
        _cut_digits(backend)
    if PATTERNS[pre] is QWEN2:
        backend.normalizer = require("tokenizers.normalizers", "a tokenizer").NFC()
    special = _special_tokens(file, tokens)
    _add_atoms(backend, tokens, types)
    if metadata.get("tokenizer.ggml.add_bos_token", PATTERNS[pre] is LLAMA3):
        _start_with(backend, special.get("bos_token"))
    return Tokenizer(backend, chat_template=metadata.get("tokenizer.chat_template"), special_tokens=special)


def _bpe(tokens: list[str], merges: list[tuple[str, str]], pattern: str | None, *, whole_words: bool) -> Any:
    tokenizers = require("tokenizers", "a tokenizer")
    pre_tokenizers = require("tokenizers.pre_tokenizers", "a tokenizer")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as that token, whatever the merges make of it.
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=whole_words)
    backend = tokenizers.Tokenizer(model)
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    backend.decoder = require("tokenizers.decoders", "a tokenizer").ByteLevel()
    return backend


def _cut_digits(backend: Any) -> None:
    pre_tokenizers = require("tokenizers.pre_tokenizers", "a tokenizer")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def _add_atoms(backend: Any, tokens: list[str], types: list[int]) -> None:
    tokenizers = require("tokenizers", "a tokenizer")

    def atoms(kind: int, special: bool) -> list[Any]:
        found = [token for token, its in zip(tokens, types, strict=False) if its == kind]
        return [tokenizers.AddedToken(token, special=special, normalized=False) for token in found]

    backend.add_special_tokens(atoms(CONTROL, True))
    backend.add_tokens(atoms(USER_DEFINED, False))


def _start_with(backend: Any, bos: str | None) -> None:
    if bos is None:
        return
    processors = require("tokenizers.processors", "a tokenizer")
    special = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=special
    )


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for role, name in roles.items():
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = file.metadata.get(key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"{file.path}: key {key!r} is {token_id!r}, expected an id below {len(tokens)}")
        special[role] = tokens[token_id]
    return special


def _strings(file: GGUFFile, key: str) -> list[str]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelLoadError(f"{file.path}: key {key!r} is missing or malformed, expected a list of strings")
    return values


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(f"{file.path}: merge {merge!r} is malformed, expected two tokens with a space between")
    return left, right
