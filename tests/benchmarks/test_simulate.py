"""The simulator of the benchmarks against a plain one: who starts when, and what is held and
filled.
"""

import pathlib
import sys
from collections import deque

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from lengths import ALPACA, SHAREGPT, draw, next_power_of_two, poisson_arrivals
from loads import make_load
from no_pages import NoPages
from paged_jax import EngineConfig
from simulate import simulate

CONFIG = EngineConfig(65, 64, 8, 64, num_rows=12, block_size=4)
COUNT = 20


class Plain:
    """One step a second; every running request computes all that it has not, in every step."""

    def __init__(self, arrival, prompt, output, held, memory, is_static):
        self.arrival, self.prompt, self.output, self.held = arrival, prompt, output, held
        self.memory, self.is_static = memory, is_static
        self.now, self.queue, self.batch = 0.0, deque(range(len(arrival))), {}
        self.start, self.end = np.zeros(len(arrival)), np.zeros(len(arrival))
        self.reserved = self.filled = self.used = 0.0

    def may_start(self):
        if not self.queue or self.arrival[self.queue[0]] > self.now:
            return False
        held = sum(self.held[i] for i in self.batch)
        return held + self.held[self.queue[0]] <= self.memory

    def run(self):
        while self.queue or self.batch:
            if not self.batch:
                self.now = max(self.now, self.arrival[self.queue[0]])
            is_open = not self.is_static or not self.batch
            while is_open and self.may_start():
                request = self.queue.popleft()
                self.batch[request], self.start[request] = 0, self.now
            self.step()
        return self

    def step(self):
        self.now += 1
        running = [i for i, made in self.batch.items() if made < self.output[i]]
        for i in running:
            filled = self.prompt[i] + self.batch[i]
            self.filled += filled
            self.used += -(-filled // 4) * 4
            self.batch[i] += 1
        self.reserved += sum(self.held[i] for i in self.batch)
        ended = [i for i, made in self.batch.items() if made == self.output[i]]
        if not self.is_static or len(ended) == len(self.batch):
            for i in ended:
                self.end[i] = self.now
                del self.batch[i]


@pytest.mark.parametrize("policy", ["static", "max", "oracle", "paged"])
def test_the_simulator_starts_holds_and_fills_what_a_plain_one_does(policy):
    rng = np.random.default_rng(5)
    prompt, output = rng.integers(1, 6, COUNT), rng.integers(1, 30, COUNT)
    arrival = np.cumsum(rng.exponential(6.0, COUNT))
    held = {"paged": 0 * prompt, "oracle": prompt + output}.get(policy, np.full(COUNT, 36))
    is_static, memory = policy == "static", 110
    load = make_load(arrival, prompt, output, held, memory, is_static)
    ours = simulate(NoPages(64), CONFIG, load)
    plain = Plain(arrival, prompt, output, held, memory, is_static).run()
    np.testing.assert_allclose(ours.start, plain.start)
    np.testing.assert_allclose(ours.end, plain.end)
    assert ours.preemptions == 0
    assert float(ours.sums.filled) == plain.filled
    assert float(ours.sums.reserved) == plain.reserved
    if not is_static:  # blocks of what ended last are given back in the next step
        assert float(ours.sums.used_slots) == plain.used


def test_the_state_is_sound_in_the_middle_of_a_run_that_preempts():
    prompt, output = np.full(COUNT, 8), np.full(COUNT, 50)
    load = make_load(np.zeros(COUNT), prompt, output)
    small = EngineConfig(20, 64, 8, 64, num_rows=12, block_size=4)
    assert simulate(NoPages(64), small, load, max_steps=70).preemptions > 0
    result = simulate(NoPages(64), small, load)
    assert np.all(result.end > 0) and list(np.argsort(result.start, kind="stable")) == [
        *range(COUNT)
    ]


def test_lengths_have_their_means():
    for mix in (SHAREGPT, ALPACA):
        for lengths, shape in zip(draw(mix, 100_000, 0), (mix.prompt, mix.output), strict=True):
            assert lengths.min() >= 1 and lengths.max() <= 1024
            assert lengths.mean() == pytest.approx(shape.mean, rel=0.03)
    assert next_power_of_two(np.array([1, 25, 32, 33])).tolist() == [1, 32, 32, 64]
    gaps = np.diff(poisson_arrivals(4.0, 10_000, 0))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
