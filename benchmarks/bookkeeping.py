"""Compare a decoding step's bookkeeping with that of vLLM's own Python scheduler.

    us a step   of steady decode without a model, with prefix caching on and off, by how many
                requests run. Ours is scheduling, allocation and commit inside one jitted loop;
                vLLM's is `schedule` and `update_from_output`, its real scheduler, on the host.

The two are measured in turn within each repeat; the table has medians, and the least and the most
of the repeats. `python benchmarks/peers.py make --only vllm` makes what vLLM's side needs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peer_runs import machine, names, process_tree
from step import ROWS, STEPS, decoding

BLOCKS = 131_072
NOISY = 0.05


class Ours:
    """Our bookkeeping, compiled once for each number of rows."""

    def __init__(self):
        self.made = {}

    def measure(self, rows: int, caching: bool, dispatches: int) -> float:
        """Return the us of a step: the median of some dispatches from the same state."""
        if (rows, caching) not in self.made:
            self.made[rows, caching] = decoding(rows, BLOCKS, (None,), caching)
        program, start = self.made[rows, caching]
        times = []
        for _ in range(dispatches):
            state = jax.block_until_ready(jax.tree.map(jnp.copy, start))
            begin = time.perf_counter()
            _, steps = jax.block_until_ready(program(state, np.int32(STEPS)))
            times.append((time.perf_counter() - begin) / STEPS * 1e6)
            assert int(steps) == STEPS
        return statistics.median(times)


def measure_vllm(rows: int, caching: bool, folder: Path) -> tuple[float | None, str]:
    """Return the us of a step of vLLM's, or None, and its version or what it said."""
    command = [
        str(names.python_of("vllm", "native", folder)),
        "-m",
        "peer_runs.vllm_scheduler",
        *map(str, (rows, int(caching), STEPS, BLOCKS)),
    ]
    env = names.environment("vllm", "native", folder)
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(command, env=env, cwd=empty, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            return result["us"], result["vllm"]
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return None, " | ".join(said[-2:]) or f"ended with {done.returncode}"


def cell(values: list[float]) -> str:
    """Return the median, and the range of what was measured."""
    if not values:
        return "-"
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def measure(repeats: int, dispatches: int, folder: Path, with_vllm: bool):
    """Return the us of each (system, rows, caching), others' CPU use, and remarks on vLLM."""
    times: dict[tuple[str, int, bool], list[float]] = {}
    remarks = set()
    ours = Ours()
    for rows in ROWS:  # compiles
        for caching in (True, False):
            ours.measure(rows, caching, 1)
    busy, begin = process_tree.busy_seconds(), time.perf_counter()
    used = process_tree.cpu_seconds()
    for _ in range(repeats):
        for rows in ROWS:
            for caching in (True, False):
                value = ours.measure(rows, caching, dispatches)
                times.setdefault(("paged-jax", rows, caching), []).append(value)
                if with_vllm:
                    theirs, remark = measure_vllm(rows, caching, folder)
                    remarks.add(remark)
                    if theirs is not None:
                        times.setdefault(("vLLM", rows, caching), []).append(theirs)
    others = None
    if busy is not None:
        both = (process_tree.busy_seconds() or 0.0) - busy
        spent = process_tree.cpu_seconds() - used
        others = max(0.0, both - spent) / (time.perf_counter() - begin)
    return times, others, remarks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dispatches", type=int, default=10, help="of ours, in each repeat")
    parser.add_argument("--dir", type=Path, default=names.DEFAULT_DIR, help="of the environments")
    arguments = parser.parse_args()
    folder = arguments.dir.resolve()
    lacking = names.missing("vllm", "f32", "native", folder)
    about = machine.describe()
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}; {about['cpu']}, "
        f"{about['cores']} cores; {BLOCKS:,} blocks, {STEPS} steps"
    )
    if lacking:
        print(f"vLLM: absent, {lacking}")
    times, others, remarks = measure(
        arguments.repeats, arguments.dispatches, folder, lacking is None
    )
    if remarks:
        print(f"vLLM: {', '.join(sorted(remarks))}")
    print("\n| running | prefix caching | paged-jax, us a step | vLLM, us a step | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for rows in ROWS:
        for caching in (True, False):
            ours = times.get(("paged-jax", rows, caching), [])
            theirs = times.get(("vLLM", rows, caching), [])
            ratio = f"{statistics.median(theirs) / statistics.median(ours):.0f}" if theirs else "-"
            print(
                f"| {rows} | {'on' if caching else 'off'} | {cell(ours)} | {cell(theirs)} | "
                f"{ratio} |"
            )
    if others is not None:
        mark = f"*; above {NOISY} the figures say little" if others > NOISY else ""
        print(f"\nothers used {others:.2f} cores meanwhile{mark}")


if __name__ == "__main__":
    main()
