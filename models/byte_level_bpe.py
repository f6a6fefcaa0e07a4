"""Byte-level BPE as `tokenizers` runs it, from a vocabulary and merges."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paged_jax.models.errors import ModelLoadError, require

type Pattern = Literal["gpt2", "digits", "llama3", "qwen2"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {"llama3": _WORDS % "1,3", "qwen2": _WORDS % "1"}


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    pattern: Pattern,
    origin: object,
    *,
    add_prefix_space: bool = False,
) -> Any:
    """Build a backend without added tokens.

    Args:
        pattern: how text is split before merging. "gpt2" is the one that byte-level BPE has built
            in, "digits" the same after each digit was split off.
        origin: what errors call the vocabulary.
        add_prefix_space: encode a text as if a space stood before it.

    Raises ModelLoadError where merges and tokens do not fit.
    """
    tokenizers = require("tokenizers", "a tokenizer")
    pre_tokenizers = tokenizers.pre_tokenizers
    # Llama 3 encodes a word that is a token as that token, whatever the merges make of it.
    try:
        model = tokenizers.models.BPE(
            dict(vocabulary), list(merges), ignore_merges=pattern == "llama3"
        )
    except Exception as error:  # the package raises a bare Exception
        raise ModelLoadError(
            f"{origin}: the vocabulary and merges make no tokenizer: {error}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    words = WORDS.get(pattern)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=words is None)
    splits = []
    if words is not None:
        splits.append(pre_tokenizers.Split(tokenizers.Regex(words), "isolated"))
    if pattern == "digits":
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if pattern == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def frame(backend: Any, bos: str | None, eos: str | None) -> None:
    """Let every encoded text begin with the token `bos` and end with `eos`, where there are such.

    Both: `"hi" -> "<s> hi </s>"`.
    """
    tokenizers = require("tokenizers", "a tokenizer")
    tokens = [token for token in dict.fromkeys((bos, eos)) if token is not None]
    if not tokens:
        return
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[f"{part}:0" for part in parts],
        pair=[f"{part}:0" for part in parts]
        + [f"{part}:1" for part in parts if part != "$A"]
        + ["$B:1"],
        special_tokens=[(token, backend.token_to_id(token)) for token in tokens],
    )
