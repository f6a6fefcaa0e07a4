import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_without_a_gpu_the_kernel_benchmark_prints_the_floor_and_calls_nothing_measured():
    done = subprocess.run(
        [sys.executable, "benchmarks/kernel.py"],
        cwd=ROOT,
        env=os.environ | dict(JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.lower()
    assert "no gpu" in said and "floor" in said
    assert not any(word in said for word in ("of copy", "xla", "cudnn", "jax op"))
