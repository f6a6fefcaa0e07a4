"""Workloads of the comparison with other systems: the same token ids for each of them.

Needs numpy alone, for it is read in every system's own environment.
"""

from typing import NamedTuple

import numpy as np

FIRST_TOKEN, VOCAB_SIZE = 17, 49152  # what is below are SmolLM2's special tokens
NAMES = ("W1", "W2", "W3", "S")


class Workload(NamedTuple):
    """Prompts, and what is wanted of each: `n` outputs of exactly `max_new` tokens."""

    prompts: list[list[int]]
    max_new: list[int]
    n: int
    temperature: float
    title: str

    @property
    def lengths(self) -> list[int]:
        """Return the length of each output, the samples of a prompt side by side."""
        return [length for length in self.max_new for _ in range(self.n)]


def get(name: str) -> Workload:
    """Return the workload of this name. Its tokens are always the same."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(FIRST_TOKEN, VOCAB_SIZE, count).tolist()

    if name == "W1":
        lengths, max_new = rng.integers(16, 257, 64), rng.integers(8, 129, 64)
        prompts = [tokens(int(length)) for length in lengths]
        title = "64 prompts of 16 to 256 tokens, 8 to 128 new tokens each, greedy"
        return Workload(prompts, max_new.tolist(), 1, 0.0, title)
    if name == "W2":
        prompts = [tokens(256) for _ in range(8)]
        title = "8 prompts of 256 tokens, 8 samples of 64 new tokens each"
        return Workload(prompts, [64] * 8, 8, 1.0, title)
    if name == "W3":
        shared = tokens(512)
        prompts = [shared + tokens(32) for _ in range(32)]
        title = "32 prompts that share 512 tokens and differ in 32, 32 new tokens each, greedy"
        return Workload(prompts, [32] * 32, 1, 0.0, title)
    if name == "S":
        title = "one prompt of 128 tokens, 128 new tokens, greedy"
        return Workload([tokens(128)], [128], 1, 0.0, title)
    raise ValueError(f"workload {name!r} is none of {', '.join(NAMES)}")


def warm_up(workload: Workload) -> Workload:
    """Return a tiny workload of the same kind, with tokens of its own."""
    prompt = list(range(100, 116))
    return Workload([prompt], [4], workload.n, workload.temperature, "warm-up")
