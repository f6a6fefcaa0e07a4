"""Answer in 8 minutes, on a machine with a GPU, what is asked about this library on one.

    steps        a decoding step of Llama-3-8B's shape with 1 and 64 rows, zeros for weights
    steps, loops in graphs   the same with XLA's loops in CUDA graphs: no wait for the host
    tests        tests/test_on_gpu.py: an engine's tokens, the kernels' bits and numbers
    kernel       benchmarks/kernel.py --quick: attention by copies, other ops and an engine's case

Each part is a process of its own with a time limit, so that none takes the others' answers with it.
Everything is written into one JSON after each part: versions, device, exit status, output, seconds.
Without a GPU it says so in the same form, and the parts print what they print without one.

Usage: python benchmarks/gpu_day.py [--out gpu_day.json] [--seconds 480]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
STEPS = [str(HERE / "gpu_steps.py"), "--json"]
LOOPS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
PARTS = {  # arguments of python, share of the time, more of XLA_FLAGS
    "steps": (STEPS, 0.25, ""),
    "steps, loops in graphs": (STEPS, 0.25, LOOPS),
    "tests": (["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_on_gpu.py"], 0.3, ""),
    "kernel": ([str(HERE / "kernel.py"), "--quick"], 0.2, ""),
}
ASK = "import jax; d = jax.devices()[0]; print('found', d.platform, d.device_kind)"


def run_part(arguments: list[str], limit: float, flags: str) -> dict:
    """Run a part; returns its exit status (None: out of time), output, seconds, and JSON lines."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            output, status = stop(process), None
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"shape"')]
    seconds = round(time.monotonic() - begin, 1)
    return dict(status=status, seconds=seconds, results=results, output=output[-20_000:])


def stop(process: subprocess.Popen) -> str:
    """Interrupt a process, so that it says what it has so far; kill it where it goes on."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=15)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def main() -> None:
    """Run the parts, and write the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--seconds", type=float, default=480, help="of all parts")
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error(f"--seconds: {options.seconds}; a positive number is needed")
    end = time.monotonic() + options.seconds
    asked = run_part(["-c", ASK], min(60, options.seconds), "")
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "device": next(
            (line[5:] for line in asked["output"].splitlines() if line[:5] == "found"), None
        ),
        "asking": None if asked["status"] == 0 else asked["output"],
        "parts": {},
    }
    options.out.write_text(json.dumps(found, indent=1))  # fails now, if it does
    for name, (arguments, share, flags) in PARTS.items():
        # What an earlier part has left over is for all that follow.
        shares = sum(s for n, (_, s, _) in PARTS.items() if n not in found["parts"])
        limit = max(1.0, (end - time.monotonic()) * share / shares)
        found["parts"][name] = part = run_part(arguments, limit, flags)
        options.out.write_text(json.dumps(found, indent=1))
        status = "out of time" if part["status"] is None else f"exit status {part['status']}"
        print(f"{name}: {status}, {part['seconds']} s", flush=True)
    print(f"{found['device'] or 'no device'}: all of it is in {options.out}")


if __name__ == "__main__":
    main()
