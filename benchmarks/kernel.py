"""Time decoding attention over pages, and compare it with a copy of the same bytes.

    us          one call for a whole batch, one query token a sequence
    of copy     bytes of K and V over the time, as a fraction of what a copy of a large array
                reaches in the same run
    xla         this library's plain JAX path
    jax op      jax.experimental.pallas.ops.gpu.paged_attention
    cudnn       jax.nn.dot_product_attention on contiguous K and V: the price of paging

Then the case of an engine: 256 rows wide, tables of 131,072 tokens, a few rows alive (`gpu_model`).

Where there is no GPU nothing is measured. The floor is printed: the bytes over the published
bandwidth of a device. So is what a model expects of an engine's steps, called that.

Usage: python benchmarks/kernel.py [--group 8] [--dtype bfloat16] [--device "NVIDIA H200"] [--quick]
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

import gpu_model
from gpu_model import BANDWIDTHS
from paged_jax.kernels import plan_attention, ragged_paged_attention
from paged_jax.kernels.paged_attention import dispatch
from paged_jax.kernels.target_device import target_device_kind

BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32_768)
KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
# Calls walk over so many bytes before they come back to the first: more than a GPU's cache.
CACHE_BYTES = 200e6
COPY_BYTES = 2**31


def kv_bytes(batch: int, context: int, dtype) -> int:
    """Return the bytes of K and V that one call has to read."""
    return 2 * batch * context * KV_HEADS * HEAD_DIM * jnp.dtype(dtype).itemsize


def seconds_a_call(step: Callable, start, operands: tuple, calls: int, repeats: int) -> float:
    """Return the median over dispatches of `calls` calls in one compiled loop.

    `step(i, x, *operands)` returns the next x.
    """
    run = jax.jit(
        lambda x, *operands: lax.fori_loop(0, calls, lambda i, x: step(i, x, *operands), x)
    )
    jax.block_until_ready(run(start, *operands))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(start, *operands))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / calls


def copy_bandwidth(repeats: int) -> float:
    """Return the bytes a second, read and written, of copies of an array that no cache holds."""
    x = jnp.zeros(COPY_BYTES // 4, jnp.int32)
    return 2 * COPY_BYTES / seconds_a_call(lambda _, x: x + 1, x, (), 10, repeats)


def num_sets(batch: int, context: int, dtype) -> int:
    """Return how many copies of the batch's K and V the calls take in turn.

    So no call finds in the cache what the call before it has read.
    """
    return min(64, 1 + int(CACHE_BYTES // kv_bytes(batch, context, dtype)))


def ours(
    implementation, batch: int, context: int, group: int, dtype, calls: int, repeats: int
) -> float:
    """Return the seconds a call of this library's attention takes."""
    width, sets = context // BLOCK_SIZE, num_sets(batch, context, dtype)
    num_blocks = 1 + sets * batch * width
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    tables = jnp.asarray(ids.reshape(sets, batch, width))
    kv_lens = jnp.full(batch, context, jnp.int32)
    return _time_calls(implementation, kv_lens, tables, num_blocks, group, dtype, calls, repeats)


def engine_case(lengths: list[int], group: int, dtype, calls: int, repeats: int) -> float:
    """Return the seconds a call takes for these rows in an engine for `gpu_model.WIDTH`."""
    rows, table_width = gpu_model.WIDTH, gpu_model.TABLE_TOKENS // BLOCK_SIZE
    sets = num_sets(1, sum(lengths), dtype)
    widths = [pl.cdiv(length, BLOCK_SIZE) for length in lengths]
    num_blocks = 1 + sets * sum(widths)
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    tables, used = np.zeros((sets, rows, table_width), np.int32), 0
    for number, (row, width) in itertools.product(range(sets), enumerate(widths)):
        tables[number, row, :width] = ids[used : used + width]
        used += width
    kv_lens = jnp.zeros(rows, jnp.int32).at[: len(lengths)].set(jnp.asarray(lengths, jnp.int32))
    arrays = kv_lens, jnp.asarray(tables), num_blocks
    return _time_calls(None, *arrays, group, dtype, calls, repeats)


