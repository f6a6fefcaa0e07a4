"""How one request is sampled: the public parameters, checked when made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from paged_jax.errors import InvalidRequestError

HOTTEST = 1e30  # well inside float32; far below, all tokens are equally likely
GREEDY_BELOW = 1e-5  # vLLM's rule: a temperature under this means greedy


def check_int(name: str, value: object, least: int) -> int:
    """`value` as an int of at least `least`; numpy's integers are accepted, bool is not. Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name}={value!r}: an int is needed, got {type(value).__name__}")
    if value < least:
        raise InvalidRequestError(f"{name}={value}: must be at least {least}")
    return int(value)


def check_float(name: str, value: object, accepted: str, accepts) -> float:
    """`value` as a float for which `accepts` holds; `accepted` says which those are. Raises InvalidRequestError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(f"{name}={value!r}: a number is needed, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not accepts(number):
        raise InvalidRequestError(f"{name}={value!r:.40}: must be {accepted}")
    return number


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Raises InvalidRequestError naming the first that is out of range or of the wrong type.

    Attributes:
        n: outputs, each with a random stream of its own; the prompt is computed once. Above 1 only with sampling.
        temperature: 0 (or below 1e-5) is greedy, and then the filters are off.
        top_k: keep the k likeliest tokens; 0 or -1 is off. More than the vocabulary is all of it.
        top_p: keep the fewest likeliest tokens whose probabilities reach this, in (0, 1].
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1].
        seed: of this request's own random streams; None takes the engine's next.
        max_tokens: output tokens at most; None means as many as max_model_len leaves.
        min_tokens: output tokens before end-of-text or a stop token may come.
        ignore_eos: go on after end-of-text.
        stop_token_ids: tokens that end the output, besides end-of-text; they stay in it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = field(default=())
    n: int = 1

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        temperature = check_float(
            "temperature", self.temperature, f"from 0 to {HOTTEST:g}", lambda x: 0 <= x <= HOTTEST
        )
        put("temperature", temperature)
        put("top_k", max(check_int("top_k", self.top_k, -1), 0))
        put("top_p", check_float("top_p", self.top_p, "in (0, 1]", lambda x: 0 < x <= 1))
        put("min_p", check_float("min_p", self.min_p, "in [0, 1]", lambda x: 0 <= x <= 1))
        if self.seed is not None:
            put("seed", check_int("seed", self.seed, -(2**63)))
        if self.max_tokens is not None:
            put("max_tokens", check_int("max_tokens", self.max_tokens, 1))
        put("min_tokens", check_int("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos={self.ignore_eos!r}: a bool is needed")
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(self.stop_token_ids, Sequence):
            raise InvalidRequestError(f"stop_token_ids={self.stop_token_ids!r}: a sequence of token ids is needed")
        ids = (check_int("stop_token_ids", token, 0) for token in self.stop_token_ids)
        put("stop_token_ids", tuple(dict.fromkeys(ids)))
        put("n", check_int("n", self.n, 1))
        if self.n > 1 and self.is_greedy:
            raise InvalidRequestError(f"n={self.n}: greedy outputs would all be equal; 1, or a temperature above 0")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search for one request: its `beam_width` best outputs, the best first. Raises InvalidRequestError like SamplingParams.

    An output's score is its cumulative log-probability / its number of tokens ** `length_penalty`, end-of-text counted.

    Attributes:
        max_tokens: output tokens at most.
        early_stopping: True ends as soon as `beam_width` outputs are finished; False when the best live beam, as long as it is
            now, is no better than the worst of them; "never" when no live beam could become better at any length.
        ignore_eos: go on after end-of-text.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        put("beam_width", check_int("beam_width", self.beam_width, 1))
        put("max_tokens", check_int("max_tokens", self.max_tokens, 1))
        put("length_penalty", check_float("length_penalty", self.length_penalty, "a finite number", lambda x: True))
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(f"early_stopping={self.early_stopping!r}: must be True, False or 'never'")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos={self.ignore_eos!r}: a bool is needed")
