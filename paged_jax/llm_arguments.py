"""The arguments of `LLM`'s calls, as lists of one a prompt. All raise InvalidRequestError."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from paged_jax.checks import show
from paged_jax.errors import InvalidRequestError
from paged_jax.sampling.parameters import BeamSearchParams, Params, SamplingParams

type Prompt = str | Sequence[int] | np.ndarray | jax.Array  # a text or token ids
type Message = Mapping[str, str]


class TemplateText(str):
    """A prompt that a chat template wrote: its special tokens are in it."""


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts of a call as a list, and whether one was given alone."""
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts).tolist()
    many = (Sequence, np.ndarray, jax.Array)
    if not isinstance(prompts, many) or (isinstance(prompts, np.ndarray) and prompts.ndim == 0):
        raise InvalidRequestError(
            f"prompts={show(prompts)}: a text, token ids, or a list of either is needed"
        )
    is_alone = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], many))
    listed: Any = [prompts] if is_alone else list(prompts)
    return listed, is_alone


def list_params(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    """Return sampling parameters for each of `count` prompts."""
    one = SamplingParams() if params is None else params
    needed = "SamplingParams, BeamSearchParams, or a list of them, are needed"
    return _list("sampling_params", one, count, (SamplingParams, BeamSearchParams), needed)


def list_salts(salt: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return a cache salt, or None, for each of `count` prompts."""
    needed = "a str, or a list of them, is needed"
    return _list("cache_salt", salt, count, (str, type(None)), needed)


def _list(name: str, value: Any, count: int, types: tuple[type, ...], needed: str) -> list[Any]:
    if isinstance(value, types):
        return [value] * count
    if not isinstance(value, Sequence):
        raise InvalidRequestError(f"{name}={show(value)}: {needed}")
    if len(value) != count:
        raise InvalidRequestError(f"{name}: {len(value)} for {count} prompts; one, or one a prompt")
    return list(value)


def list_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Return the conversations of a call as a list, each of them checked."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequestError(
            f"messages={show(messages)}: a list of messages, or of such lists, is needed"
        )
    if len(messages) == 0:
        raise InvalidRequestError("messages=[]: at least one message is needed")
    many: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in many:
        _check_conversation(conversation)
    return many


def _check_conversation(conversation: object) -> None:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise InvalidRequestError(f"messages: {show(conversation)}; a list of messages is needed")
    if len(conversation) == 0:
        raise InvalidRequestError("messages: []; at least one message is needed")
    for message in conversation:
        fields = message if isinstance(message, Mapping) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise InvalidRequestError(
                f"messages: {show(message)}; each must be a mapping with the texts 'role' and "
                "'content'"
            )
