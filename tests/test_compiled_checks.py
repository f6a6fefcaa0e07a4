"""The reader and the checks of compiled programs, on snippets written by hand and on planted
faults: they must be able to fail.
"""

import jax
import jax.numpy as jnp
import pytest

from compiled.checks import (
    count_kernels,
    host_reads,
    page_faults,
    steady_faults,
    whole_array_ops,
)
from compiled.program import Shape, read
from paged_jax.arrays import read_before_write

MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[7,2]{1,0})->f32[7,2]{1,0}}

FileNames
1 "f.py"

%add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}

%fused (p: f32[7,2]) -> (f32[7,2], s32[]) {
  %p = f32[7,2]{1,0} parameter(0)
  %zero = s32[] constant(0)
  ROOT %pair = (f32[7,2]{1,0}, s32[]) tuple(%p, %zero)
}

%greedy (t: (s32[])) -> s32[] {
  %t = (s32[]) parameter(0)
  ROOT %cheap = s32[] custom-call(%t), custom_call_target="f", metadata={op_name="jit(f)/steps/while/body/sample/cond/x"}
}

%drawn (t: (s32[])) -> s32[] {
  %t = (s32[]) parameter(0)
  %d1 = s32[] copy(%t)
  ROOT %d2 = s32[] copy(%d1)
}

