"""`LLM`: a model, its text and an engine, with the names that users of vLLM know."""

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.config import EngineConfig, require_int
from paged_jax.engine import STEPS_PER_DISPATCH, Engine, Update
from paged_jax.errors import ConfigError, InvalidRequestError
from paged_jax.models import Detokenizer, Tokenizer, load_model
from paged_jax.outputs import CompletionOutput, Delta, Metrics, RequestOutput
from paged_jax.sampling_params import SamplingParams

CPU_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.85  # of what the params leave free

type Prompt = str | Sequence[int]


class LLM:
    """Generate text with a model.

    Args:
        model: a path or name for `load_model`, or a decoder module (`paged_jax.models.Decoder`).
        tokenizer: where `model` is a module; without one, prompts are token ids and outputs have no text.
        dtype: of the params, "auto", "float32" or "bfloat16"; a module keeps its own.
        num_blocks: of the KV cache; None takes what memory allows, and no more than all sequences can use.
        max_model_len: tokens of a sequence, prompt and output; None is the model's, or what the cache holds.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: token budget of a step.
        seed: of the random streams of requests that name none.

    Raises ConfigError naming a size that cannot work, and what `load_model` raises.
    """

    def __init__(
        self,
        model: str | os.PathLike | nnx.Module,
        *,
        tokenizer: Tokenizer | None = None,
        dtype: Any = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        seed: int = 0,
    ):
        if isinstance(model, nnx.Module):
            if dtype != "auto":
                raise ConfigError(f"dtype={dtype!r}: a module keeps the dtype of its params; leave it at 'auto'")
            decoder: Any = model
        else:
            decoder, loaded = load_model(model, dtype)
            tokenizer = loaded if tokenizer is None else tokenizer
        self.tokenizer = tokenizer
        config = _engine_config(decoder, block_size, num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens)
        self.engine = Engine(*nnx.split(decoder), config, seed=seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (a text or token ids); outputs in the prompts' order.

        `sampling_params`: one for all, or one a prompt. Raises InvalidRequestError for a bad prompt given alone; in a list
        it warns, and that prompt's output says so in `error`, while the others are served.
        """
        many = (Sequence, np.ndarray)
        if not isinstance(prompts, many):
            raise InvalidRequestError(f"prompts={prompts!r:.80}: a text, token ids, or a list of either is needed")
        alone = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], many))
        listed: list[Any] = [prompts] if alone else list(prompts)
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [sampling_params or SamplingParams()] * len(listed)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise InvalidRequestError(
                f"sampling_params={sampling_params!r:.80}: SamplingParams, or a list of them, are needed"
            )
        if len(params) != len(listed):
            raise InvalidRequestError(f"sampling_params: {len(params)} for {len(listed)} prompts; one, or one a prompt")
        return self._generate(listed, params, progress, alone)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]) or a list of them, by the model's chat template."""
        if len(messages) == 0:
            raise InvalidRequestError("messages=[]: at least one message is needed")
        many: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        template = self._need_tokenizer().apply_chat_template
        # The template writes the special tokens itself.
        prompts = [_Text(template(conversation, add_generation_prompt=True)) for conversation in many]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """The output of one prompt as it grows. Closing the iterator aborts the request."""
        _, tokens = self._encode(prompt)
        self.engine.check_request(tokens, sampling_params)
        return self._stream(tokens, sampling_params)

    def stats(self) -> dict[str, float]:
        """What the engine did so far, as of the last dispatch that was read.

        `waste` is the share of slots in allocated blocks that held no token, over all steps.
        """
        counters = self.engine.counters
        values = {} if counters is None else {name: value.item() for name, value in counters.items()}
        in_use, filled = values.pop("block_steps", 0.0), values.pop("filled_block_steps", 0.0)
        return values | {"waste": 1 - filled / in_use if in_use else 0.0, "num_blocks": self.engine.config.num_blocks}

    # ------------------------------------------------------------------------------------------------------------

    def _generate(
        self, prompts: list[Any], params: list[SamplingParams], progress: bool, alone: bool
    ) -> list[RequestOutput]:
        ready: list[tuple[_Job, SamplingParams]] = []
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            try:
                text, tokens = self._encode(prompt)
                self.engine.check_request(tokens, one)
            except InvalidRequestError as error:
                if alone:
                    raise
                warnings.warn(f"prompts[{i}] is not served: {error}", stacklevel=3)
                outputs[i] = RequestOutput(text, [], [], None, error=error)
                continue
            ready.append((_Job(i, text, tokens, self.tokenizer), one))
        # All are checked before the first is queued: what goes wrong above leaves nothing behind.
        jobs = {self.engine.add_request(job.prompt_tokens, one): job for job, one in ready}
        bar = _progress_bar(len(jobs)) if progress and jobs else None
        for update in self._updates(jobs):
            job = jobs[update.request_id]
            job.take(update)
            if update.finish_reason is not None:
                outputs[job.index] = job.output(update)
            if bar is not None:
                bar(len(update.token_ids), update.finish_reason is not None)
        if bar is not None:
            bar(None, False)
        return [output for output in outputs if output is not None]

    def _updates(self, requests: Mapping[str, Any], steps: int = STEPS_PER_DISPATCH) -> Iterator[Update]:
        """Updates of `requests` until all have ended; while one dispatch is read, the next is under way."""
        open_ids, flying = set(requests), None
        try:
            while open_ids:
                # The first is of one step: whoever waits sees soon that something comes.
                following = self.engine.dispatch(1 if flying is None else steps)
                before, flying = flying, following
                updates = self.engine.collect(before) if before is not None else []
                self.engine.hold([u for u in updates if u.request_id not in requests])
                for update in updates:
                    if update.request_id in requests:
                        if update.finish_reason is not None:
                            open_ids.discard(update.request_id)
                        yield update
        finally:
            # Interrupted, or closed early: nothing of ours may stay behind.
            for request_id in open_ids:
                self.engine.abort(request_id)
            if flying is not None:
                self.engine.hold([u for u in self.engine.collect(flying) if u.request_id not in requests])
            if open_ids:
                self.engine.hold([u for u in self.engine.run(1) if u.request_id not in requests])

    def _stream(self, tokens: list[int], params: SamplingParams | None) -> Iterator[Delta]:
        request_id = self.engine.add_request(tokens, params)
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, continues=True)
        for update in self._updates({request_id: None}, steps=1):
            text = None
            if detokenizer is not None:
                text = detokenizer.push(update.token_ids)
                if update.finish_reason is not None:
                    text += detokenizer.flush()
            yield Delta(text, update.token_ids, update.logprobs, update.finish_reason, update.stop_reason)

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str):
            return None, prompt
        if not prompt:
            raise InvalidRequestError("prompt='': at least one character is needed")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"prompt={prompt!r:.80}: is not valid Unicode: {error.reason}") from error
        return str(prompt), self._need_tokenizer().encode(prompt, add_special_tokens=not isinstance(prompt, _Text))

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "prompt: is text, but the model has no tokenizer; give token ids, or LLM a tokenizer"
            )
        return self.tokenizer


