"""The tokenizer of a Hugging Face directory: tokenizer.json, or vocab.json with merges.txt."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from paged_jax.models.byte_level_bpe import Pattern, byte_level_bpe, frame
from paged_jax.models.errors import ModelLoadError, load_errors, require
from paged_jax.models.families import FAMILIES
from paged_jax.models.hf_added_tokens import SpecialTokens, add_tokens, read_special_tokens
from paged_jax.models.hf_files import Settings, read_json_if_there
from paged_jax.models.tokenizer import Tokenizer

END = "<|endoftext|>"


class TokenizerClass(NamedTuple):
    """What the name of a tokenizer class says.

    Attributes:
        pattern: how text is split.
        special: its special tokens, where tokenizer_config.json does not have the keys.
    """

    pattern: Pattern
    special: dict[str, str]


CLASSES = {
    "GPT2Tokenizer": TokenizerClass(
        "gpt2", dict.fromkeys(("unk_token", "bos_token", "eos_token"), END)
    ),
    "Qwen2Tokenizer": TokenizerClass(
        "qwen2", dict.fromkeys(("unk_token", "eos_token", "pad_token"), END)
    ),
}


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Read the tokenizer beside the model.

    Returns None where there is neither a tokenizer.json nor a vocab.json with its merges.txt.
    Raises ModelLoadError where one is damaged or of an unsupported kind.
    """
    settings = read_json_if_there(directory / "tokenizer_config.json")
    path = directory / "tokenizer.json"
    special = read_special_tokens(directory, settings)
    if path.exists():
        backend = _read_backend(path)
        if backend.padding is not None:
            special = special.with_defaults({"pad_token": backend.padding["pad_token"]})
        add_tokens(backend, special, settings.origin)
    elif (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
        backend, special = _build_backend(directory, settings, special)
    else:
        return None
    # Like transformers: what a training script left there would cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = settings.get("split_special_tokens", bool, False)
    with load_errors(path):
        return Tokenizer(
            backend,
            chat_template=_chat_template(directory, settings),
            special_tokens=special.texts(),
        )


def _read_backend(path: Path) -> Any:
    tokenizers = require("tokenizers", f"reading {path.name}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise ModelLoadError(f"{path}: cannot be read as a tokenizer: {error}") from error


def _build_backend(
    directory: Path, settings: Settings, special: SpecialTokens
) -> tuple[Any, SpecialTokens]:
    """Build a byte-level BPE backend, and return it with the special tokens that it has."""
    name = settings.get("tokenizer_class", str) or _class_of_family(directory)
    kind = CLASSES.get((name or "").removesuffix("Fast"))
    if kind is None:
        raise ModelLoadError(
            f"{settings.origin}: key 'tokenizer_class' is {name!r}, expected one of "
            f"{', '.join(CLASSES)} for a vocab.json without tokenizer.json"
        )
    tokenizers = require("tokenizers", "reading vocab.json")
    files = directory / "vocab.json", directory / "merges.txt"
    try:
        vocabulary, merges = tokenizers.models.BPE.read_file(*map(str, files))
    except Exception as error:  # the package raises a bare Exception
        raise ModelLoadError(f"{files[0]}, {files[1].name}: cannot be read: {error}") from error
    backend = byte_level_bpe(
        vocabulary,
        merges,
        kind.pattern,
        files[0],
        add_prefix_space=settings.get("add_prefix_space", bool, False),
    )
    special = special.with_defaults(kind.special)
    add_tokens(backend, special, settings.origin)
    texts = special.texts()
    frame(
        backend,
        *(
            texts.get(f"{role}_token") if settings.get(f"add_{role}_token", bool, False) else None
            for role in ("bos", "eos")
        ),
    )
    return backend, special


def _class_of_family(directory: Path) -> str | None:
    architecture = read_json_if_there(directory / "config.json").get("model_type", str, "")
    return FAMILIES[architecture].tokenizer_class if architecture in FAMILIES else None


def _chat_template(directory: Path, settings: Settings) -> str | None:
    """Return the chat template; of several with names, the one called "default"."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template", (str, list))
    if not isinstance(template, list):
        return template
    for named in template:
        if not isinstance(named, dict) or not isinstance(named.get("template"), str):
            raise ModelLoadError(
                f"{settings.origin}: key 'chat_template' must be a list of objects with a name and "
                f"a template, got {json.dumps(named):.80}"
            )
    return next((t["template"] for t in template if t.get("name") == "default"), None)
