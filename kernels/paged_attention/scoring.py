"""What a query sees, how it is scored, and what the stored numbers of quantised pages are worth."""

import math
from typing import NamedTuple

from jaxtyping import Array, Float

# The first running maximum. It is finite: a row that has seen no key makes no inf - inf.
LOWEST = -1e30
LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """How a query and a key make a score. All of it is static."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Scales(NamedTuple):
    """Factors of the numbers in the pages: None for 1, f32[] or f32[N, B, KV] by token."""

    k: Float[Array, "..."] | None = None
    v: Float[Array, "..."] | None = None


def is_visible(position, key_position, scoring: Scoring):
    """Return whether a query at `position` sees a key. Both are arrays of one rank that broadcast.

    Example, window 2: query 5 sees keys 4 and 5; without a window keys 0 to 5.
    """
    is_past = key_position <= position
    if scoring.window is None:
        return is_past
    return is_past & (key_position > position - scoring.window)


def is_in_reach(position, num_rows, key_position, scoring: Scoring):
    """Return whether any of the `num_rows` queries from `position` on sees a key.

    A value that no query sees may be NaN, and 0 * NaN is NaN: such a value is to be replaced by 0.

    Example, window 2: of the queries 5, 6, 7 at least one sees each of the keys 4 to 7.
    """
    is_past = key_position < position + num_rows
    if scoring.window is None:
        return is_past
    return is_past & (key_position > position - scoring.window)
