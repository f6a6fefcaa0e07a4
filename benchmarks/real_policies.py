"""The policies of `policies.py` with SmolLM2 for real: the same loop, wall time by the clock.

Lengths, their limit and the memory are an eighth of what is simulated there, and all requests wait
at the beginning. Reservations are rounded up to whole blocks of 16, so that one program serves all
policies.
"""

import time
from collections.abc import Callable

import numpy as np

from calibrate import WIDTHS
from lengths import Mix, Shape, draw
from loads import Cost, Load
from paged_jax import EngineConfig
from paged_jax.models import load_model
from simulate import simulate

MAX_LEN, MEMORY = 256, 122 * 16
EIGHTH = Mix("ShareGPT-like / 8", Shape(20, 1.2), Shape(42, 1.0))
CONFIG = EngineConfig(MEMORY // 16 + 1, MAX_LEN, 64, WIDTHS[-1], watermark=0.01)


def measure_real(
    make_load: Callable[..., Load], policies: tuple[str, ...], cost: Cost, quick: bool
) -> list[dict]:
    """Serve the same requests under each policy, print and return what it took."""
    model, _ = load_model("smollm2-135m")
    count = 24 if quick else 96
    prompts, outputs = draw(EIGHTH, count, seed=0, most=MAX_LEN // 2)
    total = int(outputs.sum())
    print(
        f"\nSmolLM2 for real: {count} requests at once, {EIGHTH.name}, {total:,} output tokens, "
        f"{MEMORY:,} slots, at most {MAX_LEN} tokens a request\n            seconds   tokens/s   "
        "running   preempted   seconds by the fit"
    )
    rows = []
    for policy in policies:
        load = make_load(policy, np.zeros(count), prompts, outputs, MEMORY, MAX_LEN)
        load = load.replace(reservation=-(-load.reservation // 16) * 16)
        if not rows:
            simulate(model, CONFIG, load, cost, max_steps=1, widths=WIDTHS)  # compiles
        begin = time.perf_counter()
        result = simulate(model, CONFIG, load, cost, widths=WIDTHS)
        seconds = time.perf_counter() - begin
        row = {
            "policy": policy,
            "seconds": seconds,
            "tokens_per_second": total / seconds,
            "running": float(result.mean_running),
            "preemptions": result.preemptions,
            "fitted_seconds": float(result.sums.seconds),
        }
        rows.append(row)
        print(
            f"{policy:<10} {seconds:>8.1f} {row['tokens_per_second']:>10.1f} "
            f"{row['running']:>9.1f} {row['preemptions']:>11} {row['fitted_seconds']:>20.1f}",
            flush=True,
        )
    return rows
