"""Time a decoding step of Llama-3-8B's shape, with 1 and 64 rows, weights and pages of zeros.

    ms a step   the median over dispatches of 32 steps in one compiled loop
    compiling   seconds

Contexts are 1,024 tokens. Without a GPU a toy of the same structure is run, so that the script is
known to work, and it says so. `gpu_model.py` has what is expected.

Usage: python benchmarks/gpu_steps.py [--rows 1 64] [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import gpu_model
from paged_jax import EngineConfig, SamplingParams
from paged_jax.engine.step import init_state, run
from paged_jax.models import Llama, LlamaConfig
from script import with_requests

STEPS, DISPATCHES = 32, 5
SHAPES = {
    "Llama-3-8B": dict(
        config=dict(
            vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
            num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=2048, dtype="bfloat16",
        ),
        num_blocks=12_000,
        context=1024,
    ),
    "toy": dict(
        config=dict(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=16, max_model_len=512,
        ),
        num_blocks=2500,
        context=64,
    ),
}  # fmt: skip


def decoder_of_zeros(config: LlamaConfig):
    """Return the graphdef, and zeros for params: no initial values are computed."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    return graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)


class Prepared(NamedTuple):
    """An engine for 256 rows of which the run is compiled."""

    shape: str
    config: EngineConfig
    graphdef: nnx.GraphDef
    params: Any
    program: Callable
    compiling: float  # seconds


def prepare(shape: str) -> Prepared:
    """Make the decoder, and compile the run of its steps: one program for any number of rows."""
    sizes = SHAPES[shape]
    graphdef, params = decoder_of_zeros(LlamaConfig(**sizes["config"]))
    max_len = sizes["config"]["max_model_len"]
    config = EngineConfig(sizes["num_blocks"], max_len, gpu_model.WIDTH, 1024)

    def steps(params, state, count):
        return run(nnx.merge(graphdef, params), state, count)

    state = jax.eval_shape(lambda: init_state(config, nnx.merge(graphdef, params)))
    begin = time.perf_counter()
    lowered = jax.jit(steps, donate_argnums=1).lower(params, state, jnp.int32(STEPS))
    program = lowered.compile()
    return Prepared(shape, config, graphdef, params, program, time.perf_counter() - begin)


def time_steps(prepared: Prepared, num_rows: int) -> dict:
    """Return what a step of `num_rows` decoding rows takes."""
    sizes, config, params = SHAPES[prepared.shape], prepared.config, prepared.params
    max_len, context = sizes["config"]["max_model_len"], sizes["context"]
    state = init_state(config, nnx.merge(prepared.graphdef, params))
    greedy = SamplingParams(temperature=0, max_tokens=max_len - context, ignore_eos=True)
    prompts = [[1 + n] * context for n in range(num_rows)]
    state = with_requests(state, prompts, greedy, sizes["config"]["vocab_size"])
    # Rows that run take a token of each step's budget.
    prefill = jnp.int32(-(-num_rows * context // (1024 - num_rows)) + 1)
    state, _ = jax.block_until_ready(prepared.program(params, state, prefill))
    times = []
    for _ in range(DISPATCHES):
        begin = time.perf_counter()
        state, count = prepared.program(params, state, jnp.int32(STEPS))
        assert int(count) == STEPS and int(state.seqs.num_running) == num_rows
        times.append((time.perf_counter() - begin) / STEPS)
    result = dict(shape=prepared.shape, rows=num_rows, ms=statistics.median(times) * 1e3)
    return result | dict(all_ms=[t * 1e3 for t in times], compiling=prepared.compiling)


def main() -> None:
    """Time the steps, and print them with what the model expects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")
    options = parser.parse_args()
    if wrong := [rows for rows in options.rows if not 0 < rows <= gpu_model.WIDTH]:
        parser.error(f"--rows: {wrong[0]}; 1 to {gpu_model.WIDTH} are accepted")
    is_gpu = jax.default_backend() == "gpu"
    shape = "Llama-3-8B" if is_gpu else "toy"
    device = jax.devices()[0].device_kind
    if not is_gpu:
        print(f"No GPU here: a toy on {device}. It says nothing about a GPU.")
    prepared = prepare(shape)
    for rows in options.rows:
        result = time_steps(prepared, rows)
        call = gpu_model.attention([SHAPES["Llama-3-8B"]["context"]] * rows)
        result |= dict(device=device, expected_ms=gpu_model.step_seconds(call) * 1e3)
        if options.json:
            print(json.dumps(result), flush=True)
            continue
        expected = f"expected of an H200 with Llama-3-8B: {result['expected_ms']:.2f} ms"
        print(f"{shape}, {rows} rows: {result['ms']:.2f} ms a step ({expected}); "
              f"compiled in {result['compiling']:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
