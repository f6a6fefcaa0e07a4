"""Measure a process and its children, and what the rest of the machine does meanwhile.

It reads Linux's /proc. Elsewhere memory is that of the process alone, and others' CPU use is None.
"""

import os
import resource
import sys
import threading
from pathlib import Path

PROC = Path("/proc")
HAS_PROC = (PROC / "stat").exists()


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process after its name: state, parent, ..."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # it has ended


def pids() -> list[int]:
    """Return this process and all its descendants."""
    if not HAS_PROC:
        return [os.getpid()]
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found


def memory_mib() -> float:
    """Return the resident memory of the tree; what its processes share is counted in each."""
    if not HAS_PROC:
        return own_peak_mib()
    pages = 0
    for pid in pids():
        if fields := _stat(pid):
            pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def own_peak_mib() -> float:
    """Return the most resident memory that this process alone ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def cpu_seconds() -> float:
    """Return the CPU time that the tree has used, its ended children's included."""
    if not HAS_PROC:
        return sum(os.times()[:4])
    ticks = sum(sum(map(int, f[11:15])) for pid in pids() if (f := _stat(pid)))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float | None:
    """Return the CPU time that the whole machine has been busy, stolen time included."""
    if not HAS_PROC:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(
        int, (PROC / "stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Watch:
    """Sample the memory of the tree in a thread, from when it is made until `peak` is asked."""

    def __init__(self, interval: float = 0.25):
        self._peak = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(interval,), daemon=True)
        self._thread.start()

    def _sample(self, interval: float) -> None:
        while not self._stop.wait(interval):
            self._peak = max(self._peak, memory_mib())

    def peak(self) -> float:
        """Return the most MiB that was seen, or that this process alone is known to have had."""
        self._stop.set()
        self._thread.join()
        return max(self._peak, memory_mib(), own_peak_mib())
