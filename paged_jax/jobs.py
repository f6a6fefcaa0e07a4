"""The prompts of one `LLM.generate` call as their outputs grow: text, times, a progress bar."""

import time

from paged_jax.engine.report import Update
from paged_jax.models import Detokenizer, Tokenizer
from paged_jax.outputs import CompletionOutput, Metrics, RequestOutput


class GrowingOutput:
    """One output as it grows."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continues=True)
        self.text = ""
        self.last: Update | None = None

    def take(self, update: Update) -> str | None:
        """Add an update and return the text that it completes."""
        self.tokens += update.token_ids
        self.logprobs += update.logprobs
        ended = update.finish_reason is not None
        self.last = update if ended else None
        if self.detokenizer is None:
            return None
        new = self.detokenizer.push(update.token_ids) + (self.detokenizer.flush() if ended else "")
        self.text += new
        return new

    def completion(self, index: int) -> CompletionOutput:
        """Return the whole output, when it has ended."""
        assert self.last is not None and self.last.finish_reason is not None
        return CompletionOutput(
            index=index,
            text=None if self.detokenizer is None else self.text,
            token_ids=self.tokens,
            cumulative_logprob=sum(self.logprobs),
            logprobs=self.logprobs,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
        )


class Job:
    """One prompt of a `generate` call as its outputs grow."""

    def __init__(
        self,
        index: int,
        prompt: str | None,
        tokens: list[int],
        tokenizer: Tokenizer | None,
        num_outputs: int,
    ):
        self.index, self.prompt = index, prompt
        self.prompt_tokens = [int(token) for token in tokens]
        self.outputs = [GrowingOutput(tokenizer) for _ in range(num_outputs)]
        self.arrival, self.first, self.num_cached = time.perf_counter(), None, 0

    def take(self, update: Update) -> bool:
        """Add an update and return whether all outputs have ended."""
        if self.first is None and update.token_ids:
            self.first = time.perf_counter()
        if update.index == 0:
            self.num_cached = update.num_cached_tokens
        self.outputs[update.index].take(update)
        return all(output.last is not None for output in self.outputs)

    def output(self) -> RequestOutput:
        """Return the outputs, when all have ended."""
        completions = [output.completion(index) for index, output in enumerate(self.outputs)]
        # A beam search may find fewer outputs than beams, where the vocabulary has no more.
        completions = [
            c for c in completions if c.token_ids or c.index == 0 or c.finish_reason != "length"
        ]
        metrics = Metrics(self.arrival, self.first, time.perf_counter())
        return RequestOutput(
            self.prompt, self.prompt_tokens, completions, metrics, num_cached_tokens=self.num_cached
        )


def progress_bar(total: int):
    """Return a function of (new tokens, whether a request ended), or None where tqdm is absent.

    None as tokens closes the bar.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bar, start, tokens = (
        tqdm(total=total, desc="requests", dynamic_ncols=True),
        time.perf_counter(),
        0,
    )

    def advance(new: int | None, ended: bool) -> None:
        nonlocal tokens
        if new is None:
            bar.close()
            return
        tokens += new
        bar.set_postfix_str(
            f"{tokens} tokens, {tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False
        )
        bar.update(int(ended))

    return advance
