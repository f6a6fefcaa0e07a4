"""The programs that a GPU would run, compiled for an H200 without one: no copy of a page, few
kernels, few host syncs.
"""

import re

import jax
import pytest

from compiled import cuda, programs
from compiled.checks import (
    attention_kernels,
    count_kernels,
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

MOST_KERNELS = {
    "step, full": 70,
    "generate, full and window": 70,
}  # in a greedy decode step, outside the decoder
WITH_EVERYTHING = 120
MOST_LOOPS = 4  # of unknown length at the step's top level; each is a host sync
SCOPES = ("schedule", "copy", "grow", "batch", "sample", "commit")


# With heads of 64 the decoder attends with Mosaic's kernel, else with Triton's.
@pytest.fixture(
    scope="module", params=["step, full, 64", "step, everything", "generate, full and window"]
)
def compiled(request):
    kind, windows, *head_dim = request.param.split(", ")
    make, donated = {
        "step": (programs.step_program, (1,)),
        "generate": (programs.generate_program, ()),
    }[kind]
    program, args = make(
        windows, "bfloat16", **(dict(head_dim=int(head_dim[0])) if head_dim else {})
    )
    return f"{kind}, {windows}", cuda.compile_for_h200(program, *args, donate_argnums=donated)


def test_no_loop_touches_a_whole_array(compiled, record_property):
    name, executable = compiled
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
    name, executable = compiled
    program = read(executable.as_text())
    (steps,) = program.loops("steps")
    widths = [i for i in program.body(steps).instructions if i.opcode == "while" and _width(i)]
    layers = len(programs.WINDOWS[name.split(", ")[1]])
    assert len(widths) > 1
    assert [len(attention_kernels(program.reach(loop.called["body"][0]))) for loop in widths] == [
        layers
    ] * len(widths)
    assert ("mosaic_gpu" in executable.as_text()) == (name == "step, full")


def _width(loop):
    """Tokens of the step that a loop holds, None for other loops."""
    found = re.search(r"/width_(\d+)/while$", loop.op_name)
    return int(found.group(1)) if found else None


def test_few_kernels_and_host_syncs_outside_the_decoder(compiled, record_property):
    name, executable = compiled
    program = read(executable.as_text())
    (steps,) = program.loops("steps")
    body = program.body(steps)
    decode = min((i for i in body.instructions if i.opcode == "while" and _width(i)), key=_width)
    (events,) = program.loops("events", body)
    counts = [
        count_kernels(program, part, without=("decoder", "events"), scopes=SCOPES)
        for part in (program.computations[steps.called["condition"][0]], body, program.body(decode))
    ]
    total = sum(kernels.total for kernels in counts)
    by_scope = ", ".join(
        f"{part}: {k.table()}"
        for part, k in zip(("condition", "step", "decode"), counts, strict=True)
    )
    top = [
        i
        for i in body.instructions
        if i.opcode == "while" and i.trips is None and not i.in_scope("decoder")
    ]
    record_property(
        "measured",
        f"H200, {name}: {total} kernels ({by_scope}), {len(top)} loops of unknown length",
    )
    assert events in top and decode in top
    assert total <= MOST_KERNELS.get(name, WITH_EVERYTHING) and len(top) <= MOST_LOOPS
    assert counts[0].open_loops == counts[2].open_loops == ()
