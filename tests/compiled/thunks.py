"""A reader of the list of thunks that XLA dumps: what a GPU is told to do, and in which graphs.

A thunk is a kernel, a copy, a loop, a conditional. A command buffer is a list of them that is
launched as one CUDA graph; a loop or conditional in it is the graph's own, and no host reads it.

    000: kCommandBuffer              a graph of two copies
        001: kCopy
        002: kCopy
    003: kWhile                      the host reads its predicate
      body:
        000: kCommandBuffer          a graph for each trip
            004: kCustomKernel
"""

import re
from typing import NamedTuple

DUMPED = "*.thunk_sequence_after_thunk_passes.txt"
# XLA's own list, and loops.
WITH_LOOPS = ",".join(
    [
        *("COLLECTIVES_KERNEL", "CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL"),
        *("DYNAMIC_SLICE_FUSION", "FUSION", "WHILE"),
    ]
)
_THUNK = re.compile(r"^( *)\d{3,}: (k\w+)")


class Thunk(NamedTuple):
    """A line: its kind, how deep it lies, and whether it is in a command buffer."""

    kind: str
    depth: int
    is_in_graph: bool
    line: str


def read(text: str) -> list[Thunk]:
    """Return the thunks in order. Raises ValueError where there are none."""
    thunks, graph = [], None
    for line in text.splitlines():
        found = _THUNK.match(line)
        if not found:
            continue
        depth, kind = len(found.group(1)) // 4, found.group(2)
        if graph is not None and depth <= graph:
            graph = None
        thunks.append(Thunk(kind, depth, graph is not None, line.strip()))
        if graph is None and kind == "kCommandBuffer":
            graph = depth
    if not thunks:
        raise ValueError("no thunks")
    return thunks


def graphs_of_a_step(thunks: list[Thunk]) -> int:
    """Count the graphs that lie directly in the first loop: each is launched once a step."""
    return sum(thunk.kind == "kCommandBuffer" and thunk.depth == 1 for thunk in thunks)


def outside(thunks: list[Thunk], kinds: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of the thunks in no graph, of those kinds; of all but graphs where empty."""
    return [
        t.line
        for t in thunks
        if not t.is_in_graph and t.kind != "kCommandBuffer" and (not kinds or t.kind in kinds)
    ]
