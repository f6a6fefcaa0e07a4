"""Requests on the host: checked, and laid out as rows for the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import numpy as np

from paged_jax.checks import show
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.engine.mailbox import Mailbox, empty_mailbox
from paged_jax.errors import InvalidRequestError
from paged_jax.kv_group import blocks_to_admit
from paged_jax.sampling.parameters import PARAMETERS, BeamSearchParams, Params, SamplingParams
from paged_jax.sampling.rows import SamplingRows
from paged_jax.scheduling.beams import NEVER, WHEN_BEST, WHEN_FULL, NewBeams
from paged_jax.scheduling.sequences import NewSequences


@dataclass(eq=False)
class Request:
    """One request as the host follows it.

    Attributes:
        max_len: tokens, prompt included, at which it ends.
        eos_ids: those of `stop_ids` that are end-of-text: they give no stop_reason.
        is_aborted: whether it shall end where it stands.
        is_abandoned: whether nobody reads its updates; it is aborted, too.
        mailbox: what the host has of its outputs.
    """

    request_id: str
    prompt: list[int]
    params: Params
    max_len: int
    seed: int
    stop_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    cache_salt: str | None = None
    is_aborted: bool = False
    is_abandoned: bool = False
    mailbox: Mailbox = field(init=False)

    def __post_init__(self):
        self.mailbox = empty_mailbox(self.num_outputs, len(self.prompt))

    @property
    def has_ended(self) -> bool:
        """Whether all of its outputs have ended."""
        return all(self.mailbox.has_ended)

    @property
    def num_outputs(self) -> int:
        """Outputs, and sequence rows."""
        params = self.params
        return params.beam_width if isinstance(params, BeamSearchParams) else params.n


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a request, as a sequence row makes it."""

    request: Request
    index: int

    @property
    def seed(self) -> int:
        """Of the output's own stream; the first has the request's."""
        seed = self.request.seed & 0xFFFFFFFF
        if self.index == 0:
            return seed
        return int(np.random.SeedSequence((seed, self.index)).generate_state(1)[0])


# ---------------------------------------------------------------- checks


def check_prompt(prompt: object, vocab_size: int, max_model_len: int) -> list[int]:
    """Return token ids as ints.

    Raises InvalidRequestError for a prompt that is empty, too long, or has ids of no token.
    """
    if isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise InvalidRequestError(
            f"prompt={show(prompt)}: a list of token ids is needed, got {type(prompt).__name__}"
        )
    if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
        raise InvalidRequestError(
            f"prompt: an array of shape {prompt.shape}; one row of token ids is needed"
        )
    if len(prompt) == 0:
        raise InvalidRequestError("prompt=[]: at least one token is needed")
    if len(prompt) >= max_model_len:
        raise InvalidRequestError(
            f"prompt: {len(prompt)} tokens; must be fewer than max_model_len={max_model_len}, "
            "to leave room for output"
        )
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidRequestError(
                f"prompt[{position}]={show(token)}: an int is needed, got {type(token).__name__}"
            )
        if not 0 <= int(token) < vocab_size:
            raise InvalidRequestError(
                f"prompt[{position}]={show(token)}: token ids go from 0 to {vocab_size - 1}"
            )
    return [int(token) for token in prompt]


def max_blocks_held(cache_config: CacheConfig, max_len: int, max_chunk: int) -> int:
    """Bound the blocks that a sequence ending at `max_len` tokens holds at once.

    The last token is never computed.
    """
    groups, block_size = cache_config.groups, cache_config.block_size
    return blocks_to_admit(groups, max_len - 1, max_chunk, block_size)


def make_request(
    request_id: str,
    prompt: object,
    params: Params,
    *,
    config: EngineConfig,
    cache_config: CacheConfig,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    cache_salt: str | None = None,
) -> Request:
    """Return a checked request.

    Raises InvalidRequestError, also for one that the pool could never hold.
    """
    if not isinstance(params, SamplingParams | BeamSearchParams):
        raise InvalidRequestError(
            f"sampling_params={show(params)}: SamplingParams or BeamSearchParams are needed, "
            f"got {type(params).__name__}"
        )
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError(
            f"cache_salt={show(cache_salt)}: a str is needed, got {type(cache_salt).__name__}"
        )
    _check_num_outputs(params, config)
    tokens = check_prompt(prompt, vocab_size, config.max_model_len)
    max_len = config.max_model_len
    if params.max_tokens is not None:
        max_len = min(len(tokens) + params.max_tokens, max_len)
    _check_fits(params, len(tokens), max_len, config, cache_config)
    stop_ids, eos_ids = _stop_ids(params, config, vocab_size, eos_token_ids)
    seed = params.seed if isinstance(params, SamplingParams) and params.seed is not None else 0
    return Request(request_id, tokens, params, max_len, seed, stop_ids, eos_ids, cache_salt)


def _check_num_outputs(params: Params, config: EngineConfig) -> None:
    if isinstance(params, BeamSearchParams):
        if params.beam_width > config.max_num_seqs:
            raise InvalidRequestError(
                f"beam_width={params.beam_width}: beams run together, "
                f"at most max_num_seqs={config.max_num_seqs}"
            )
    elif params.n > config.num_rows:
        raise InvalidRequestError(
            f"n={params.n}: at most num_rows={config.num_rows} (twice max_num_seqs where not said) "
            "outputs can be made at once"
        )


