"""What the scripts of the headline benchmark share: arguments, the machine, numbers as JSON."""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax


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
    """Return the processor's name, the number of cores and jax's version."""
    name, info = platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = lines[0].split(":")[1].strip() if lines else name
    device = jax.devices()[0]
    gpu = "" if device.platform == "cpu" else f"; {device.device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"jax {jax.__version__}, {name}, {cores} cores{gpu}"


def save(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers of a run, with machine and date, where a file is named."""
    if path is None:
        return
    numbers = {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d"), **numbers}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers, indent=1) + "\n")