class _Text(str):
    """A prompt that a chat template wrote: its special tokens are in it."""


class _Job:
    """One prompt of a `generate` call as its output grows."""

    def __init__(self, index: int, prompt: str | None, tokens: list[int], tokenizer: Tokenizer | None):
        self.index, self.prompt, self.prompt_tokens = index, prompt, [int(token) for token in tokens]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continues=True)
        self.text = ""
        self.arrival, self.first = time.perf_counter(), None

    def take(self, update: Update) -> None:
        if self.first is None and update.token_ids:
            self.first = time.perf_counter()
        self.tokens += update.token_ids
        self.logprobs += update.logprobs
        if self.detokenizer is not None:
            self.text += self.detokenizer.push(update.token_ids)
            if update.finish_reason is not None:
                self.text += self.detokenizer.flush()

    def output(self, update: Update) -> RequestOutput:
        assert update.finish_reason is not None
        completion = CompletionOutput(
            index=0,
            text=None if self.detokenizer is None else self.text,
            token_ids=self.tokens,
            cumulative_logprob=sum(self.logprobs),
            logprobs=self.logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
        )
        metrics = Metrics(self.arrival, self.first, time.perf_counter())
        return RequestOutput(self.prompt, self.prompt_tokens, [completion], metrics)


def _progress_bar(total: int):
    """A function of (new tokens, whether a request ended); None as tokens closes the bar. None where tqdm is absent."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bar, start, tokens = tqdm(total=total, desc="requests", dynamic_ncols=True), time.perf_counter(), 0

    def advance(new: int | None, ended: bool) -> None:
        nonlocal tokens
        if new is None:
            bar.close()
            return
        tokens += new
        bar.set_postfix_str(f"{tokens} tokens, {tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
        bar.update(int(ended))

    return advance


def _engine_config(
    decoder, block_size, num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens
) -> EngineConfig:
    """Sizes for what was not said."""
    on_cpu = jax.default_backend() == "cpu"
    require_int("block_size", block_size, 1)
    running = (32 if on_cpu else 256) if max_num_seqs is None else require_int("max_num_seqs", max_num_seqs, 1)
    budget = max(running, 128 if on_cpu else 2048) if max_num_batched_tokens is None else max_num_batched_tokens
    length = decoder.max_model_len if max_model_len is None else require_int("max_model_len", max_model_len, 2)
    if length > decoder.max_model_len:
        raise ConfigError(f"max_model_len={length}: the model was made for {decoder.max_model_len} at most")
    groups = len(decoder.kv_groups)
    if num_blocks is not None:
        require_int("num_blocks", num_blocks, 2)
    else:
        wanted = 1 + running * groups * -(-length // block_size)
        num_blocks = max(2, min(wanted, _cache_bytes() // _block_bytes(decoder, block_size)))
    if max_model_len is None:
        length = max(2, min(length, (num_blocks - 1) // groups * block_size))
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=length,
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        block_size=block_size,
    )


def _block_bytes(decoder, block_size: int) -> int:
    layers = max(group.num_layers for group in decoder.kv_groups)
    return 2 * layers * block_size * decoder.num_kv_heads * decoder.head_dim * jnp.dtype(decoder.dtype).itemsize


def _cache_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    if jax.default_backend() == "cpu" or not stats or "bytes_limit" not in stats:
        return CPU_CACHE_BYTES
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * GPU_CACHE_SHARE)