def _check_fits(
    params: Params, num_tokens: int, max_len: int, config: EngineConfig, cache_config: CacheConfig
) -> None:
    group = params.beam_width if isinstance(params, BeamSearchParams) else 1
    need = group * max_blocks_held(cache_config, max_len, config.max_num_batched_tokens)
    if need > cache_config.num_blocks - 1:
        beams = f", beam_width={group}" if group > 1 else ""
        raise InvalidRequestError(
            f"prompt of {num_tokens} tokens and max_tokens={params.max_tokens}{beams}: needs up to "
            f"{need} blocks of {cache_config.block_size}, the pool has "
            f"{cache_config.num_blocks - 1}; "
            "it could never finish"
        )


def _stop_ids(
    params: Params, config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return all ids that end an output, and those of them that are end-of-text."""
    own = tuple(params.stop_token_ids) if isinstance(params, SamplingParams) else ()
    for token in own:
        if token >= vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}"
            )
    eos_ids = () if params.ignore_eos else tuple(t for t in eos_token_ids if t not in own)
    stop_ids = (*own, *eos_ids)
    if isinstance(params, SamplingParams) and params.min_tokens > 0:
        if sum(0 <= token < vocab_size for token in {*stop_ids}) == vocab_size:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens}: all {vocab_size} tokens of the vocabulary end "
                "the output, so none may come first"
            )
    if len(stop_ids) > config.max_stop_ids:
        raise InvalidRequestError(
            f"stop_token_ids={list(own)}: {len(stop_ids)} with end-of-text, at most "
            f"max_stop_ids={config.max_stop_ids} are accepted"
        )
    return stop_ids, frozenset(eos_ids)


# ---------------------------------------------------------------- rows for the device


def to_rows(
    outputs: dict[int, Output], config: EngineConfig, roots: dict[int, int] | None = None
) -> NewSequences:
    """Return outputs, by the row they go into, as arrays.

    There are always R entries, padded with rows out of range. The outputs of a request stand
    together, the first in front: the others share the prompt that it computes. `roots` holds what
    each row's content depends on in the prefix directory.
    """
    count, length = config.num_rows, config.max_model_len

    def ints(value=0):
        return np.full(count, value, np.int32)

    rows, root, parent = ints(count), ints(-1), ints(count)
    num_prompt_tokens, max_len = ints(), ints()
    tokens = np.zeros((count, length), np.int32)
    first = count
    for i, (row, output) in enumerate(outputs.items()):
        request, size = output.request, len(output.request.prompt)
        rows[i], num_prompt_tokens[i], max_len[i] = row, size, request.max_len
        tokens[i, :size] = request.prompt
        if roots is not None:
            root[i] = roots[row]
        if output.index == 0:
            first = row
        elif isinstance(request.params, SamplingParams):  # beams share in their own way
            parent[i] = first
    sampling = _to_sampling_rows(list(outputs.values()), config)
    columns: list[Any] = [rows, tokens, num_prompt_tokens, max_len, root, parent, sampling]
    return NewSequences(*columns)


def _to_sampling_rows(outputs: list[Output], config: EngineConfig) -> SamplingRows:
    """Return the outputs' sampling parameters as arrays; beams have neutral ones."""
    count = config.num_rows
    arrays = {p.name: np.full(count, p.neutral, p.dtype) for p in PARAMETERS}
    seed, min_len = np.zeros(count, np.uint32), np.zeros(count, np.int32)
    stop_ids = np.full((count, config.max_stop_ids), -1, np.int32)
    for i, output in enumerate(outputs):
        request, params = output.request, output.request.params
        seed[i] = output.seed
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        if isinstance(params, SamplingParams):
            min_len[i] = min(len(request.prompt) + params.min_tokens, request.max_len)
            for name, array in arrays.items():
                array[i] = getattr(params, name)
    columns: list[Any] = [arrays, seed, min_len, stop_ids]
    return SamplingRows(*columns)


EARLY_STOPPING: dict[bool | str, int] = {True: WHEN_FULL, False: WHEN_BEST, "never": NEVER}


def to_beams(outputs: dict[int, Output], config: EngineConfig) -> NewBeams | None:
    """Return the beam groups among the outputs, padded like `to_rows`; None where there is none."""
    count, max_width = config.num_rows, config.max_beam_width
    groups: dict[int, list[int]] = {}
    for row, output in outputs.items():
        if isinstance(output.request.params, BeamSearchParams):
            groups.setdefault(id(output.request), []).append(row)
    if not groups:
        return None
    rows, leader = (np.full(count, count, np.int32) for _ in range(2))
    members, width = np.full((count, max_width), count, np.int32), np.zeros(count, np.int32)
    penalty, early = np.zeros(count, np.float32), np.zeros(count, np.int32)
    at = 0
    for group in groups.values():
        params: Any = outputs[group[0]].request.params
        here = slice(at, at := at + len(group))
        rows[here], leader[here], width[here] = group, group[0], len(group)
        members[here, : len(group)] = group
        penalty[here] = params.length_penalty
        early[here] = EARLY_STOPPING[params.early_stopping]
    columns: list[Any] = [rows, leader, members, width, penalty, early]
    return NewBeams(*columns)
