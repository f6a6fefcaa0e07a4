"""The programs that a GPU would run, compiled for an H200 without one: no copy of a page, few
kernels, few host syncs.
"""

import collections
import re

import jax
import pytest

from compiled import cuda, programs, thunks
from compiled.checks import (
    attention_kernels,
    branches,
    count_kernels,
    host_reads,
    page_faults,
    steady_faults,
    whole_array_ops,
)
from compiled.program import read

LACKING = cuda.missing_wheels()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING), reason=LACKING),
    pytest.mark.xdist_group("programs"),  # in one process, which compiles each program once
]

MOST_KERNELS = 60  # in a greedy decode step, outside the decoder
WITH_EVERYTHING = 80
# In a greedy step: of the steps' loop, the events, the width, the sampler. Each waits for a GPU.
MOST_READS = 4
WITH_BEAMS = 5
SCOPES = ("schedule", "grow", "batch", "passes", "sample", "commit")


# With heads of 64 the decoder attends with Mosaic's kernel, else with Triton's.
@pytest.fixture(
    scope="module",
    params=["step, full, 64", "step, ladder, 64", "step, everything", "generate, full and window"],
)
def compiled(request):
    return _compile(request.param)


def _compile(param, graphs=None):
    """The program's name, the compiled program and its thunks."""
    kind, windows, *head_dim = param.split(", ")
    make, donated = {
        "step": (programs.step_program, (1,)),
        "generate": (programs.generate_program, ()),
    }[kind]
    sizes = dict(head_dim=int(head_dim[0])) if head_dim else {}
    program, args = make(windows, "bfloat16", **sizes)
    compiled = cuda.compile_for_h200(program, *args, donate_argnums=donated, graphs=graphs)
    return f"{kind}, {windows}", *compiled


def test_no_loop_touches_a_whole_array(compiled, record_property):
    name, executable, _ = compiled
    program, size = read(executable.as_text()), executable.memory_analysis().temp_size_in_bytes
    record_property(
        "measured", f"H200, {name}, jax {jax.__version__}: {size:,} bytes of temporaries"
    )
    assert page_faults(program, programs.NUM_BLOCKS, programs.PAGE_SIZE) == []
    assert steady_faults(program, programs.NUM_BLOCKS) == []
    if name.startswith("step"):
        assert [
            line
            for _, line in whole_array_ops(
                program, [program.entry], lambda s: s.size >= programs.PAGE_SIZE
            )
        ] == []
        assert size < programs.PAGE_SIZE


def test_every_layer_attends_with_the_kernel(compiled):
    name, executable, _ = compiled
    program = read(executable.as_text())
    found = _kernels_by_width(program, _passes(program))
    layers = len(programs.WINDOWS[name.split(", ")[1]])
    assert len(found) == len(programs.WIDTHS.get(name.split(", ")[1], (1, 2)))
    # Rows with one query, and beside them tiles where there are more tokens than rows.
    wanted = {width: layers * (1 + (width > programs.RUNNING)) for width in found}
    assert found == wanted
    assert ("mosaic_gpu" in executable.as_text()) == (name in ("step, full", "step, ladder"))


def _passes(program):
    """The conditional that chooses the width of a step."""
    (steps,) = program.loops("steps")
    (passes,) = [
        i
        for i in program.body(steps).instructions
        if i.opcode == "conditional" and i.op_name.endswith("/passes/cond")
    ]
    return passes


def _kernels_by_width(program, passes):
    """Count the attention kernels of each width, by the scope that they were made in."""
    kernels = [
        kernel
        for branch in branches(program, passes)
        for kernel in attention_kernels(program.reach(branch.name))
    ]
    found = [re.search(r"/width_(\d+)/", kernel.op_name) for kernel in kernels]
    return collections.Counter(int(match.group(1)) for match in found if match)


def test_few_kernels_and_host_syncs_outside_the_decoder(compiled, record_property):
    name, executable, _ = compiled
    program = read(executable.as_text())
    (steps,) = program.loops("steps")
    body = program.body(steps)
    condition = program.computations[steps.called["condition"][0]]
    counts = [
        count_kernels(program, part, without=("decoder", "events"), scopes=SCOPES)
        for part in (condition, body)
    ]
    total = sum(kernels.total for kernels in counts)
    by_scope = ", ".join(
        f"{part}: {k.table()}" for part, k in zip(("condition", "step"), counts, strict=True)
    )
    reads = 1 + host_reads(program, body)
    record_property(
        "measured",
        f"H200, {name}: {total} kernels ({by_scope}), {reads} predicates read by the host",
    )
    (events,) = program.loops("events", body)
    assert events in body.instructions and counts[0].open_loops == ()
    has_everything = name == "step, everything"
    assert total <= (WITH_EVERYTHING if has_everything else MOST_KERNELS)
    assert reads <= (WITH_BEAMS if has_everything else MOST_READS)


def test_a_step_is_three_graphs_and_the_decoder_lies_in_them(compiled, record_property):
    """Before the events, from there to the sampler, and after it."""
    name, _, found = compiled
    count = thunks.graphs_of_a_step(found)
    record_property("measured", f"H200, {name}: {count} graphs a step, XLA's own list of kinds")
    # Mosaic's kernels; Triton's are kernels like others.
    assert thunks.outside(found, ("kCustomCall",)) == []
    assert count <= 3


@pytest.mark.parametrize("param", ["step, ladder, 64", "step, everything"])
def test_with_loops_in_graphs_all_steps_are_one(param, record_property):
    name, _, found = _compile(param, thunks.WITH_LOOPS)
    record_property("measured", f"H200, {name}: {len(found)} thunks, with loops in graphs")
    assert thunks.outside(found) == []
    assert [thunk.kind for thunk in found if not thunk.is_in_graph] == ["kCommandBuffer"]
