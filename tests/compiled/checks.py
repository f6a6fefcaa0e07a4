"""What must not happen in a loop of the compiled step, and how many kernels it launches."""

import collections
from collections.abc import Callable
from dataclasses import dataclass

from compiled.program import Computation, Instruction, Program, Shape

# These pass a large array on, or touch only the part of it that is asked for. A scatter or an
# update that is not in place shows as a copy of its operand, which XLA puts in front of it.
_TOUCH_A_PART = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "opt-barrier", "while", "call"),
    *("gather", "dynamic-slice", "scatter", "dynamic-update-slice"),
}
KERNEL = "paged_attention"  # the scope that the attention kernels are called in
_NO_KERNEL = {
    *(
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "opt-barrier",
        "after-all",
        "add-dependency",
    ),
    *("partition-id", "replica-id", "copy-done", "async-done", "async-update"),
}


def whole_array_ops(
    program: Program, computations: list[Computation], is_large: Callable[[Shape], bool]
) -> list[tuple[Instruction, str]]:
    """Ops that read or write the whole of a large array, each with a line that says which: copies,
    broadcasts, reduces, arithmetic.

    So does a conditional of which a branch hands one on as it came: on a GPU that branch copies it,
    whatever this program shows. Where all branches write it, a copy is seen in one of them.
    """
    found = []
    for computation in computations:
        for i in computation.instructions:
            if not any(map(is_large, (*i.shapes, *computation.operand_shapes(i)))):
                continue
            where = f"%{i.name} in %{computation.name} ({i.op_name or 'no op_name'})"
            if i.opcode == "fusion":
                inside = whole_array_ops(
                    program, [program.computations[i.called["calls"][0]]], is_large
                )
                found += [(i, f"{line}, fused in {where}") for _, line in inside]
            elif i.opcode == "conditional":
                if _hands_on(program, i, is_large):
                    found.append((i, f"conditional around {_largest(i.shapes)}: {where}"))
            elif (
                i.opcode not in _TOUCH_A_PART
                and not i.opcode.startswith("async")
                and not _reads(i, is_large)
            ):
                shapes = [s for s in (*i.shapes, *computation.operand_shapes(i)) if is_large(s)]
                found.append((i, f"{i.opcode} of {_largest(shapes)}: {where}"))
    return found


def _hands_on(program: Program, i: Instruction, is_large: Callable[[Shape], bool]) -> bool:
    """Whether a branch of a conditional returns a large array that it was given."""
    for branch in branches(program, i):
        is_tuple = branch.root.opcode == "tuple"
        names = branch.root.operands if is_tuple else [branch.root.name]
        for value in map(branch.by_name.__getitem__, names):
            while value.opcode in ("get-tuple-element", "bitcast"):
                value = branch.by_name[value.operands[0]]
            large = any(map(is_large, i.shapes)) and any(map(is_large, value.shapes))
            if large and value.opcode == "parameter":
                return True
    return False


def branches(program: Program, i: Instruction) -> list[Computation]:
    """The branches of a conditional by number; of two the first is that of false."""
    names = i.called.get("branch_computations") or (
        *i.called["false_computation"],
        *i.called["true_computation"],
    )
    return [program.computations[name] for name in names]


def attention_kernels(computations: list[Computation]) -> list[Instruction]:
    """The calls of a Pallas attention kernel."""
    return [
        i
        for c in computations
        for i in c.instructions
        if i.opcode == "custom-call" and i.in_scope(KERNEL)
    ]


def _reads(i: Instruction, is_large: Callable[[Shape], bool]) -> bool:
    """Whether it is an attention kernel that is given pages, which it reads a block at a time, and
    makes none.
    """
    return i.opcode == "custom-call" and i.in_scope(KERNEL) and not any(map(is_large, i.shapes))


def _largest(shapes) -> Shape:
    return max(shapes, key=lambda s: s.size)


