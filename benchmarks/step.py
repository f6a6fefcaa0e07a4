"""What paging costs: a decoding step without a model, and the host's work around a dispatch.

    us a step   scheduling, allocation and commit of one token of every row, in one jitted loop
    us a call   Engine.dispatch of no steps; Engine.collect of a dispatch that is done and
                Engine.take of each request, 32 tokens a row

The decoder gives constant logits, so all that is left is bookkeeping. Usage: python
benchmarks/step.py [--quick]
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from no_pages import NoPages
from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.engine.step import init_state, run
from script import time_steps, with_requests

ROWS = (16, 64, 256)
BLOCKS = (4096, 131_072, 1_048_576)
MAX_LEN = 8192  # 512 table columns of 16 tokens
STEPS = 128
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_LEN, ignore_eos=True)


def engine_config(rows: int, num_blocks: int, caching: bool = False) -> EngineConfig:
    return EngineConfig(
        num_blocks, MAX_LEN, rows, max(rows, 512), num_rows=rows, enable_prefix_caching=caching
    )


def decoding(rows: int, num_blocks: int, windows, caching: bool):
    """A jitted run of many steps, and a state in which every row decodes, at different places of
    its last block.
    """
    model, config = NoPages(MAX_LEN, windows), engine_config(rows, num_blocks, caching)
    state = init_state(config, model)
    params = SamplingParams(temperature=0, max_tokens=min(MAX_LEN // 2, num_blocks * 8))
    prompts = [[1] * (1 + row * 7 % 16) for row in range(rows)]
    state = with_requests(state, prompts, params, vocab_size=8)
    program = jax.jit(partial(run, model), donate_argnums=0)
    state, _ = program(state, jnp.int32(10))
    assert int(state.seqs.num_running) == rows
    return program, state


def step_time(
    rows: int, num_blocks: int, repeats: int, windows=(None,), caching: bool = False
) -> float:
    """us a step of steady decode: the best of some dispatches from the same state."""
    program, start = decoding(rows, num_blocks, windows, caching)
    return time_steps(program, start, STEPS, repeats) * 1e6


def host_times(rows: int, repeats: int) -> tuple[float, float]:
    """us of `dispatch`, and of `collect` once the device has finished, with every row decoding:
    medians.

    Dispatches of no steps are timed: a CPU runs small programs in the thread that calls.
    """
    engine = Engine(*nnx.split(NoPages(MAX_LEN)), engine_config(rows, 131_072))
    for row in range(rows):
        engine.add_request([1] * (1 + row % 16), GREEDY)
    ids = engine.run(64)
    dispatch_times, collect_times = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        engine.dispatch(0)
        dispatch_times.append(time.perf_counter() - begin)
        engine.collect()
        engine.dispatch()
        jax.block_until_ready(engine.state.counters)
        begin = time.perf_counter()
        engine.collect()
        updates = [update for request_id in ids for update in engine.take(request_id)]
        collect_times.append(time.perf_counter() - begin)
        assert len(updates) == rows
    return statistics.median(dispatch_times) * 1e6, statistics.median(collect_times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 5 if parser.parse_args().quick else 30
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}; table of {MAX_LEN // 16} "
        f"columns, {STEPS} steps a run\n"
    )
    print(
        "rows   "
        + "".join(f"{n:>12,} blocks" for n in BLOCKS)
        + "     dispatch   collect     (us a step; us a call)"
    )
    for rows in ROWS:
        steps = "".join(f"{step_time(rows, n, repeats):>19.1f}" for n in BLOCKS)
        dispatch, collect = host_times(rows, repeats)
        print(f"{rows:>4}   {steps}   {dispatch:>10.0f}{collect:>10.0f}", flush=True)
    print("\nand with prefix caching")
    for rows in ROWS:
        steps = "".join(f"{step_time(rows, n, repeats, caching=True):>19.1f}" for n in BLOCKS)
        print(f"{rows:>4}   {steps}", flush=True)


if __name__ == "__main__":
    main()
