"""Say what a decoding step of an engine should cost a GPU. A model: nothing is measured here.

The work list is the kernels' own (`kernels.paged_attention.splits`), made on the CPU. Of it follow
the programs that have work, the longest of them, and the bytes that are read. The times are those
numbers times the constants below, all of them assumptions, to be compared with a GPU's.
"""

import argparse
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from paged_jax.kernels.paged_attention.dispatch import num_programs
from paged_jax.kernels.paged_attention.mosaic_gpu_program import CHUNK
from paged_jax.kernels.paged_attention.splits import Cut, list_work, split_bounds
from paged_jax.kernels.paged_attention.tiles import QueryTiles

DEVICE = "NVIDIA H200"
BANDWIDTHS = {  # bytes a second, as published
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA B200": 8.0e12,
}
BANDWIDTH = BANDWIDTHS[DEVICE]
REACHED = 0.85  # of it, by large reads
CYCLES_A_CHUNK = 1_050  # of a program's arithmetic on 64 tokens, on paper
CLOCK = 1.755e9
LAUNCH = 2.5e-6  # seconds from one small kernel to the next, in a graph or not
SYNC = 15e-6  # seconds until the host has read a predicate and launched what follows

WIDTH, TABLE_TOKENS = 256, 131_072  # the engine's: rows that may run, tokens of a row


class Model(NamedTuple):
    """The sizes of a decoder, in numbers of its weights and heads."""

    params: float
    layers: int
    kv_heads: int
    group: int
    head_dim: int


LLAMA_3_8B = Model(params=7.5e9, layers=32, kv_heads=8, group=4, head_dim=128)  # read in a step
KERNELS_A_LAYER, KERNELS_A_STEP, READS_A_STEP = 12, 60, 4  # counted in compiled programs

CASES = {
    "one of 512": [512],
    "one of 32k": [32_768],
    "one of 128k": [131_072],
    "8 of 4k": [4096] * 8,
    "64 of 2k": [2048] * 64,
    "1 of 32k, 63 of 512": [32_768] + [512] * 63,
    "64 ragged": np.random.default_rng(0)
    .lognormal(7.3, 1.0, 64)
    .clip(16, 65_536)
    .astype(int)
    .tolist(),
}


class Attention(NamedTuple):
    """One call of attention over rows with one query each.

    Attributes:
        programs, dead: programs that run, and how many of them find no work.
        mean, most: chunks of context of a program.
        bytes: read of K and V.
        seconds: expected.
    """

    programs: int
    dead: int
    mean: float
    most: int
    bytes: int
    seconds: float


def attention(lengths: list[int], model: Model = LLAMA_3_8B) -> Attention:
    """Return what a call costs in an engine for `WIDTH` rows, with these contexts alive."""
    programs = num_programs(DEVICE, 1, False)
    live = np.zeros(WIDTH, np.int32)
    live[: len(lengths)] = lengths
    row = jnp.arange(WIDTH, dtype=jnp.int32)
    num_rows, one = jnp.asarray(live > 0, jnp.int32), jnp.zeros(1, jnp.int32)
    strips = QueryTiles(row, row, num_rows, jnp.asarray(live) - 1, jnp.int32(len(lengths)), one)
    bounds = split_bounds(1, model.kv_heads)
    cut = Cut(1, model.group, TABLE_TOKENS, *bounds, CHUNK, None)
    work, _ = list_work(strips, cut, cut.max_lines(WIDTH, WIDTH))
    count = int(work.num_splits[0])
    chunks = -(-np.asarray(work.end - work.start)[:count] // CHUNK)
    units = np.repeat(chunks, model.kv_heads)
    loads = np.bincount(np.arange(units.size) % programs, units, programs)
    size = int(2 * 2 * sum(lengths) * model.kv_heads * model.head_dim)
    # A program takes the longer of its arithmetic and its share of the bandwidth, which programs
    # without work leave to the others up to twice.
    busy = int((loads > 0).sum())
    chunk_bytes = 2 * 2 * CHUNK * model.head_dim
    share = BANDWIDTH * REACHED / max(busy, programs / 2)
    seconds = int(loads.max()) * max(CYCLES_A_CHUNK / CLOCK, chunk_bytes / share) + LAUNCH
    return Attention(programs, programs - busy, loads.mean(), int(loads.max()), size, seconds)


def step_seconds(call: Attention, model: Model = LLAMA_3_8B, syncs: int = READS_A_STEP) -> float:
    """Return the expected seconds of a greedy step: weights, attention, launches, syncs."""
    weights = 2 * model.params / (BANDWIDTH * REACHED)
    launches = (KERNELS_A_LAYER * model.layers + KERNELS_A_STEP) * LAUNCH
    return weights + model.layers * call.seconds + launches + syncs * SYNC


def print_model() -> None:
    """Print the table of all cases."""
    print(f"\nExpected, not measured: {DEVICE}, Llama-3-8B in bfloat16, an engine for {WIDTH} rows")
    print(f"of up to {TABLE_TOKENS:,} tokens. From the kernels' own list of work and these")
    print(f"assumptions: {REACHED:.0%} of {BANDWIDTH / 1e12} TB/s, {CYCLES_A_CHUNK:,} cycles a")
    print(f"chunk of {CHUNK} tokens at {CLOCK / 1e9} GHz, {LAUNCH * 1e6} us a kernel")
    print(f"({KERNELS_A_LAYER} a layer, {KERNELS_A_STEP} a step),", end=" ")
    print(f"{READS_A_STEP} syncs a step of {SYNC * 1e6:.0f} us.\n")
    print(f"{'live rows':>20} {'programs':>9} {'dead':>5} {'longest':>8} {'MB':>8} {'floor us':>9} "
          f"{'us':>8} {'step ms':>8} {'no syncs':>9}")  # fmt: skip
    for name, lengths in CASES.items():
        call = attention(lengths)
        floor = call.bytes / BANDWIDTH * 1e6
        steps = [step_seconds(call, syncs=syncs) * 1e3 for syncs in (READS_A_STEP, 0)]
        print(f"{name:>20} {call.programs:>9} {call.dead:>5} {call.most / call.mean:>7.2f}x "
              f"{call.bytes / 1e6:>8.1f} {floor:>9.1f} {call.seconds * 1e6:>8.1f} "
              f"{steps[0]:>8.2f} {steps[1]:>9.2f}")  # fmt: skip
    print("\nlongest: chunks of the busiest program by the mean of all")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print_model()
