"""The ids that end an answer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paged_jax.errors import warn
from paged_jax.models.errors import ModelLoadError
from paged_jax.models.hf_files import Settings, read_json, read_json_if_there


def read_generation_config(directory: Path) -> Settings:
    """Read generation_config.json; without one, the settings are empty. Raises ModelLoadError."""
    return read_json_if_there(directory / "generation_config.json")


def stated_ids(directory: Path) -> tuple[int, ...]:
    """Read the ids that a Hugging Face directory states.

    generation_config.json has all of them. config.json often has only the first, and counts where
    the other file says nothing. A class default does not count: transformers ends at none.

    Raises ModelLoadError.
    """
    for settings in (read_generation_config(directory), read_json(directory / "config.json")):
        ids = settings.get("eos_token_id", (int, list))
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelLoadError(
                f"{settings.origin}: key 'eos_token_id' is {ids!r:.80}, expected ids"
            )
        return tuple(ids)
    return ()


def end_of_text_ids(
    stated: Iterable[int], tokenizer: Any, vocab_size: int, origin: object
) -> tuple[int, ...]:
    """Return the stated ids and the tokenizer's own, without duplicates and unknown ones.

    `stated=(5, 900), tokenizer.eos_token_id=2, vocab_size=256 -> (5, 2)`, with a warning of 900.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    ids = dict.fromkeys([*stated, *([] if own is None else [own])])
    if unknown := [i for i in ids if not 0 <= i < vocab_size]:
        warn(
            f"{origin}: end-of-text ids {unknown} are ignored: the vocabulary has {vocab_size} ids"
        )
    return tuple(i for i in ids if 0 <= i < vocab_size)