def has_pool_dim(num_blocks: int) -> Callable[[Shape], bool]:
    """Of the pool's own arrays and the pages, however they are reshaped. `num_blocks` must be a
    prime above all other sizes.
    """
    return lambda shape: any(dim and dim % num_blocks == 0 for dim in shape.dims)


def page_faults(program: Program, num_blocks: int, page_size: int) -> list[str]:
    """Ops on a whole page array (of `page_size` elements or more) in any loop."""
    pool_dim = has_pool_dim(num_blocks)
    found = whole_array_ops(
        program, program.in_loops(), lambda s: pool_dim(s) and s.size >= page_size
    )
    return [line for _, line in found]


def steady_faults(program: Program, num_blocks: int) -> list[str]:
    """Ops on a whole array with a pool dimension in any loop, but for the rare events."""
    rare = {
        c.name
        for loop in program.loops("events")
        for part in loop.called.values()
        for c in program.reach(part[0])
    }
    places = [c for c in program.in_loops() if c.name not in rare]
    return [line for _, line in whole_array_ops(program, places, has_pool_dim(num_blocks))]


@dataclass(frozen=True)
class Kernels:
    """What one run of a computation launches, outside the scopes left out.

    `counts` is by opcode and the innermost scopes; `open_loops` are its own loops of unknown
    length, which are not counted.
    """

    counts: collections.Counter
    open_loops: tuple[Instruction, ...]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def table(self) -> str:
        """By what is under the step's named scopes."""
        by_scope = collections.Counter()
        for (_, scope), count in self.counts.items():
            by_scope[scope] += count
        return ", ".join(f"{scope} {count}" for scope, count in by_scope.most_common())


def count_kernels(
    program: Program,
    computation: Computation,
    *,
    without: tuple[str, ...] = (),
    scopes: tuple[str, ...] = (),
) -> Kernels:
    """Instructions that launch something: fusions, copies, custom calls and all others with work of
    their own.

    A loop of known length counts its body as often; of a conditional the first branch counts
    (`lax.cond`: what is done when the predicate is false). A loop of unknown length counts nothing:
    the caller decides. `without` names scopes to leave out; `scopes` those to list by.
    """
    counts: collections.Counter = collections.Counter()
    loops: list[Instruction] = []

    def left_out(i: Instruction) -> bool:
        return any(i.in_scope(scope) for scope in without)

    def walk(computation: Computation, times: int) -> None:
        for i in computation.instructions:
            if i.opcode in _NO_KERNEL or (
                (places := _named(computation, i)) and all(map(left_out, places))
            ):
                continue
            if i.opcode == "while":
                if i.trips is not None:
                    walk(program.body(i), times * i.trips)
                else:
                    loops.append(i)
            elif i.opcode == "conditional":
                walk(branches(program, i)[0], times)
            elif i.opcode == "call":
                walk(program.computations[i.called["to_apply"][0]], times)
            else:
                counts[i.opcode, next((s for s in scopes if i.in_scope(s)), "other")] += times

    walk(computation, 1)
    return Kernels(counts, tuple(loops))


def host_reads(program: Program, computation: Computation) -> int:
    """Predicates that the host reads in one run that enters no loop of unknown length.

    A GPU's loop reads one before each trip and one to end, so one where it is not entered; a
    conditional reads one, and takes its first branch.
    """
    reads = 0
    for i in computation.instructions:
        if i.opcode == "while":
            reads += host_reads(program, program.body(i)) * i.trips if i.trips is not None else 1
        elif i.opcode == "conditional":
            reads += 1 + host_reads(program, branches(program, i)[0])
        elif i.opcode == "call":
            reads += host_reads(program, program.computations[i.called["to_apply"][0]])
    return reads


def _named(computation: Computation, i: Instruction) -> list[Instruction]:
    """`i`, or where it came from nowhere that has a name (a copy that XLA put in), what uses it."""
    if i.op_name or i.opcode in ("while", "conditional", "call"):
        return [i]
    return [place for user in computation.users[i.name] for place in _named(computation, user)]
