"""Describe the machine that a result comes from."""

import platform
from pathlib import Path

from peer_runs.names import cpus

FLAGS = ("avx", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def _cpuinfo() -> dict[str, str]:
    """Return what Linux says of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    return {key.strip(): value.strip() for key, _, value in lines}


def describe() -> dict[str, object]:
    """Return the CPU's model, the cores that may be used and its vector instructions."""
    info = _cpuinfo()
    flags = info.get("flags", info.get("Features", "")).split()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": len(cpus()),
        "flags": [flag for flag in FLAGS if flag in flags],
        "system": f"{platform.system()} {platform.machine()}",
    }
