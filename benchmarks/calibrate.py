"""What a step takes: seconds of the real SmolLM2 engine step, fitted; and a GPU-like assumption.

    seconds = fixed + per_token * tokens computed + per_kv * tokens of K and V read

The fit is over decode steps of 8 to 64 rows at two contexts, and prefill steps of 128 tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loads import Cost
from no_pages import NoPages
from paged_jax import EngineConfig, SamplingParams
from paged_jax.engine.step import EngineState, init_state, run
from paged_jax.models import load_model
from script import time_steps, with_requests

# A GUESS, NOT MEASURED: to be replaced by what `policies.py --calibrate` prints on a quiet machine,
# with machine and date.
SMOLLM2 = Cost(fixed=0.025, per_token=0.0015, per_kv=1e-6)

# An assumption, not measured: OPT-13B in float16 on an A100 of 40 GB as its data sheet has it. Each
# step reads 26 GB of weights at 1,555 GB/s; a token takes 26 GFLOP at 60 % of 312 TFLOP/s, and
# 819,200 bytes of K and V for each token that it attends to. No launch or host time.
GPU_LIKE = Cost(fixed=26e9 / 1555e9, per_token=26e9 / (0.6 * 312e12), per_kv=819_200 / 1555e9)

WIDTHS = (8, 16, 32, 64, 128)
SIZES = EngineConfig(
    num_blocks=2049, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=128, num_rows=64
)
POINTS = ((8, 64), (8, 448), (16, 64), (16, 448), (32, 64), (32, 448), (64, 64), (64, 192))


class Skip(NoPages):
    """Passes by the pages of a model: a quick way to a state of many computed tokens."""

    def __init__(self, model: Any):
        for name in ("vocab_size", "max_model_len", "num_kv_heads", "head_dim", "dtype"):
            setattr(self, name, getattr(model, name))
        self.kv_groups = tuple(model.kv_groups)


def state_of(model: Any, rows: int, context: int) -> EngineState:
    """Return a state in which that many rows wait with prompts of `context` tokens."""
    state = init_state(SIZES, model)
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    return with_requests(state, [[1] * context] * rows, params, model.vocab_size)


def calibrate(quick: bool = False) -> tuple[Cost, list[dict]]:
    """Measure steps, print them beside the fit, and return the fit and the points."""
    decoder, _ = load_model("smollm2-135m")
    graphdef, params = nnx.split(decoder)
    skip = Skip(decoder)
    real = jax.jit(
        lambda params, state, steps: run(nnx.merge(graphdef, params), state, steps, widths=WIDTHS),
        donate_argnums=1,
    )
    fast = jax.jit(partial(run, skip), donate_argnums=0)
    program, repeats = partial(real, params), 2 if quick else 5
    points, state = [], state_of(decoder, 1, 640)
    jax.block_until_ready(program(jax.tree.map(jnp.copy, state), jnp.int32(1)))  # compiles
    points.append({"tokens": 128, "kv": 320, "seconds": time_steps(program, state, 4, repeats)})
    for rows, context in POINTS[::3] if quick else POINTS:
        state = state_of(decoder, rows, context)
        while int(jnp.min(state.seqs.num_tokens[:rows])) <= context:
            state, _ = fast(state, jnp.int32(4))
        assert int(state.seqs.num_running) == rows
        computed = state.seqs.num_computed[:rows]
        kv = int(jnp.sum(computed)) + 2 * rows  # halfway through 4 steps
        seconds = time_steps(program, state, 4, repeats)
        points.append({"tokens": rows, "kv": kv, "seconds": seconds})
    terms = np.array([[1.0, p["tokens"], p["kv"]] for p in points])
    seconds = np.array([p["seconds"] for p in points])
    scale = 1 / seconds[:, None]  # relative errors count
    fit = np.linalg.lstsq(terms * scale, np.ones(len(points)), rcond=None)[0]
    print("\nSmolLM2-135M, one engine step\n  tokens   K and V read   measured ms   fitted ms")
    for point, row in zip(points, terms, strict=True):
        print(
            f"{point['tokens']:>8} {point['kv']:>14,} {point['seconds'] * 1e3:>13.1f} "
            f"{row @ fit * 1e3:>11.1f}"
        )
    print("Cost(fixed={:.4g}, per_token={:.4g}, per_kv={:.4g})".format(*fit))
    return Cost(*fit.tolist()), points
