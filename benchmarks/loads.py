"""What the simulator is given: requests with their reservations, and what a step costs."""

from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


class Cost(struct.PyTreeNode):
    """Seconds of a step: fixed + per_token * tokens computed + per_kv * tokens of K and V read."""

    fixed: Any
    per_token: Any
    per_kv: Any


STEPS = Cost(1.0, 0.0, 0.0)  # time is counted in steps


class Load(struct.PyTreeNode):
    """Requests in order of arrival, and the rules by which they start.

    Attributes:
        arrival: seconds.
        reservation: slots held from start to end, 0 for paging.
        memory: slots of which reservations are taken.
        is_static: a batch starts when the one before has ended; its memory is held, and its answers
            are held back, until its longest request ends.
    """

    arrival: Float[Array, "n"]
    prompt: Int[Array, "n"]
    output: Int[Array, "n"]
    reservation: Int[Array, "n"]
    memory: Int[Array, ""]
    is_static: Bool[Array, ""]


def make_load(
    arrival, prompt, output, reservation=None, memory: int = 0, is_static: bool = False
) -> Load:
    """Return requests as arrays."""
    held = np.zeros_like(prompt) if reservation is None else reservation
    times: Any = np.asarray(arrival, np.float64)
    counts: list[Any] = [np.asarray(x, np.int32) for x in (prompt, output, held)]
    size: Any = np.int32(memory)
    static: Any = np.bool_(is_static)
    return Load(times, counts[0], counts[1], counts[2], size, static)