%five (c: (s32[], f32[7,2])) -> (s32[], f32[7,2]) {
  %c = (s32[], f32[7,2]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = f32[7,2]{1,0} get-tuple-element(%c), index=1
  %y = f32[7,2]{1,0} copy(%x)
  ROOT %out = (s32[], f32[7,2]{1,0}) tuple(%n, %y)
}

%go (c: (s32[], f32[7,2])) -> pred[] {
  %c = (s32[], f32[7,2]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%step (c: (s32[], f32[7,2])) -> (s32[], f32[7,2]) {
  %c = (s32[], /*index=1*/f32[7,2]{1,0:T(8,128)}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %loop = (s32[], f32[7,2]{1,0}) while(%c), condition=%go, body=%five, backend_config={"known_trip_count":{"n":"5"}}
  %rare = (s32[], f32[7,2]{1,0}) while(%loop), condition=%go, body=%five, metadata={op_name="jit(f)/steps/while/body/events/while"}
  %x = f32[7,2]{1,0} get-tuple-element(%rare), index=1
  %both = (f32[7,2]{1,0}, s32[]) fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/steps/while/body/commit/add"}
  %put = f32[7,2]{1,0} copy(%x)
  %heavy = f32[7,2]{1,0} fusion(%put), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/steps/while/body/decoder/dot"}
  %arg = (s32[]) tuple(%n)
  %token = s32[] conditional(%n, %arg, %arg), branch_computations={%greedy, %drawn}, metadata={op_name="jit(f)/sample/cond"}
  ROOT %out = (s32[], f32[7,2]{1,0}) tuple(%token, %heavy)
}

ENTRY %main (x: f32[7,2]) -> f32[7,2] {
  %x = f32[7,2]{1,0} parameter(0), metadata={op_name="x (of f)"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[7,2]{1,0}) tuple(%zero, %x)
  %steps = (s32[], f32[7,2]{1,0}) while(%start), condition=%go, body=%step, metadata={op_name="jit(f)/steps/while" stack_frame_id=4}
  ROOT %got = f32[7,2]{1,0} get-tuple-element(%steps), index=1
}
"""


def test_reads_shapes_calls_scopes_and_trips():
    program = read(MODULE)
    (steps,) = program.loops("steps")
    assert steps.shapes == (Shape("s32", ()), Shape("f32", (7, 2))) and steps.operands == ("start",)
    assert (
        steps.called == {"condition": ("go",), "body": ("step",)}
        and steps.op_name == "jit(f)/steps/while"
    )
    body = program.body(steps)
    assert [i.opcode for i in body.instructions if i.is_root] == ["tuple"] and len(
        body.instructions
    ) == 11
    assert body.by_name["loop"].trips == 5 and body.by_name["rare"].trips is None
    assert body.by_name["token"].called["branch_computations"] == ("greedy", "drawn")
    assert body.by_name["heavy"].in_scope("decoder") and not body.by_name["both"].in_scope(
        "decoder"
    )
    assert {c.name for c in program.in_loops()} == {"step", "go", "five", "greedy", "drawn"}


@pytest.mark.parametrize(
    "text", ["", "nonsense", MODULE.replace("ENTRY ", ""), MODULE.replace("= s32[] add(", "add ")]
)
def test_refuses_what_it_cannot_read(text):
    with pytest.raises(ValueError):
        read(text)


def test_counts_known_loops_by_their_trips_and_the_branch_taken():
    program = read(MODULE)
    kernels = count_kernels(
        program,
        program.computations["step"],
        without=("decoder", "events"),
        scopes=("commit", "sample"),
    )
    assert kernels.counts == {
        ("copy", "other"): 5,
        ("fusion", "commit"): 1,
        ("custom-call", "sample"): 1,
    }
    assert (
        kernels.total == 7
        and kernels.table() == "other 5, commit 1, sample 1"
        and kernels.open_loops == ()
    )
    kernels = count_kernels(program, program.computations["step"])
    assert [loop.name for loop in kernels.open_loops] == ["rare"] and kernels.total == 9


def test_counts_the_predicates_that_the_host_reads():
    program = read(MODULE)
    assert host_reads(program, program.computations["step"]) == 2  # of %rare and of %token
    assert host_reads(program, program.entry) == 1


CHOICE = """
HloModule jit_f

%write (t: (f32[7,2])) -> (f32[7,2]) {
  %t = (f32[7,2]{1,0}) parameter(0)
  %x = f32[7,2]{1,0} get-tuple-element(%t), index=0
  %y = f32[7,2]{1,0} scatter(%x)
  ROOT %out = (f32[7,2]{1,0}) tuple(%y)
}

%keep (t: (f32[7,2])) -> (f32[7,2]) {
  %t = (f32[7,2]{1,0}) parameter(0)
  %x = f32[7,2]{1,0} get-tuple-element(%t), index=0
  ROOT %out = (f32[7,2]{1,0}) tuple(%x)
}

ENTRY %main (n: s32[], t: (f32[7,2])) -> (f32[7,2]) {
  %n = s32[] parameter(0)
  %t = (f32[7,2]{1,0}) parameter(1)
  ROOT %token = (f32[7,2]{1,0}) conditional(%n, %t, %t), branch_computations={%write, %keep}
}
"""


def test_finds_a_conditional_of_which_a_branch_hands_pages_on():
    def faults(text):
        program = read(text)
        return whole_array_ops(program, [program.entry], lambda shape: shape.size >= 14)

    assert [line.split(":")[0] for _, line in faults(CHOICE)] == ["conditional around f32[7,2]"]
    assert faults(CHOICE.replace("{%write, %keep}", "{%write, %write}")) == []


def test_finds_a_copy_in_a_loop_but_for_steady_decode_not_in_the_events():
    program = read(MODULE)
    assert {line.split(" (")[0] for line in page_faults(program, 7, 14)} == {
        "copy of f32[7,2]: %y in %five",
        "copy of f32[7,2]: %put in %step",
    }
    assert page_faults(program, 7, 15) == [] and page_faults(program, 5, 1) == []
    assert len(steady_faults(program, 7)) == 1  # not that of %five, which runs in the events
    assert len(steady_faults(read(MODULE.replace("events/while", "other/while")), 7)) == 2


# ---------------------------------------------------------------- planted in real programs

N, STEPS = 1009, 50
PAGES = jax.ShapeDtypeStruct((N, 4, 2), jnp.float32)
COUNTS = jax.ShapeDtypeStruct((N,), jnp.int32)


def compiled_loop(body):
    """`body(i, pages, counts)`, many times over donated arrays."""

    def loop(pages, counts):
        return jax.lax.fori_loop(0, STEPS, lambda i, c: body(i, *c), (pages, counts))

    return read(jax.jit(loop, donate_argnums=(0, 1)).lower(PAGES, COUNTS).compile().as_text())


def sound(i, pages, counts):
    """Writes one page and one count in place, and reads some of both."""
    count, counts = read_before_write(counts, i)
    return pages.at[count % N, 1].set(pages[count % N, 0] + 1), counts.at[i].add(1)


def write_in_a_cond(i, pages, counts):
    return jax.lax.cond(counts[i] > 0, lambda p: p.at[i].set(1.0), lambda p: p, pages), counts.at[
        i
    ].add(1)


def write_and_read_the_old(i, pages, counts):
    new = pages.at[i].set(1.0)
    return new, counts.at[i].set(pages[new[i + 1, 0, 0].astype(jnp.int32), 0, 0].astype(jnp.int32))


def reduce_over_the_pool(i, pages, counts):
    return pages, counts.at[i].set(jnp.sum(counts))


def broadcast_over_the_pool(i, pages, counts):
    return pages, jnp.zeros_like(counts).at[counts[i]].set(i)


def arithmetic_over_the_pool(i, pages, counts):
    return pages, counts + i


def test_a_sound_loop_passes():
    program = compiled_loop(sound)
    assert page_faults(program, N, N * 8) == [] and steady_faults(program, N) == []


@pytest.mark.parametrize("fault", [write_in_a_cond, write_and_read_the_old])
def test_a_page_copy_is_found(fault):
    assert page_faults(compiled_loop(fault), N, N * 8)


@pytest.mark.parametrize(
    "fault", [reduce_over_the_pool, broadcast_over_the_pool, arithmetic_over_the_pool]
)
def test_work_over_the_whole_pool_is_found(fault):
    program = compiled_loop(fault)
    assert steady_faults(program, N) and page_faults(program, N, N * 8) == []
