"""How one request is sampled: the table of sampling parameters, and what users pass.

`PARAMETERS` holds what the device knows of each row. `SamplingParams`, the arguments of `generate`
and the arrays of `SamplingRows` are all checked and made by it. A new parameter is a row here with
its field in `SamplingParams`, its use in `sampler`, and an argument of `generate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_jax.checks import check_bool, check_float, check_int, show
from paged_jax.errors import InvalidRequestError
from paged_jax.unknown_options import answers_unknown_options

HOTTEST = 1e30  # well inside float32; far below, all tokens are equally likely
GREEDY_BELOW = 1e-5  # vLLM's rule: a temperature under this means greedy
LARGEST_INT = 2**31 - 1


class Parameter(NamedTuple):
    """One sampling parameter of a row.

    Attributes:
        dtype: on the device. Of an integer dtype only ints are taken.
        neutral: the value on the device of a row that does not sample.
        accepted: the values that are accepted, in words.
        accepts: the same for a number or an array, which must hold in `dtype` too.
        is_off: the accepted values that mean the same as `neutral`.
    """

    name: str
    dtype: type[np.generic]
    neutral: int | float
    accepted: str
    accepts: Callable[[Any], Any]
    is_off: Callable[[Any], Any] = lambda x: x != x

    @property
    def is_int(self) -> bool:
        """Whether only ints are taken."""
        return issubclass(self.dtype, np.integer)

    def is_accepted(self, value: Any) -> Any:
        """Return whether a number, or each of an array, is accepted as it is and in `dtype`."""
        with np.errstate(over="ignore"):
            narrow = np.asarray(value).astype(self.dtype)
        return self.accepts(value) & self.accepts(narrow)

    def canonical(self, value: Any) -> Any:
        """Return the one form of equal values, for an accepted number or an array of `dtype`."""
        if isinstance(value, int | float):
            return type(value)(self.neutral) if self.is_off(value) else value
        where: Any = np.where if isinstance(value, np.ndarray) else jnp.where
        return where(self.is_off(value), self.dtype(self.neutral), value)

    def check(self, value: object) -> int | float:
        """Return `value` in canonical form. Raises InvalidRequestError where it is not accepted."""
        error = InvalidRequestError
        if not self.is_int:
            number = check_float(self.name, value, self.accepted, self.is_accepted, error=error)
            return self.canonical(number)
        number = check_int(self.name, value, -(2**63), None, error=error)
        if not self.accepts(number):
            raise error(f"{self.name}={number}: must be {self.accepted}")
        return self.canonical(min(number, LARGEST_INT))


PARAMETERS = (
    Parameter(
        name="temperature",
        dtype=np.float32,
        neutral=0,
        accepted=f"from 0 to {HOTTEST:g}",
        accepts=lambda x: (x >= 0) & (x <= HOTTEST),
        is_off=lambda x: x < GREEDY_BELOW,
    ),
    Parameter(
        name="top_k",
        dtype=np.int32,
        neutral=0,
        accepted="at least -1",
        accepts=lambda x: x >= -1,
        is_off=lambda x: x <= 0,
    ),
    Parameter(
        name="top_p",
        dtype=np.float32,
        neutral=1,
        accepted="in (0, 1] as a float32",
        accepts=lambda x: (x > 0) & (x <= 1),
    ),
    Parameter(
        name="min_p",
        dtype=np.float32,
        neutral=0,
        accepted="in [0, 1]",
        accepts=lambda x: (x >= 0) & (x <= 1),
    ),
)


@answers_unknown_options
@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Raises InvalidRequestError naming the first that is not accepted.

    Attributes:
        n: outputs, each with a random stream of its own; the prompt is computed once. Above 1 only
            with sampling.
        temperature: 0 (or below 1e-5) is greedy, and then the filters are off.
        top_k: keep the k likeliest tokens; 0 or -1 is off. More than the vocabulary is all of it.
        top_p: keep the fewest likeliest tokens of which the probabilities reach this, in (0, 1].
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
    stop_token_ids: Sequence[int] = ()
    n: int = 1

    def __post_init__(self):
        for parameter in PARAMETERS:
            _put(self, parameter.name, parameter.check(getattr(self, parameter.name)))
        if self.seed is not None:
            _put_int(self, "seed", -(2**63))
        if self.max_tokens is not None:
            _put_int(self, "max_tokens", 1)
        _put_int(self, "min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )
        check_bool("ignore_eos", self.ignore_eos, error=InvalidRequestError)
        ids = check_ids("stop_token_ids", self.stop_token_ids)
        _put(self, "stop_token_ids", tuple(dict.fromkeys(ids)))
        _put_int(self, "n", 1)
        if self.n > 1 and self.is_greedy:
            raise InvalidRequestError(
                f"n={self.n}: greedy outputs would all be equal; 1, or a temperature above 0"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


@answers_unknown_options
@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search for one request: its `beam_width` best outputs, the best first.

    An output's score is its cumulative log-probability / its number of tokens ** `length_penalty`,
    end-of-text counted. Raises InvalidRequestError like SamplingParams.

    Attributes:
        max_tokens: output tokens at most.
        early_stopping: True ends as soon as `beam_width` outputs are finished; False when the best
            live beam, as long as it is now, is no better than the worst of them; "never" when no
            live beam could become better at any length.
        ignore_eos: go on after end-of-text.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self):
        _put_int(self, "beam_width", 1)
        _put_int(self, "max_tokens", 1)
        penalty = check_float(
            "length_penalty",
            self.length_penalty,
            "a finite float32",
            lambda x: abs(x) <= float(np.finfo(np.float32).max),
            error=InvalidRequestError,
        )
        _put(self, "length_penalty", penalty)
        stopping = self.early_stopping
        if not isinstance(stopping, bool | str) or stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f"early_stopping={show(stopping)}: must be True, False or 'never'"
            )
        check_bool("ignore_eos", self.ignore_eos, error=InvalidRequestError)


type Params = SamplingParams | BeamSearchParams


def check_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Return a sequence of token ids as plain ints. Raises InvalidRequestError."""
    is_row = isinstance(ids, Sequence) or (isinstance(ids, np.ndarray) and ids.ndim == 1)
    if isinstance(ids, str | bytes) or not is_row:
        raise InvalidRequestError(f"{name}={show(ids)}: a sequence of token ids is needed")
    return tuple(check_int(name, token, 0, None, error=InvalidRequestError) for token in ids)


def _put(params: Any, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _put_int(params: Any, name: str, least: int) -> None:
    value = check_int(name, getattr(params, name), least, None, error=InvalidRequestError)
    _put(params, name, value)
