"""`LLM`: a model, its text and an engine, with the names that users of vLLM know."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from paged_jax.default_sizes import choose_sizes
from paged_jax.engine import Engine
from paged_jax.errors import ConfigError, InvalidRequestError
from paged_jax.jobs import GrowingOutput, Job, progress_bar
from paged_jax.models import Tokenizer, load_model
from paged_jax.outputs import Delta, RequestOutput
from paged_jax.report import STEPS_PER_DISPATCH, Update
from paged_jax.requests import Params
from paged_jax.sampling_params import SamplingParams

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
        enable_prefix_caching: prompts that begin like earlier ones, or like another's output, do not compute that part again.
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
        enable_prefix_caching: bool = True,
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
        config = choose_sizes(decoder, block_size, num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens)
        config = replace(config, enable_prefix_caching=enable_prefix_caching)
        self.engine = Engine(*nnx.split(decoder), config, seed=seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (a text or token ids); outputs in the prompts' order.

        `sampling_params`: one for all, or one a prompt; `BeamSearchParams` search instead of sampling. `cache_salt`, likewise:
        prompts find only those cached tokens that were computed under the same salt.

        Raises InvalidRequestError for a bad prompt given alone; in a list it warns, and that prompt's output says so in
        `error`, while the others are served.
        """
        if isinstance(prompts, jax.Array):
            prompts = np.asarray(prompts).tolist()
        many = (Sequence, np.ndarray, jax.Array)
        if not isinstance(prompts, many):
            raise InvalidRequestError(f"prompts={prompts!r:.80}: a text, token ids, or a list of either is needed")
        alone = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], many))
        listed: list[Any] = [prompts] if alone else list(prompts)
        if isinstance(sampling_params, Params.__value__) or sampling_params is None:
            one: Any = sampling_params or SamplingParams()
            params: list[Params] = [one] * len(listed)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise InvalidRequestError(
                f"sampling_params={sampling_params!r:.80}: SamplingParams, BeamSearchParams, or a list of them, are needed"
            )
        if cache_salt is None or isinstance(cache_salt, str):
            salts: list[Any] = [cache_salt] * len(listed)
        elif isinstance(cache_salt, Sequence):
            salts = list(cache_salt)
        else:
            raise InvalidRequestError(f"cache_salt={cache_salt!r:.80}: a str, or a list of them, is needed")
        for name, values in (("sampling_params", params), ("cache_salt", salts)):
            if len(values) != len(listed):
                raise InvalidRequestError(f"{name}: {len(values)} for {len(listed)} prompts; one, or one a prompt")
        return self._generate(listed, params, salts, progress, alone)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]) or a list of them, by the model's chat template.

        Raises InvalidRequestError for messages that are none, or that the template refuses.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequestError(f"messages={messages!r:.80}: a list of messages, or of such lists, is needed")
        if len(messages) == 0:
            raise InvalidRequestError("messages=[]: at least one message is needed")
        many: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        prompts = [self._apply_template(conversation) for conversation in many]
        return self.generate(prompts, sampling_params, cache_salt=cache_salt, progress=progress)

    def _apply_template(self, conversation: Any) -> "_Text":
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise InvalidRequestError(f"messages: {conversation!r:.80}; a list of messages is needed")
        for message in conversation:
            fields = message if isinstance(message, Mapping) else {}
            if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
                raise InvalidRequestError(
                    f"messages: {message!r:.80}; each must be a mapping with the texts 'role' and 'content'"
                )
        tokenizer = self._need_tokenizer()
        try:
            text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        except ValueError as error:
            raise InvalidRequestError(f"messages: {error}") from error
        return _Text(text)  # the template writes the special tokens itself

    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, *, cache_salt: str | None = None
    ) -> Iterator[Delta]:
        """The outputs of one prompt as they grow, those of a beam search at its end. Closing the iterator aborts the request."""
        if isinstance(prompt, list | tuple) and any(isinstance(part, str) for part in prompt):
            raise InvalidRequestError(f"prompt={prompt!r:.80}: a stream is of one prompt, a text or token ids")
        _, tokens = self._encode(prompt)
        self.engine.check_request(tokens, sampling_params, cache_salt=cache_salt)
        return self._stream(tokens, sampling_params, cache_salt)

    def stats(self) -> dict[str, float]:
        """What the engine did so far, as of the last dispatch that was read.

        `waste` is the share of slots in allocated blocks that held no token, over all steps; `hit_rate` the share of the
        prompts' tokens that was found in the cache.
        """
        counters = self.engine.counters
        values = {} if counters is None else {name: value.item() for name, value in counters.items()}
        in_use, empty = values.pop("block_steps", 0.0), values.pop("empty_block_steps", 0.0)
        queried = values.get("queried_tokens", 0)
        return values | {
            "waste": empty / in_use if in_use else 0.0,
            "hit_rate": values["hit_tokens"] / queried if queried else 0.0,
            "num_blocks": self.engine.config.num_blocks,
        }

    def update_params(self, params) -> None:
        """Go on with other params of the same shapes (`nnx.split(model)[1]`). What the old ones computed is never found again."""
        self.engine.update_params(params)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. False, and nothing is changed, while requests run."""
        return self.engine.reset_prefix_cache()

    # ------------------------------------------------------------------------------------------------------------

    def _generate(
        self, prompts: list[Any], params: list[Params], salts: list[Any], progress: bool, alone: bool
    ) -> list[RequestOutput]:
        ready: list[tuple[Job, Params, str | None]] = []
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        for i, (prompt, one, salt) in enumerate(zip(prompts, params, salts, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            try:
                text, tokens = self._encode(prompt)
                self.engine.check_request(tokens, one, cache_salt=salt)
            except InvalidRequestError as error:
                if alone:
                    raise
                warnings.warn(f"prompts[{i}] is not served: {error}", stacklevel=3)
                outputs[i] = RequestOutput(text, [], [], None, error=error)
                continue
            ready.append((Job(i, text, tokens, self.tokenizer), one, salt))
        # All are checked before the first is queued: what goes wrong above leaves nothing behind.
        jobs = {self.engine.add_request(job.prompt_tokens, one, cache_salt=salt): job for job, one, salt in ready}
        for request_id, job in jobs.items():
            job.start(self.engine.num_outputs(request_id))
        bar = progress_bar(len(jobs)) if progress and jobs else None
        for update in self._updates(jobs):
            job = jobs[update.request_id]
            ended = job.take(update)
            if ended:
                outputs[job.index] = job.output()
            if bar is not None:
                bar(len(update.token_ids), ended)
        if bar is not None:
            bar(None, False)
        return [output for output in outputs if output is not None]

    def _updates(self, requests: Mapping[str, Any], steps: int = STEPS_PER_DISPATCH) -> Iterator[Update]:
        """Updates of `requests` until all have ended; while one dispatch is read, the next is under way."""
        flying, open_ids = None, {request_id: self.engine.num_outputs(request_id) for request_id in requests}
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
                            open_ids[update.request_id] -= 1
                            if open_ids[update.request_id] == 0:
                                del open_ids[update.request_id]
                        yield update
        finally:
            # Interrupted, or closed early: nothing of ours may stay behind.
            for request_id in open_ids:
                self.engine.abort(request_id)
            if flying is not None:
                self.engine.hold([u for u in self.engine.collect(flying) if u.request_id not in requests])
            if open_ids:
                self.engine.hold([u for u in self.engine.run(1) if u.request_id not in requests])

    def _stream(self, tokens: list[int], params: Params | None, cache_salt: str | None) -> Iterator[Delta]:
        request_id = self.engine.add_request(tokens, params, cache_salt=cache_salt)
        texts = [GrowingOutput(self.tokenizer) for _ in range(self.engine.num_outputs(request_id))]
        for update in self._updates({request_id: None}, steps=1):
            text = texts[update.index].take(update)
            yield Delta(text, update.token_ids, update.logprobs, update.finish_reason, update.stop_reason, update.index)

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
