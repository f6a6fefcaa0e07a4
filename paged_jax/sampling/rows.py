"""Sampling parameters on the device: one array for each parameter of the table, one entry a row."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Shaped, UInt

from paged_jax.sampling.parameters import PARAMETERS


class SamplingRows(struct.PyTreeNode):
    """Sampling parameters of R rows.

    Attributes:
        parameters: an array for each name in `parameters.PARAMETERS`, in device form.
        seed: of the row's own random stream.
        min_len: length, prompt included, before which no stop id may come.
        stop_ids: end-of-text and stop token ids, -1 behind them.
    """

    parameters: dict[str, Shaped[Array, "R"]]
    seed: UInt[Array, "R"]
    min_len: Int[Array, "R"]
    stop_ids: Int[Array, "R K"]


def init_sampling_rows(num_rows: int, max_stop_ids: int) -> SamplingRows:
    """Return greedy rows without stop ids."""
    return SamplingRows(
        parameters={p.name: jnp.full(num_rows, p.neutral, p.dtype) for p in PARAMETERS},
        seed=jnp.zeros(num_rows, jnp.uint32),
        min_len=jnp.zeros(num_rows, jnp.int32),
        stop_ids=jnp.full((num_rows, max_stop_ids), -1, jnp.int32),
    )
