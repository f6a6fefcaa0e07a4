"""Counters of what happened since an engine's state was made.

They are few arrays, because each array is a kernel in every step. The names of their entries stand
in one place.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

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
)
PEAKS = (
    "peak_blocks",  # most blocks in use in one step
    "peak_running",  # most sequences running in one step
)
SUMS = (
    "block_steps",  # blocks in use, summed over steps
    "empty_block_steps",  # slots in them that hold no token / block_size, likewise
)


class Counters(struct.PyTreeNode):
    """Entries in the order of TOTALS, PEAKS and SUMS; each is an attribute by its name.

    Counters that were fetched hold NumPy arrays.
    """

    totals: Int[Array, "totals"]
    peaks: Int[Array, "peaks"]
    sums: Float[Array, "sums"]

    def __getattr__(self, name: str) -> Any:
        for names, array in ((TOTALS, "totals"), (PEAKS, "peaks"), (SUMS, "sums")):
            if name in names:
                return getattr(self, array)[names.index(name)]
        raise AttributeError(f"{type(self).__name__} has no counter {name!r}")

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values."""
        return [(name, getattr(self, name)) for name in (*TOTALS, *PEAKS, *SUMS)]


def init_counters() -> Counters:
    """Return counters at 0."""
    return Counters(
        totals=jnp.zeros(len(TOTALS), jnp.int32),
        peaks=jnp.zeros(len(PEAKS), jnp.int32),
        sums=jnp.zeros(len(SUMS), jnp.float32),
    )


def add_totals(counters: Counters, **counts: Int[Array, ""]) -> Counters:
    """Add to the totals of those names."""
    at = jnp.asarray([TOTALS.index(name) for name in counts])
    totals = counters.totals.at[at].add(jnp.stack([*counts.values()]))
    return counters.replace(totals=totals)


def record(counters: Counters, **values: Int[Array, ""] | Float[Array, ""]) -> Counters:
    """Raise the peaks and add to the sums: a value for every name of PEAKS and SUMS."""
    peaks = jnp.stack([values[name] for name in PEAKS])
    sums = jnp.stack([values[name].astype(jnp.float32) for name in SUMS])
    return counters.replace(peaks=jnp.maximum(counters.peaks, peaks), sums=counters.sums + sums)
