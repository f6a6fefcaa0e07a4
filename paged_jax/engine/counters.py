"""Counters of what happened since an engine's state was made.

They are few arrays, because each array is a kernel in every step. The names of their entries stand
in one place. A total has two words of 32 bits, because JAX has no wider integers unless x64 is on:
it is exact up to 2**64.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Int, UInt

# Each name is the meaning of one entry.
TOTALS = (
    "steps",
    "preemptions",
    "computed_tokens",
    "generated_tokens",  # sampled tokens; those of beams are not among them
    "queried_tokens",  # prompt tokens of sequences that started
    "hit_tokens",  # how many of them were found in the cache
    "copied_blocks",  # blocks copied because a sequence wrote into a shared one
    "eventful_steps",  # steps that admitted, preempted, copied or released
    "block_steps",  # blocks in use, summed over steps
    "empty_slot_steps",  # slots in them that hold no token, likewise
)
PEAKS = (
    "peak_blocks",  # most blocks in use in one step
    "peak_running",  # most sequences running in one step
)


class Counters(struct.PyTreeNode):
    """Entries in the order of TOTALS and PEAKS; each is an attribute by its name, an int.

    In a program, where it is traced, a total's attribute is its low word.

    Attributes:
        totals: the low words, then the high words.
    """

    totals: UInt[Array, "2 totals"]
    peaks: Int[Array, "peaks"]

    def __getattr__(self, name: str) -> Any:
        if name in TOTALS:
            words = self.totals[:, TOTALS.index(name)]
            if isinstance(words, Tracer):
                return words[0]
            low, high = np.asarray(words).tolist()
            return low + (high << 32)
        if name in PEAKS:
            peak = self.peaks[PEAKS.index(name)]
            return peak if isinstance(peak, Tracer) else int(peak)
        raise AttributeError(f"{type(self).__name__} has no counter {name!r}")

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values."""
        return [(name, getattr(self, name)) for name in (*TOTALS, *PEAKS)]


def init_counters() -> Counters:
    """Return counters at 0."""
    return Counters(
        totals=jnp.zeros((2, len(TOTALS)), jnp.uint32), peaks=jnp.zeros(len(PEAKS), jnp.int32)
    )


def add_totals(counters: Counters, **counts: Int[Array, ""]) -> Counters:
    """Add to the totals of those names; no count is negative.

    low 2**32 - 1, high 0, count 3 -> low 2, high 1
    """
    totals = counters.totals
    # Arithmetic of one element each, which XLA makes one kernel: a concatenation would be another.
    index = jnp.arange(len(TOTALS), dtype=jnp.int32)
    added = jnp.zeros_like(totals[0])
    for name, count in counts.items():
        added += jnp.where(index == TOTALS.index(name), count.astype(jnp.uint32), jnp.uint32(0))
    carry = (totals[0] + added < added).astype(jnp.uint32)
    is_low = jnp.arange(2, dtype=jnp.int32)[:, None] == 0
    return counters.replace(totals=totals + jnp.where(is_low, added[None], carry[None]))


def raise_peaks(counters: Counters, **values: Int[Array, ""]) -> Counters:
    """Raise the peaks to values, one for every name of PEAKS."""
    peaks = jnp.stack([values[name] for name in PEAKS])
    return counters.replace(peaks=jnp.maximum(counters.peaks, peaks))
