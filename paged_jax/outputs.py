"""What a caller of `LLM` gets back."""

from dataclasses import dataclass

from paged_jax.errors import InvalidRequestError


@dataclass(frozen=True)
class Metrics:
    """Times of one request, in seconds of `time.perf_counter`."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        text: None where the model has no tokenizer; special tokens are left out.
        logprobs: log-probability of each token under the raw logits.
        finish_reason: "stop" (end-of-text or a stop token), "length", "abort", or "invalid": the
            model's logits held NaN or inf, or left no token to choose.
        stop_reason: the stop token's id; None for end-of-text.
    """

    index: int
    text: str | None
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its outputs, in order of index; those of a beam search the best first.

    Attributes:
        prompt: None where token ids were given.
        error: set, and `outputs` empty, for a prompt in a batch that could not be served. The other
            prompts are served.
        num_cached_tokens: prompt tokens found in the cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: Metrics | None
    error: InvalidRequestError | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """What a stream yields: the tokens since the last, and the text that they complete.

    Attributes:
        text: never part of a character.
        index: which of the request's outputs.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    stop_reason: int | None = None
    index: int = 0