def _time_calls(
    implementation, kv_lens, tables, num_blocks: int, group: int, dtype, calls: int, repeats: int
) -> float:
    """Time calls over sets of tables in turn; a row of length 0 is not alive."""
    sets, batch = tables.shape[:2]
    num_live = int((kv_lens > 0).sum())
    cu_q_lens = jnp.minimum(jnp.arange(batch + 1, dtype=jnp.int32), num_live)
    pages = jnp.zeros((num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype)
    q, v_pages = _queries(batch, group, dtype), pages + jnp.ones((), dtype)
    index = kv_lens, tables[0], cu_q_lens, jnp.int32(num_live)
    plan = plan_attention(batch, *index, num_blocks=num_blocks, block_size=BLOCK_SIZE, window=None)

    def step(i, q, k_pages, v_pages, tables, index, plan):
        moved = replace(plan, tables=tables[i % sets])
        return ragged_paged_attention(
            q, k_pages, v_pages, *index, implementation=implementation, plan=moved
        )

    return seconds_a_call(step, q, (pages, v_pages, tables, index, plan), calls, repeats)


def jax_op(batch: int, context: int, group: int, dtype, calls: int, repeats: int) -> float:
    """Return the seconds a call of the op that comes with JAX takes."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    width, sets = context // BLOCK_SIZE, num_sets(batch, context, dtype)
    num_blocks = sets * batch * width
    ids = (
        np.random.default_rng(0)
        .permutation(np.arange(num_blocks, dtype=np.int32))
        .reshape(sets, batch, width)
    )
    tables, lengths = jnp.asarray(ids), jnp.full(batch, context, jnp.int32)
    pages = jnp.zeros((KV_HEADS, num_blocks, BLOCK_SIZE, HEAD_DIM), dtype)
    v_pages = pages + jnp.ones((), dtype)

    def step(i, q, k_pages, v_pages, tables, lengths):
        return paged_attention(q, k_pages, v_pages, tables[i % sets], lengths).astype(q.dtype)

    return seconds_a_call(
        step, _queries(batch, group, dtype), (pages, v_pages, tables, lengths), calls, repeats
    )


def cudnn(batch: int, context: int, group: int, dtype, calls: int, repeats: int) -> float:
    """Return the seconds a call of cuDNN's attention on contiguous K and V takes."""
    # Arrays of their own: a slice of a larger one would be copied for the call.
    sets = min(16, num_sets(batch, context, dtype))
    keys = [jnp.zeros((batch, context, KV_HEADS, HEAD_DIM), dtype) for _ in range(sets)]
    values = [x + jnp.ones((), dtype) for x in keys]

    def step(_, q, keys, values):
        for k, v in zip(keys, values, strict=True):
            q = jax.nn.dot_product_attention(q[:, None], k, v, implementation="cudnn")[:, 0]
        return q

    return (
        seconds_a_call(
            step, _queries(batch, group, dtype), (keys, values), pl.cdiv(calls, sets), repeats
        )
        / sets
    )


def _queries(batch: int, group: int, dtype):
    return jax.random.normal(jax.random.key(0), (batch, KV_HEADS * group, HEAD_DIM), dtype)


def measure(group: int, dtype, is_quick: bool) -> None:
    """Measure the table on the GPU that there is, and print it."""
    calls, repeats = (10, 3) if is_quick else (50, 10)
    bandwidth = copy_bandwidth(repeats)
    print_header(group, dtype, bandwidth)
    reasons = []
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        size = kv_bytes(batch, context, dtype)
        sizes = batch, context, group, dtype, calls if size < 1e9 else 5, repeats
        times = [time_column(name, sizes, reasons) for name in COLUMNS]
        fraction = f"{size / times[0] / bandwidth:>8.0%}" if times[0] else f"{'-':>8}"
        us, *others = (f"{t * 1e6:>9.1f}" if t else f"{'-':>9}" for t in times)
        row = f"{batch:>5} {context:>8,} {size / 1e6:>9.1f} {us} {fraction} {' '.join(others)}"
        print(row, flush=True)
    measure_cases(dtype, calls, repeats, reasons)
    for reason in reasons:
        print(f"not measured: {reason}")


def measure_cases(dtype, calls: int, repeats: int, reasons: list[str]) -> None:
    """Measure the cases of an engine, with the heads of the model's decoder, and print them."""
    print(f"\nAn engine for {gpu_model.WIDTH} rows of up to {gpu_model.TABLE_TOKENS:,} tokens")
    print(f"{'live rows':>20} {'us':>9} {'expected':>9}")
    for name, lengths in gpu_model.CASES.items():
        try:
            seconds = engine_case(lengths, gpu_model.LLAMA_3_8B.group, dtype, calls, repeats)
        except Exception as error:  # as in `time_column`
            reasons.append(f"{name}: {type(error).__name__}: {error!s:.200}")
            continue
        expected = gpu_model.attention(lengths).seconds
        print(f"{name:>20} {seconds * 1e6:>9.1f} {expected * 1e6:>9.1f}", flush=True)


COLUMNS = {
    "ours": partial(ours, None),
    "xla": partial(ours, "xla"),
    "jax op": jax_op,
    "cudnn": cudnn,
}


def time_column(name: str, sizes: tuple, reasons: list[str]) -> float | None:
    """Return the seconds a call takes; None where it fails, with a line more in `reasons`."""
    try:
        return COLUMNS[name](*sizes)
    except Exception as error:  # what others' code and a full memory raise is not ours to know
        batch, context, *_ = sizes
        what = f"{type(error).__name__}: {error!s:.200}"
        reasons.append(f"{name}, batch {batch}, context {context}: {what}")
        return None


def print_header(group: int, dtype, bandwidth: float) -> None:
    """Print what is measured, on what device."""
    q, pages = _queries(1, group, dtype), jnp.zeros((1, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype)
    problem = dispatch.Problem.of(q, pages, None, None)
    picked = dispatch.pick_for_cuda(problem, target_device_kind())
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {device}; copy: {bandwidth / 1e12:.2f} TB/s (measured)")
    heads = f"{KV_HEADS} KV heads, {group} query heads each, head_dim {HEAD_DIM}"
    print(f"{picked}, {heads}, {dtype}, pages of {BLOCK_SIZE}\n")
    columns = f"{'us':>9} {'of copy':>8} {'xla':>9} {'jax op':>9} {'cudnn':>9}"
    print(f"{'batch':>5} {'context':>8} {'MB':>9} {columns}")


def print_floor(device: str, dtype) -> None:
    """Print what no implementation can be faster than. Nothing is measured."""
    bandwidth = BANDWIDTHS[device]
    floor = "The floor is the bytes of K and V over the published bandwidth."
    print(f"No GPU here: nothing was measured. {floor}")
    heads = f"{KV_HEADS} KV heads, head_dim {HEAD_DIM}, {dtype}"
    print(f"{device}: {bandwidth / 1e12:.2f} TB/s; {heads}\n")
    print(f"{'batch':>5} {'context':>8} {'MB':>9} {'floor us':>9}")
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        size = kv_bytes(batch, context, dtype)
        print(f"{batch:>5} {context:>8,} {size / 1e6:>9.1f} {size / bandwidth * 1e6:>9.1f}")


def main() -> None:
    """Measure where there is a GPU; else print the floor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", type=int, default=8, help="query heads to a KV head")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--device",
        default="NVIDIA H200",
        choices=BANDWIDTHS,
        help="whose floor, where there is no GPU",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    if not 0 < options.group <= dispatch.MOST_HEADS:
        parser.error(f"--group: {options.group}; 1 to {dispatch.MOST_HEADS} are accepted")
    if jax.default_backend() == "gpu":
        measure(options.group, options.dtype, options.quick)
    else:
        print_floor(options.device, options.dtype)
        gpu_model.print_model()


if __name__ == "__main__":
    main()
