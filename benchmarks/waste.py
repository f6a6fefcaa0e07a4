"""Which share of the reserved KV slots is never filled: contiguous reservation against paging.

    max, pow2, oracle   slots that contiguous allocation holds for a request from start to end:
                        2048; the prompt and the next power of two of the output; the prompt and
                        the output, which nobody knows beforehand
    paged 8, 16, 32     blocks of that many tokens, as the engine allocates them

1,000 requests wait at the beginning; memory of 15,696 slots (what the PagedAttention paper leaves
for OPT-13B on an A100 of 40 GB) is all that limits how many run at once. Real scheduler, real
allocator, no model; the shares are averaged over all steps. Contiguous allocation is without
external fragmentation here, which favours it. Lengths: `lengths.py`.

    empty      share of the slots held that hold no token
    running    requests that run at once, averaged over steps

Usage: python benchmarks/waste.py [--quick] [--many] [--out FILE]
"""

import time

import numpy as np

from lengths import ALPACA, MAX_LEN, SHAREGPT, Mix, draw, reservations
from loads import make_load
from no_pages import NoPages
from paged_jax import EngineConfig
from script import describe_machine, parse, save
from simulate import Result, simulate

MEMORY = 981 * 16  # slots
BLOCK_SIZES = (8, 16, 32)
MAX_RUNNING = {SHAREGPT.name: 128, ALPACA.name: 1024}
PAPER = "paper (SOSP 2023): 60 to 80 % wasted by contiguous reservation, under 4 % by paging"


def engine_config(mix: Mix, policy: str, block_size: int = 16) -> EngineConfig:
    """Return an engine with `MEMORY` slots, which are fewer than the rows could use.

    Contiguous reservations need not be whole blocks: the pool has a block more for each of them.
    """
    running = MAX_RUNNING[mix.name]
    blocks = MEMORY // block_size + 1 + (0 if policy == "paged" else running)
    return EngineConfig(blocks, MAX_LEN, running, 2048, block_size=block_size, watermark=0.01)


def run(mix: Mix, count: int, policy: str, block_size: int = 16) -> Result:
    """Serve `count` requests that all wait at the beginning."""
    prompts, outputs = draw(mix, count, seed=0)
    held = None if policy == "paged" else reservations(prompts, outputs)[policy]
    load = make_load(np.zeros(count), prompts, outputs, held, MEMORY)
    return simulate(NoPages(MAX_LEN), engine_config(mix, policy, block_size), load)


def measure(mix: Mix, count: int, policy: str, block_size: int = 16) -> dict:
    """Return one row of the table."""
    result = run(mix, count, policy, block_size)
    assert result.peak_running < MAX_RUNNING[mix.name]  # memory alone limits
    return {
        "mix": mix.name,
        "policy": policy if policy != "paged" else f"paged {block_size}",
        "empty": result.empty_share(policy == "paged"),
        "running": result.mean_running,
        "steps": int(result.sums.steps),
        "preemptions": result.preemptions,
    }


def show(mix: Mix, count: int) -> list[dict]:
    """Print one table and return its rows."""
    prompts, outputs = draw(mix, count, seed=0)
    print(
        f"\n{mix.name}: {count:,} requests, prompts of {prompts.mean():.0f} tokens, outputs of "
        f"{outputs.mean():.0f}\n                empty   running     steps   preemptions"
    )
    cases = [(name, 16) for name in ("max", "pow2", "oracle")]
    cases += [("paged", size) for size in BLOCK_SIZES]
    rows = []
    for policy, size in cases:
        row = measure(mix, count, policy, size)
        rows.append(row)
        print(
            f"{row['policy']:<12} {row['empty']:>8.1%} {row['running']:>9.1f} {row['steps']:>9,} "
            f"{row['preemptions']:>13,}",
            flush=True,
        )
    return rows


def show_many(count: int) -> dict:
    """Serve very many requests, and print how long the simulation took."""
    begin = time.perf_counter()
    result = run(SHAREGPT, count, "paged")
    seconds = time.perf_counter() - begin
    print(
        f"\n{count:,} {SHAREGPT.name} requests, blocks of 16: {seconds:.0f} s with compiling, "
        f"{int(result.sums.steps):,} steps, {int(result.sums.tokens):,} tokens computed, "
        f"{result.empty_share(True):.1%} empty, every request ended with its length"
    )
    return {"requests": count, "seconds": seconds, "empty": result.empty_share(True)}


def main() -> None:
    """Print the tables."""
    args = parse(__doc__, many="serve 100,000 requests, too")
    count = 200 if args.quick else 1000
    print(describe_machine())
    numbers: dict = {"rows": show(SHAREGPT, count) + show(ALPACA, count)}
    print(f"\n{PAPER}")
    if args.many:
        numbers["many"] = show_many(3000 if args.quick else 100_000)
    save(args.out, numbers)


if __name__ == "__main__":
    main()
