"""How long prompts and outputs are, and when they arrive: what the simulated runs are given.

The PagedAttention paper (Kwon et al., SOSP 2023, figure 11) gives the mean lengths of the requests
that it drew from two data sets. Their spread is in a figure only. Here lengths are log-normal with
those means; the sigmas are ours, an assumption:

    ShareGPT-like    prompt mean 161, sigma 1.2    output mean 338, sigma 1.0
    Alpaca-like      prompt mean  19, sigma 0.5    output mean  58, sigma 1.0

Cut to 1 to 1024 prompt tokens and 1 to 1024 output tokens, so that 2048 tokens hold every request.
Mu is chosen such that the mean is met after the cut.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

MAX_LEN, MOST = 2048, 1024


class Shape(NamedTuple):
    """Mean after the cut, and sigma of the logarithm before it."""

    mean: float
    sigma: float


class Mix(NamedTuple):
    """A kind of requests."""

    name: str
    prompt: Shape
    output: Shape


SHAREGPT = Mix("ShareGPT-like", Shape(161, 1.2), Shape(338, 1.0))
ALPACA = Mix("Alpaca-like", Shape(19, 0.5), Shape(58, 1.0))
# Normal quantiles, on which a mean is computed: the same numbers on every machine.
QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])


def to_lengths(normal: np.ndarray, mu: float, sigma: float, most: int) -> np.ndarray:
    """Return whole lengths from 1 to `most` of standard normal numbers."""
    return np.clip(np.rint(np.exp(mu + sigma * normal)), 1, most).astype(np.int32)


def fit_mu(shape: Shape, most: int = MOST) -> float:
    """Return mu of the log-normal that has the mean after the cut, by bisection."""
    low, high = 0.0, float(np.log(most))
    for _ in range(50):
        mu = (low + high) / 2
        if to_lengths(QUANTILES, mu, shape.sigma, most).mean() < shape.mean:
            low = mu
        else:
            high = mu
    return (low + high) / 2


def draw(mix: Mix, count: int, seed: int, most: int = MOST) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt and output lengths of `count` requests."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        to_lengths(rng.standard_normal(count), fit_mu(shape, most), shape.sigma, most)
        for shape in (mix.prompt, mix.output)
    )
    return prompts, outputs


def poisson_arrivals(rate: float, count: int, seed: int) -> np.ndarray:
    """Return the times in seconds at which requests arrive, `rate` of them a second.

    The same seed gives the same pattern at every rate, only faster or slower.
    """
    gaps = np.random.default_rng(seed + 1).exponential(1.0, count)
    return np.cumsum(gaps) / rate


def next_power_of_two(lengths: np.ndarray) -> np.ndarray:
    """Return the least powers of two that are not less.

    25 -> 32, 32 -> 32
    """
    return (2 ** np.ceil(np.log2(lengths))).astype(np.int32)


def reservations(prompts: np.ndarray, outputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the slots that contiguous allocation holds for each request from start to end.

    As the paper's three forms of Orca: what a model can hold; the prompt and the next power of two
    of the output; the prompt and the output (which nobody knows beforehand).
    """
    return {
        "max": np.full_like(prompts, MAX_LEN),
        "pow2": prompts + next_power_of_two(outputs),
        "oracle": prompts + outputs,
    }
