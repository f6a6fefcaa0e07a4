"""What a shared prefix saves: 32 prompts that share 512 tokens and differ in 32, with prefix
caching off, on cold and on warm.

    computed   tokens that went through the model for the prompts and 16 new tokens each
    seconds    wall time of a run, compiled before; the best of some

Usage: python benchmarks/prefix.py [--quick]
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.arrays import ceil_div
from paged_jax.models import load_model

PROMPTS, SHARED, OWN, NEW = 32, 512, 32, 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


def make_engine(model: tuple[Any, Any], caching: bool) -> Engine:
    length = SHARED + OWN + NEW
    config = EngineConfig(
        num_blocks=1 + PROMPTS * ceil_div(length, 16),
        max_model_len=length,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=128,
        num_rows=PROMPTS,
        enable_prefix_caching=caching,
    )
    graphdef, params = model
    return Engine(graphdef, params, config)


def run(engine: Engine, prompts) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens."""
    begin = time.perf_counter()
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_unfinished():
        for request_id in engine.run(32):
            for update in engine.take(request_id):
                tokens[request_id] += update.token_ids
    return time.perf_counter() - begin, [tokens[request_id] for request_id in ids]


def measure(engine: Engine, prompts, repeats: int, cold: bool):
    """Best seconds, tokens computed and hit in one run, and the output."""
    best, outputs, counts = float("inf"), None, (0, 0)
    for _ in range(repeats):
        if cold:
            assert engine.reset_prefix_cache()
        before = engine.counters
        assert before is not None
        seconds, outputs = run(engine, prompts)
        after = engine.counters
        assert after is not None
        counts = (
            int(after.computed_tokens - before.computed_tokens),
            int(after.hit_tokens - before.hit_tokens),
        )
        best = min(best, seconds)
    return best, counts, outputs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repeat")
    repeats = 1 if parser.parse_args().quick else 3
    decoder, _ = load_model("smollm2-135m")
    graphdef, params = nnx.split(decoder)
    model = (graphdef, params)
    rng = np.random.default_rng(0)
    shared = rng.integers(100, 40000, SHARED).tolist()
    prompts = [shared + rng.integers(100, 40000, OWN).tolist() for _ in range(PROMPTS)]
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}; SmolLM2-135M, blocks of 16, "
        "128 tokens a step\n"
    )
    print("                computed   found in the cache   seconds")
    results = {}
    for name, caching, cold in (
        ("caching off", False, True),
        ("on, cold", True, True),
        ("on, warm", True, False),
    ):
        if name != "on, warm":
            engine = make_engine(model, caching)
            run(engine, [prompts[0][:40]])  # compiles
        seconds, (computed, hit), outputs = measure(engine, prompts, repeats, cold)
        results[name] = (seconds, outputs)
        print(f"{name:<14} {computed:>9} {hit:>20} {seconds:>9.2f}", flush=True)
    off, cold = results["caching off"], results["on, cold"]
    print(
        f"\nwall time on / off: {cold[0] / off[0]:.2f} cold; "
        f"outputs equal: {off[1] == cold[1] == results['on, warm'][1]}"
    )
    print(
        f"bound on prompt tokens computed: {SHARED} + {PROMPTS} x {OWN} + {PROMPTS} x 16 = "
        f"{SHARED + PROMPTS * (OWN + 16)}"
    )


if __name__ == "__main__":
    main()
