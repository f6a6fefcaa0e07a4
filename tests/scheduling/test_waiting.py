"""The waiting order against a deque: pushes at both ends, pops, removals, round the ring."""

from collections import deque

import jax
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from paged_jax.scheduling import waiting as order
from paged_jax.scheduling.waiting import init_waiting, waiting_rows

SIZE = 5
PROGRAMS = {f.__name__: jax.jit(f) for f in (order.push_back, order.push_front, order.pop_front)}
PROGRAMS |= {f.__name__: jax.jit(f) for f in (order.keep, order.first)}


class AgainstDeque(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.waiting, self.plain = init_waiting(SIZE), deque()

    def after(self, operation, argument):
        self.waiting = PROGRAMS[operation](self.waiting, argument)
        assert waiting_rows(self.waiting) == list(self.plain)
        if self.plain:
            assert int(PROGRAMS["first"](self.waiting)) == self.plain[0]

    def absent(self):
        return [row for row in range(SIZE) if row not in self.plain]

    @rule(data=st.data())
    def push_back(self, data):
        """Padding may stand anywhere among the rows."""
        rows = data.draw(st.permutations([*self.absent()[:2], SIZE, SIZE + 3]))
        self.plain.extend(row for row in rows if row < SIZE)
        self.after("push_back", np.resize(np.asarray(rows + [SIZE] * 4, np.int32), 4))

    @rule(data=st.data())
    def push_front(self, data):
        row = data.draw(st.sampled_from([SIZE, *self.absent()]))
        if row < SIZE:
            self.plain.appendleft(row)
        self.after("push_front", np.int32(row))

    @precondition(lambda self: self.plain)
    @rule(is_popped=st.booleans())
    def pop_front(self, is_popped):
        if is_popped:
            self.plain.popleft()
        self.after("pop_front", np.bool_(is_popped))

    @rule(stays=st.lists(st.booleans(), min_size=SIZE, max_size=SIZE))
    def keep(self, stays):
        self.plain = deque(row for row in self.plain if stays[row])
        self.after("keep", np.asarray(stays))


TestAgainstDeque = AgainstDeque.TestCase
TestAgainstDeque.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
