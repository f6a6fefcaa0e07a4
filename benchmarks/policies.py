"""Static batches, contiguous reservation with iteration-level batching, and paging: latency against
the rate of requests, each policy with the same engine, step cost and KV memory.

    static      FasterTransformer-like: a batch starts when the one before has ended; reserves 2048
    max         Orca-like: a request starts as soon as its reservation fits; 2048 slots
    pow2        prompt and the next power of two of the output
    oracle      prompt and output, known beforehand
    paged       blocks of 16 on demand, preemption by recomputation: the product

Time is simulated (`simulate.py`); scheduler and allocator are real. A step costs what a real one of
SmolLM2 on a CPU does by a linear fit (with --calibrate; else a guess), or, as an ASSUMPTION, what
OPT-13B would on an A100 (`calibrate.py`). The memory is the paper's for that model and GPU, 15,696
slots. Requests arrive as a Poisson process. Favouring the baselines: no external fragmentation, and
rows of a static batch that have ended cost nothing. Its answers come when all of it has ended.

    normalised latency    mean over requests of (end - arrival) / output tokens

A CPU computes nearly as long for each further token of a batch as for the first, so that more
requests at once gain less there than on a GPU, whose step is bound by reading the weights.

Usage: python benchmarks/policies.py [--quick] [--calibrate] [--real] [--out FILE]
"""

from itertools import pairwise

import numpy as np

from calibrate import GPU_LIKE, SMOLLM2, calibrate
from lengths import ALPACA, MAX_LEN, SHAREGPT, Mix, draw, poisson_arrivals, reservations
from loads import Cost, Load, make_load
from no_pages import NoPages
from paged_jax import EngineConfig
from real_policies import measure_real
from script import describe_machine, parse, save
from simulate import Result, simulate

MEMORY, BLOCK_SIZE = 981 * 16, 16
POLICIES = ("static", "max", "pow2", "oracle", "paged")
MAX_RUNNING = {SHAREGPT.name: 128, ALPACA.name: 512}
PER_OCTAVE = 3  # rates in a doubling
SLOW, VERY_SLOW = 5, 10  # latencies to compare at: multiples of a lone request's
PAPER = (
    "paper (SOSP 2023): 2 to 4 times the throughput of FasterTransformer and Orca at equal latency"
)


def make_policy_load(policy: str, arrival, prompts, outputs, memory: int, max_len: int) -> Load:
    """Return the requests with what the policy reserves for each."""
    if policy == "paged":
        return make_load(arrival, prompts, outputs)
    name = "max" if policy == "static" else policy
    held = np.minimum(reservations(prompts, outputs)[name], max_len)
    return make_load(arrival, prompts, outputs, held, memory, policy == "static")


def serve(mix: Mix, policy: str, rate: float, count: int, cost: Cost) -> tuple[Result, float]:
    """Serve a Poisson process; also returns the normalised latency."""
    prompts, outputs = draw(mix, count, seed=0)
    arrival = poisson_arrivals(rate, count, seed=0)
    running = MAX_RUNNING[mix.name]
    # Reservations need not be whole blocks: without paging there is a block more for each row.
    blocks = MEMORY // BLOCK_SIZE + 1 + (0 if policy == "paged" else running)
    config = EngineConfig(blocks, MAX_LEN, running, 2048, block_size=BLOCK_SIZE, watermark=0.01)
    load = make_policy_load(policy, arrival, prompts, outputs, MEMORY, MAX_LEN)
    result = simulate(NoPages(MAX_LEN), config, load, cost)
    return result, float(np.mean((result.end - arrival) / outputs))


def sweep(mix: Mix, policy: str, count: int, cost: Cost) -> list[dict]:
    """Raise the rate until the policy can not keep up, and return a point for each."""
    lone = cost.fixed + cost.per_token
    base = 1 / (mix.output.mean * lone)
    points = []
    for k in range(-4 if policy == "static" else 0, 24):
        rate = base * 2 ** (k / PER_OCTAVE)
        result, latency = serve(mix, policy, rate, count, cost)
        points.append(
            {
                "rate": rate,
                "latency": latency,
                "running": result.mean_running,
                "tokens_per_second": float(
                    sum(draw(mix, count, 0)[1]) / (result.end.max() - result.start.min())
                ),
                "preemptions": result.preemptions,
                "peak_running": result.peak_running,
            }
        )
        served = count / result.end.max()
        if latency > 2 * VERY_SLOW * lone or served < rate / 4:
            break
    return points


def rate_at(points: list[dict], latency: float) -> float:
    """Return the rate at which the latency is reached, between two points; nan if never."""
    for before, after in pairwise(points):
        if before["latency"] <= latency < after["latency"]:
            x = np.log([before["latency"], after["latency"], latency])
            share = (x[2] - x[0]) / (x[1] - x[0])
            return before["rate"] * (after["rate"] / before["rate"]) ** share
    return float("nan")


def compare(name: str, mix: Mix, count: int, cost: Cost) -> dict:
    """Print what rate each policy sustains, and return the curves."""
    lone = cost.fixed + cost.per_token
    print(
        f"\n{name}; {mix.name}, {count:,} requests. A lone request: {lone * 1e3:.1f} ms a token"
        f"\n           requests/s at {SLOW}x   paged /   at {VERY_SLOW}x   paged /   at most: "
        "tokens/s   running   preempted"
    )
    curves, best = {}, []
    for policy in reversed(POLICIES):  # paged first: the others are compared with it
        points = curves[policy] = sweep(mix, policy, count, cost)
        best = best or [rate_at(points, times * lone) for times in (SLOW, VERY_SLOW)]
        low, high = (rate_at(points, times * lone) for times in (SLOW, VERY_SLOW))
        last = points[-1]
        print(
            f"{policy:<10} {low:>17.3f} {best[0] / low:>9.1f} {high:>8.3f} {best[1] / high:>9.1f} "
            f"{last['tokens_per_second']:>18.0f} {last['running']:>9.1f} "
            f"{last['preemptions']:>11,}",
            flush=True,
        )
    return {"name": name, "mix": mix.name, "lone_latency": lone, "curves": curves}


def main() -> None:
    """Print the tables."""
    args = parse(
        __doc__,
        calibrate="measure SmolLM2's step here, and use it",
        real="serve some requests for real with SmolLM2, too",
    )
    print(describe_machine())
    count, cost, numbers = (200 if args.quick else 500), SMOLLM2, {}
    if args.calibrate:
        cost, numbers["calibration"] = calibrate(args.quick)
    origin = "fitted" if args.calibrate else "guessed"
    numbers["simulated"] = [
        compare("GPU-like step cost (assumed)", SHAREGPT, count, GPU_LIKE),
        compare(f"SmolLM2 on a CPU ({origin} step cost)", SHAREGPT, count, cost),
    ]
    print(f"\n{PAPER}")
    if args.real:
        numbers["real"] = measure_real(make_policy_load, POLICIES, cost, args.quick)
    save(args.out, numbers)


if __name__ == "__main__":
    main()
