"""`LLM`: a model, its text and an engine, with the names that users of vLLM know."""

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from paged_jax.checks import show
from paged_jax.compile_cache import use_compile_cache
from paged_jax.default_sizes import choose_sizes, choose_widths
from paged_jax.engine.engine import Engine
from paged_jax.engine.report import STEPS_PER_DISPATCH, Update
from paged_jax.errors import EngineClosedError, InvalidRequestError
from paged_jax.generation_defaults import sampling_params
from paged_jax.jobs import GrowingOutput, Job, progress_bar
from paged_jax.llm_arguments import (
    Message,
    Prompt,
    TemplateText,
    list_conversations,
    list_params,
    list_prompts,
    list_salts,
)
from paged_jax.llm_parts import read_parts
from paged_jax.models import Tokenizer
from paged_jax.outputs import Delta, RequestOutput
from paged_jax.sampling.parameters import Params, SamplingParams
from paged_jax.unknown_options import answers_unknown_options


@answers_unknown_options
class LLM:
    """Generate text with a model.

    Any number of threads may call it at once: their requests share the batch. An interrupted call
    aborts its own requests. Where it took the engine's state with it, the next call goes on with
    new pages, and requests of other threads are computed again.

    Args:
        model: a path or name for `load_model`, or a decoder module (`paged_jax.models.Decoder`).
        tokenizer: instead of a checkpoint's own, which is then not read. Without any, prompts are
            token ids and outputs have no text.
        dtype: of the params, see `load_model`; a module keeps its own.
        num_blocks: of the KV cache; None takes what memory allows, and no more than all sequences
            can use.
        max_model_len: tokens of a sequence, prompt and output; None is the model's, or what the
            cache holds.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: token budget of a step.
        enable_prefix_caching: prompts that begin like earlier ones, or like another's output, skip
            that part.
        watermark: share of the blocks that stays free when a sequence starts beside others.
        widths: token counts that a step is compiled for, see `config.token_widths`. None serves
            with a few at first, and on a CPU compiles more in the background: a step then costs
            what its tokens cost.
        seed: of the random streams of requests that have none.

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
        watermark: float = 0.0,
        widths: tuple[int, ...] | None = None,
        seed: int = 0,
    ):
        use_compile_cache()
        parts = read_parts(model, tokenizer, dtype)
        self.tokenizer, self._generation_settings = parts.tokenizer, parts.settings
        config = choose_sizes(
            parts.decoder,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            watermark=watermark,
        )
        first, later = choose_widths(config) if widths is None else (widths, None)
        self.engine = Engine(
            *nnx.split(parts.decoder),
            config,
            widths=first,
            later_widths=later,
            load=parts.load,
            seed=seed,
        )

    @answers_unknown_options
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, and return outputs in the prompts' order.

        Args:
            prompts: a text, token ids, or a list of either.
            sampling_params: one for all, or one a prompt; `BeamSearchParams` search instead of
                sampling.
            cache_salt: a str, or one (or None) a prompt: prompts hit only those cached tokens that
                were computed under the same salt.
            progress: show a progress bar.

        Raises InvalidRequestError for a bad prompt given alone. In a list it warns, and that
        prompt's output has the error in `error`, while the others are served.
        """
        listed, is_alone = list_prompts(prompts)
        params = list_params(sampling_params, len(listed))
        salts = list_salts(cache_salt, len(listed))
        return self._generate(listed, params, salts, progress, is_alone)

    @answers_unknown_options
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, [{"role": ..., "content": ...}, ...], or a list of them.

        The model's chat template makes the prompt. Raises InvalidRequestError for what are no
        messages, or messages that the template refuses.
        """
        conversations = list_conversations(messages)
        prompts = [self._apply_template(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, cache_salt=cache_salt, progress=progress)

    def _apply_template(self, conversation: Sequence[Message]) -> TemplateText:
        tokenizer = self._need_tokenizer()
        try:
            text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        except ValueError as error:
            raise InvalidRequestError(f"messages: {error}") from error
        return TemplateText(text)

    @answers_unknown_options
    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Iterator[Delta]:
        """Yield the outputs of one prompt as they grow, those of a beam search at its end.

        Closing the iterator aborts the request at once; its blocks come back with the next
        dispatch. Raises InvalidRequestError like `generate`.
        """
        if isinstance(prompt, list | tuple) and any(isinstance(part, str) for part in prompt):
            raise InvalidRequestError(
                f"prompt={show(prompt)}: a stream is of one prompt, a text or token ids"
            )
        _, tokens = self._encode(prompt)
        request = self.engine.check_request(tokens, sampling_params, cache_salt=cache_salt)
        return self._stream(request.prompt, sampling_params, cache_salt, request.num_outputs)

    def default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation_config.json gives, and our defaults for the rest.

        Warns of what is not supported or not accepted, and leaves it out.
        """
        return sampling_params(self._generation_settings)

    def stats(self) -> dict[str, int | float]:
        """Return what the engine did so far, as of the last dispatch that was read.

        `waste` is the share of slots in allocated blocks that held no token, over all steps.
        `hit_rate` is the share of the prompts' tokens that was found in the cache.
        """
        counters = self.engine.counters
        values = {} if counters is None else dict(counters.items())
        num_used = values.pop("block_steps", 0) * self.engine.config.block_size
        num_empty = values.pop("empty_slot_steps", 0)
        num_queried = values.get("queried_tokens", 0)
        return values | {
            "waste": num_empty / num_used if num_used else 0.0,
            "hit_rate": values["hit_tokens"] / num_queried if num_queried else 0.0,
            "num_blocks": self.engine.config.num_blocks,
        }

    def update_params(self, params: Any) -> None:
        """Go on with other params of the same shapes (`nnx.split(model)[1]`).

        No content that the old ones computed is hit.
        """
        self.engine.reopen()
        self.engine.update_params(params)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. False, and nothing is changed, while requests run."""
        self.engine.reopen()
        return self.engine.reset_prefix_cache()

    # ---------------------------------------------------------------- requests

    def _generate(
        self,
        prompts: list[Any],
        params: list[Params],
        salts: list[str | None],
        progress: bool,
        is_alone: bool,
    ) -> list[RequestOutput]:
        ready: list[tuple[Job, Params, str | None]] = []  # each with its params and its salt
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        for i, (prompt, one, salt) in enumerate(zip(prompts, params, salts, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            try:
                text, tokens = self._encode(prompt)
                count = self.engine.check_request(tokens, one, cache_salt=salt).num_outputs
            except InvalidRequestError as error:
                if is_alone:
                    raise
                warnings.warn(f"prompts[{i}] is not served: {error}", stacklevel=3)
                outputs[i] = RequestOutput(text, [], [], None, error=error)
                continue
            ready.append((Job(i, text, tokens, self.tokenizer, count), one, salt))
        # All are checked before the first is queued: what goes wrong above leaves nothing behind.
        jobs = {self.engine.new_id(): each for each in ready}
        num_open = {request_id: len(job.outputs) for request_id, (job, _, _) in jobs.items()}
        bar = progress_bar(len(jobs)) if progress and jobs else None
        abandon = self.engine.abandoner()
        try:
            for request_id, (job, one, salt) in jobs.items():
                self.engine.add_request(
                    job.prompt_tokens, one, request_id=request_id, cache_salt=salt
                )
            for update in self._updates(num_open):
                job = jobs[update.request_id][0]
                has_ended = job.take(update)
                if has_ended:
                    outputs[job.index] = job.output()
                if bar is not None:
                    bar(len(update.token_ids), has_ended)
        finally:
            abandon(num_open)
            if bar is not None:
                bar(None, False)
        return [output for output in outputs if output is not None]

    def _updates(
        self, num_open: dict[str, int], steps: int = STEPS_PER_DISPATCH
    ) -> Iterator[Update]:
        """Yield the updates of these requests, of so many outputs each, until all have ended.

        Those that have are taken out of `num_open`: their ids may be of others by then. While one
        dispatch is read, the next is under way. Other requests' updates stay in their mailboxes.
        """
        is_first = True
        while num_open:
            # The first is of one step: whoever waits sees soon that something comes.
            self._advance(1 if is_first else steps)
            is_first = False
            for request_id in list(num_open):
                updates = self.engine.take(request_id)
                # Whether it has ended its updates say: another thread may end it at any time.
                num_open[request_id] -= sum(u.finish_reason is not None for u in updates)
                if num_open[request_id] == 0:
                    del num_open[request_id]
                yield from updates

    def _advance(self, steps: int) -> None:
        """Advance the engine, also one that has lost its state in an interrupted call."""
        try:
            self.engine.advance(steps)
        except EngineClosedError:
            self.engine.reopen()

    def _stream(
        self, tokens: list[int], params: Params | None, cache_salt: str | None, count: int
    ) -> Iterator[Delta]:
        request_id = self.engine.new_id()
        num_open = {request_id: count}
        texts = [GrowingOutput(self.tokenizer) for _ in range(count)]
        abandon = self.engine.abandoner()
        try:
            self.engine.add_request(tokens, params, request_id=request_id, cache_salt=cache_salt)
            for update in self._updates(num_open, steps=1):
                yield Delta(
                    texts[update.index].take(update),
                    update.token_ids,
                    update.logprobs,
                    update.finish_reason,
                    update.stop_reason,
                    update.index,
                )
        finally:
            abandon(num_open)

    def _encode(self, prompt: Prompt) -> tuple[str | None, Any]:
        """Return a prompt's text, if it is one, and its tokens."""
        if not isinstance(prompt, str):
            return None, prompt
        if not prompt:
            raise InvalidRequestError("prompt='': at least one character is needed")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"prompt={show(prompt)}: is not valid Unicode: {error.reason}"
            ) from error
        is_template = isinstance(prompt, TemplateText)
        tokens = self._need_tokenizer().encode(prompt, add_special_tokens=not is_template)
        return str(prompt), tokens

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "prompt: is text, but the model has no tokenizer; give token ids, or LLM a "
                "tokenizer"
            )
        return self.tokenizer
