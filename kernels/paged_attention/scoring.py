"""What a query and a key make, and what the stored numbers of quantised pages are worth."""

import math
from typing import NamedTuple

from jaxtyping import Array, Float

LOWEST = -1e30  # a running maximum's start: finite, so that a row which has seen no key makes no inf - inf
LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """How a query and a key make a score. All of it is static."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Scales(NamedTuple):
    """Factors of the numbers in the pages: None for 1, f32[] for all of them, f32[N, B, KV] by token and KV head."""

    k: Float[Array, "..."] | None = None
    v: Float[Array, "..."] | None = None


NO_SCALES = Scales()
