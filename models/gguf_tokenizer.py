"""A byte-level BPE tokenizer from the vocabulary in a GGUF file."""

from typing import Any

from paged_jax.models.byte_level_bpe import Pattern, byte_level_bpe, frame
from paged_jax.models.errors import ModelLoadError, require
from paged_jax.models.gguf_file import GGUFFile
from paged_jax.models.tokenizer import Tokenizer

# How text is split before merging, by the file's name for it.
PATTERNS: dict[str, Pattern] = {
    **dict.fromkeys(("default", "gpt-2"), "gpt2"),
    "smollm": "digits",
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens that text is never split within
SPECIAL_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """Read the file's tokenizer; None where it has no vocabulary.

    Raises ModelLoadError for a kind other than byte-level BPE and for a damaged vocabulary.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind != "gpt2":
        raise ModelLoadError(
            f"{file.path}: tokenizer {kind!r} is unsupported, expected 'gpt2' (byte-level BPE)"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ModelLoadError(
            f"{file.path}: pre-tokenizer {pre!r} is unknown, known are {', '.join(PATTERNS)}"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    merges = [_pair(file, merge) for merge in _strings(file, "tokenizer.ggml.merges")]
    types = metadata.get("tokenizer.ggml.token_type", [])
    if types and len(types) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: 'tokenizer.ggml.token_type' has {len(types)} entries, "
            f"expected {len(tokens)}"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = byte_level_bpe(vocabulary, merges, PATTERNS[pre], file.path)
    special = _special_tokens(file, tokens)
    _add_unsplit_tokens(backend, tokens, types)
    starts = metadata.get("tokenizer.ggml.add_bos_token", PATTERNS[pre] == "llama3")
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    frame(
        backend,
        special.get("bos_token") if starts else None,
        special.get("eos_token") if ends else None,
    )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, chat_template=template, special_tokens=special)


def _add_unsplit_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Add control tokens, which are special, and user-defined ones, which are not."""
    tokenizers = require("tokenizers", "a tokenizer")

    def added(kind: int, is_special: bool) -> list[Any]:
        found = [token for token, its in zip(tokens, types, strict=False) if its == kind]
        return [tokenizers.AddedToken(t, special=is_special, normalized=False) for t in found]

    backend.add_special_tokens(added(CONTROL, True))
    backend.add_tokens(added(USER_DEFINED, False))


def _special_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    """Read bos_token, eos_token, ... as text. Raises ModelLoadError for an id out of range."""
    special = {}
    for role, name in SPECIAL_NAMES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = file.metadata.get(key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelLoadError(
                f"{file.path}: key {key!r} is {token_id!r}, expected an id below {len(tokens)}"
            )
        special[role] = tokens[token_id]
    return special


def _strings(file: GGUFFile, key: str) -> list[str]:
    values = file.metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelLoadError(
            f"{file.path}: key {key!r} is missing or malformed, expected a list of strings"
        )
    return values


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    """Split a merge: `"he ll" -> ("he", "ll")`. Raises ModelLoadError."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(
            f"{file.path}: merge {merge!r} is malformed, expected two tokens with a space between"
        )
    return left, right
