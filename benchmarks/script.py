"""What the scripts of the headline benchmark share: arguments, the machine, a timer, numbers."""

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import SamplingParams
from paged_jax.engine.requests import Output, make_request, to_rows
from paged_jax.engine.step import EngineState
from paged_jax.scheduling import sequences
from peer_runs import machine


def parse(doc: str | None, **flags: str) -> argparse.Namespace:
    """Read the command line: --quick, --out and `flags`, switches by name with their help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests and cases")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON into this file")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args()


def describe_machine() -> str:
    """Return jax's version, the processor's name and the number of cores."""
    found, device = machine.describe(), jax.devices()[0]
    gpu = "" if device.platform == "cpu" else f"; {device.device_kind}"
    return f"jax {jax.__version__}, {found['cpu']}, {found['cores']} cores{gpu}"


def with_requests(
    state: EngineState, prompts: Sequence[list[int]], params: SamplingParams, vocab_size: int
) -> EngineState:
    """Return the state with a row that waits for each prompt; no token ends an answer."""
    config = state.config
    make = partial(
        make_request,
        config=config,
        cache_config=state.cache.config,
        vocab_size=vocab_size,
        eos_token_ids=(),
    )
    outputs = {row: Output(make(str(row), p, params), 0) for row, p in enumerate(prompts)}
    return state.replace(seqs=sequences.add(state.seqs, to_rows(outputs, config)))


def time_steps(program: Any, state: Any, steps: int, repeats: int) -> float:
    """Return seconds a step: the best of some runs from the same state, which is kept."""
    best = float("inf")
    for _ in range(repeats):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        begin = time.perf_counter()
        _, done = jax.block_until_ready(program(copy, np.int32(steps)))
        best = min(best, time.perf_counter() - begin)
        assert int(done) == steps
    return best / steps


def save(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers of a run, with machine and date, where a file is named."""
    if path is None:
        return
    numbers = {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d"), **numbers}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + "\n")
