"""Special and added tokens of a Hugging Face directory, which are in up to four files.

The rules are those of transformers. Where tokenizer_config.json has `added_tokens_decoder`, it has
everything. Where it has not, special_tokens_map.json goes before it, and added_tokens.json counts.
tokenizer.json has tokens of its own, which are in the backend already.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paged_jax.models.errors import ModelLoadError, require
from paged_jax.models.hf_files import Settings, read_json_if_there

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """What the files say of added tokens. A token is a `tokenizers.AddedToken`.

    Attributes:
        by_role: bos_token, eos_token, ... and other keys that end so.
        extra: special tokens without a role.
        by_id: tokens that are to have an id.
        stated_null: roles that the model does without.
    """

    by_role: dict[str, Any]
    extra: tuple[Any, ...]
    by_id: dict[int, Any]
    stated_null: frozenset[str]

    def texts(self) -> dict[str, Any]:
        """Return the texts by role, for templates: `{"eos_token": "</s>"}`."""
        texts: dict[str, Any] = {role: token.content for role, token in self.by_role.items()}
        if self.extra:
            texts["additional_special_tokens"] = [token.content for token in self.extra]
        return texts

    def with_defaults(self, defaults: Mapping[str, str]) -> "SpecialTokens":
        """Return the same with tokens for roles of which the files say nothing, not even null."""
        missing = defaults.keys() - self.by_role.keys() - self.stated_null
        return replace(self, by_role={r: _token(defaults[r]) for r in missing} | self.by_role)


def read_special_tokens(directory: Path, settings: Settings) -> SpecialTokens:
    """Read the files, `settings` being tokenizer_config.json. Raises ModelLoadError."""
    listed = settings.get("added_tokens_decoder", dict)
    sources = [settings]
    if listed is None:
        sources.append(read_json_if_there(directory / "special_tokens_map.json"))
    by_role: dict[str, Any] = {}
    extra: list[Any] = []
    for source in sources:
        for key, value in source.values.items():
            if key in EXTRA and value:
                named = value if isinstance(value, dict) else {}
                by_role |= {role: _read_token(source, key, token) for role, token in named.items()}
                unnamed = [] if named else [_read_token(source, key, token) for token in value]
                held = {token.content for token in extra}
                extra += [token for token in unnamed if token.content not in held]
            elif key.endswith("_token") and isinstance(value, str | dict):
                by_role[key] = _read_token(source, key, value)
    if listed is not None:
        by_id = {
            _read_id(settings, text): _read_token(settings, "added_tokens_decoder", token)
            for text, token in listed.items()
        }
    else:
        special = {token.content for token in (*by_role.values(), *extra)}
        by_id = _read_added_tokens(directory, special)
    known = {token.content: token for token in by_id.values()}
    by_role = {role: known.get(token.content, token) for role, token in by_role.items()}
    nulls = frozenset(key for key, value in settings.values.items() if value is None)
    return SpecialTokens(by_role, tuple(extra), by_id, nulls)


def add_tokens(backend: Any, special: SpecialTokens, origin: object) -> None:
    """Add to a backend what it lacks, in the order of transformers.

    First the tokens with ids, in order of these; then those with a role, then the others. A token
    that the vocabulary has keeps its id.

    Raises ModelLoadError where a token would get another id than it is to have.
    """
    by_id = special.by_id
    held = backend.get_vocab(with_added_tokens=True)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    added |= {token.content for token in by_id.values()}
    named = [special.by_role[role] for role in _in_order(special.by_role)]
    others = {t.content: t for t in (*named, *special.extra) if t.content not in added}
    backend.add_tokens([*(by_id[i] for i in sorted(by_id)), *others.values()])
    for token_id, token in by_id.items():
        got = backend.token_to_id(token.content)
        if token.content not in held and got != token_id:
            raise ModelLoadError(
                f"{origin}: token {token.content!r} is to have the id {token_id}, but the next one "
                f"of the vocabulary is {got}"
            )


def _in_order(roles: Mapping[str, Any]) -> list[str]:
    known = [f"{role}_token" for role in ROLES]
    return [role for role in known if role in roles] + [r for r in roles if r not in known]


def _read_added_tokens(directory: Path, special: set[str]) -> dict[int, Any]:
    """Read added_tokens.json, `{"<tool>": 258}`. Raises ModelLoadError."""
    file = read_json_if_there(directory / "added_tokens.json")
    tokens = {}
    for text in file.values:
        flag = text in special
        tokens[file.need(text, int)] = _token(text, special=flag, normalized=not flag)
    return tokens


def _read_id(settings: Settings, text: str) -> int:
    if not text.isdecimal():
        raise ModelLoadError(
            f"{settings.origin}: key 'added_tokens_decoder' has {text!r:.80}, expected ids"
        )
    return int(text)


def _read_token(settings: Settings, key: str, value: Any) -> Any:
    """Read a token: a text, which is a special token, or an object. Raises ModelLoadError."""
    if isinstance(value, str):
        return _token(value)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise ModelLoadError(
            f"{settings.origin}: key {key!r} has {value!r:.80}, expected a text or an object with "
            "'content'"
        )
    flags = {flag: bool(value[flag]) for flag in FLAGS if flag in value}
    if key != "added_tokens_decoder":
        flags["special"] = True
    return _token(content, **flags)


def _token(text: str, **flags: bool) -> Any:
    """Return an added token, special unless the flags say otherwise."""
    tokenizers = require("tokenizers", "a tokenizer")
    return tokenizers.AddedToken(text, **({"special": True} if not flags else flags))
