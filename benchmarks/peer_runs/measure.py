"""Measure one peer on one workload, in this process. `benchmarks/peers.py` starts it.

Usage: python -m peer_runs.measure WORKLOAD PEER[:VARIANT]

Prints one line "RESULT {...}". A module of a peer has `make(name, variant, workload)`, which
returns `run` and facts to report; `run(workload)` returns the new tokens of each output, the
samples of a prompt side by side.
"""

import time

START = time.perf_counter()

import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402

import workloads  # noqa: E402
from peer_runs import names, process_tree  # noqa: E402


def main() -> None:
    watch = process_tree.Watch()
    workload = workloads.get(sys.argv[1])
    name, variant = names.parse(sys.argv[2])
    module = importlib.import_module(f"peer_runs.{names.PEERS[name].module}")
    run, facts = module.make(name, variant, workload)
    run(workloads.warm_up(workload))
    after_warm_up = facts.pop("after_warm_up", None)
    if after_warm_up is not None:
        after_warm_up()
    load = time.perf_counter() - START

    busy, cpu, begin = process_tree.busy_seconds(), process_tree.cpu_seconds(), time.perf_counter()
    tokens = run(workload)
    seconds = time.perf_counter() - begin
    used = process_tree.cpu_seconds() - cpu
    others = None
    if busy is not None:
        others = max(0.0, (process_tree.busy_seconds() or 0.0) - busy - used) / seconds

    lengths = [len(output) for output in tokens]
    assert lengths == workload.lengths, f"{lengths} tokens instead of {workload.lengths}"
    if "after_run" in facts:
        facts |= facts.pop("after_run")()
    row = {
        "seconds": round(seconds, 3),
        "output_tokens": sum(lengths),
        "tokens_per_second": round(sum(lengths) / seconds, 2),
        "load_seconds": round(load, 2),
        "peak_mib": round(watch.peak()),
        "cpu_seconds": round(used, 2),
        "others_cores": None if others is None else round(others, 3),
        **facts,
        "tokens": [list(map(int, output)) for output in tokens],
    }
    print("RESULT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
