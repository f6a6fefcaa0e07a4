"""Requests on the host: checked, and laid out as rows for the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import numpy as np

from paged_jax.beams import NEVER, WHEN_BEST, WHEN_FULL, NewBeams
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.errors import InvalidRequestError
from paged_jax.sampling import SamplingRows
from paged_jax.sampling_params import BeamSearchParams, SamplingParams
from paged_jax.sequences import NewSequences

type Params = SamplingParams | BeamSearchParams


@dataclass
class Request:
    """One request as the host follows it."""

    request_id: str
    prompt: list[int]
    params: Params
    max_len: int
    seed: int
    stop_ids: tuple[int, ...]
    eos_ids: frozenset[int]  # those of `stop_ids` that are end-of-text: they give no stop_reason
    cache_salt: str | None = None
    num_ended: int = 0  # outputs that have come to their end

    @property
    def num_outputs(self) -> int:
        """Outputs, and sequence rows."""
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.params.n


@dataclass
class Output:
    """One output of a request, and the sequence row that makes it."""

    request: Request
    index: int
    num_seen: int = field(init=False)  # tokens, prompt included, that the host has

    def __post_init__(self):
        self.num_seen = len(self.request.prompt)

    @property
    def seed(self) -> int:
        """Of the output's own stream; the first has the request's."""
        seed = self.request.seed & 0xFFFFFFFF
        return seed if self.index == 0 else int(np.random.SeedSequence((seed, self.index)).generate_state(1)[0])


def check_prompt(prompt: object, vocab_size: int, max_model_len: int) -> list[int]:
    """Token ids as a list of ints. Raises InvalidRequestError for an empty, overlong or foreign prompt."""
    if isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise InvalidRequestError(f"prompt={prompt!r:.80}: a list of token ids is needed, got {type(prompt).__name__}")
    if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
        raise InvalidRequestError(f"prompt: an array of shape {prompt.shape}; one row of token ids is needed")
    if len(prompt) == 0:
        raise InvalidRequestError("prompt=[]: at least one token is needed")
    if len(prompt) >= max_model_len:
        raise InvalidRequestError(
            f"prompt: {len(prompt)} tokens; must be fewer than max_model_len={max_model_len}, to leave room for output"
        )
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidRequestError(f"prompt[{position}]={token!r}: an int is needed, got {type(token).__name__}")
        if not 0 <= int(token) < vocab_size:
            raise InvalidRequestError(f"prompt[{position}]={token}: token ids go from 0 to {vocab_size - 1}")
    return [int(token) for token in prompt]


def blocks_at_most(sizes: CacheConfig, max_len: int, max_chunk: int) -> int:
    """Blocks that a sequence ending at `max_len` tokens can hold at once. The last token is never computed."""
    whole = -(-(max_len - 1) // sizes.block_size)
    return sum(
        whole if window is None else min(whole, sizes.window_blocks(window, max_chunk)) for window in sizes.windows
    )


def make_request(
    request_id: str,
    prompt: object,
    params: Params,
    *,
    config: EngineConfig,
    sizes: CacheConfig,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    seed: int,
    cache_salt: str | None = None,
) -> Request:
    """A checked request. Raises InvalidRequestError, also for one that the pool could never hold."""
    if not isinstance(params, SamplingParams | BeamSearchParams):
        raise InvalidRequestError(
            f"sampling_params={params!r:.80}: SamplingParams or BeamSearchParams are needed, got {type(params).__name__}"
        )
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError(f"cache_salt={cache_salt!r:.80}: a str is needed, got {type(cache_salt).__name__}")
    if isinstance(params, BeamSearchParams):
        if params.beam_width > config.max_num_seqs:
            raise InvalidRequestError(
                f"beam_width={params.beam_width}: beams run together, at most max_num_seqs={config.max_num_seqs}"
            )
        own_stops, group = (), params.beam_width
    else:
        own_stops, group = tuple(params.stop_token_ids), 1
        if params.n > config.rows:
            raise InvalidRequestError(
                f"n={params.n}: at most num_rows={config.rows} (twice max_num_seqs where not said) outputs can be made at once"
            )
    tokens = check_prompt(prompt, vocab_size, config.max_model_len)
    max_len = config.max_model_len
    if params.max_tokens is not None:
        max_len = min(len(tokens) + params.max_tokens, max_len)
    need = group * blocks_at_most(sizes, max_len, config.max_num_batched_tokens)
    if need > sizes.num_blocks - 1:
        beams = f", beam_width={group}" if group > 1 else ""
        raise InvalidRequestError(
            f"prompt of {len(tokens)} tokens and max_tokens={params.max_tokens}{beams}: needs up to {need} blocks of "
            f"{sizes.block_size}, the pool has {sizes.num_blocks - 1}; it could never finish"
        )
    for token in own_stops:
        if token >= vocab_size:
            raise InvalidRequestError(f"stop_token_ids: {token} is outside the vocabulary of {vocab_size}")
    eos_ids = () if params.ignore_eos else tuple(token for token in eos_token_ids if token not in own_stops)
    stop_ids = (*own_stops, *eos_ids)
    if len(stop_ids) > config.max_stop_ids:
        raise InvalidRequestError(
            f"stop_token_ids={list(own_stops)}: {len(stop_ids)} with end-of-text, at most "
            f"max_stop_ids={config.max_stop_ids} are accepted"
        )
    if isinstance(params, SamplingParams) and params.seed is not None:
        seed = params.seed
    return Request(request_id, tokens, params, max_len, seed, stop_ids, frozenset(eos_ids), cache_salt)


def to_rows(outputs: dict[int, Output], config: EngineConfig, roots: dict[int, int] | None = None) -> NewSequences:
    """Outputs by the row they go into, as arrays; always R of them, padded with rows out of range.

    The outputs of a request stand together, the first in front: the others share the prompt that it computes. `roots`: what
    each row's content hangs on in the prefix directory.
    """
    count, length = config.rows, config.max_model_len
    rows = np.full(count, config.rows, np.int32)
    tokens = np.zeros((count, length), np.int32)
    ints = {name: np.zeros(count, np.int32) for name in ("num_prompt_tokens", "max_len", "top_k", "min_len")}
    floats = {name: np.zeros(count, np.float32) for name in ("temperature", "top_p", "min_p")}
    seed, root, parent = np.zeros(count, np.uint32), np.full(count, -1, np.int32), np.full(count, count, np.int32)
    stop_ids = np.full((count, config.max_stop_ids), -1, np.int32)
    first = count
    for i, (row, output) in enumerate(outputs.items()):
        request, size = output.request, len(output.request.prompt)
        params = request.params
        rows[i] = row
        tokens[i, :size] = request.prompt
        ints["num_prompt_tokens"][i] = size
        ints["max_len"][i] = request.max_len
        if isinstance(params, SamplingParams):
            ints["top_k"][i] = min(params.top_k, 2**31 - 1)
            ints["min_len"][i] = min(size + params.min_tokens, request.max_len)
            floats["temperature"][i] = 0 if params.is_greedy else params.temperature
            floats["top_p"][i] = params.top_p
            floats["min_p"][i] = params.min_p
            first = row if output.index == 0 else first
            parent[i] = count if output.index == 0 else first
        seed[i] = output.seed
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        root[i] = -1 if roots is None else roots[row]
    columns: dict[str, Any] = {"rows": rows, "tokens": tokens, "root": root, "parent": parent}
    columns |= {name: ints.pop(name) for name in ("num_prompt_tokens", "max_len")}
    parameters: dict[str, Any] = ints | floats | {"seed": seed, "stop_ids": stop_ids}
    return NewSequences(**columns, sampling=SamplingRows(**parameters))


def to_beams(outputs: dict[int, Output], config: EngineConfig) -> NewBeams | None:
    """The beam groups among them, padded like `to_rows`; None where there is none."""
    count, width = config.rows, config.max_beam_width
    groups: dict[int, list[int]] = {}
    for row, output in outputs.items():
        if isinstance(output.request.params, BeamSearchParams):
            groups.setdefault(id(output.request), []).append(row)
    if not groups:
        return None
    rows, leader = (np.full(count, count, np.int32) for _ in range(2))
    members, sizes = np.full((count, width), count, np.int32), np.zeros(count, np.int32)
    penalty, early = np.zeros(count, np.float32), np.zeros(count, np.int32)
    at = 0
    for group in groups.values():
        params: Any = outputs[group[0]].request.params
        here = slice(at, at := at + len(group))
        rows[here], leader[here], sizes[here] = group, group[0], len(group)
        members[here, : len(group)] = group
        penalty[here] = params.length_penalty
        early[here] = {True: WHEN_FULL, False: WHEN_BEST, "never": NEVER}[params.early_stopping]
    arrays: list[Any] = [rows, leader, members, sizes, penalty, early]
    return NewBeams(*arrays)
