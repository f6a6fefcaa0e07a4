"""A reader of optimised HLO text: computations, their instructions, and which call which."""

import functools
import math
import re
from dataclasses import dataclass

_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """Of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line: `name = shapes opcode(operands), called=..., metadata={op_name="..."}`. A tuple has
    several shapes.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]]
    op_name: str
    trips: int | None  # of a while loop whose number of trips is known
    is_root: bool

    def in_scope(self, scope: str) -> bool:
        """Whether it came from under `jax.named_scope(scope)`."""
        return scope in self.op_name.split("/")


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users = {i.name: [] for i in self.instructions}
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                users[name].append(i)
        return users

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.is_root)

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        return [s for name in instruction.operands for s in self.by_name[name].shapes]


@dataclass(frozen=True)
class Program:
    """All computations of a module."""

    computations: dict[str, Computation]
    entry: Computation

    def reach(self, start: str) -> list[Computation]:
        """`start` and all that run as part of it, other than the insides of fusions and of
        reducers, each once.
        """
        seen, todo = {}, [start]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen[name] = self.computations[name]
            for i in seen[name].instructions:
                if i.opcode in ("while", "conditional", "call") or i.opcode.startswith("async"):
                    todo.extend(callee for callees in i.called.values() for callee in callees)
        return list(seen.values())

    def loops(self, scope: str, start: Computation | None = None) -> list[Instruction]:
        """The while loops written directly under `jax.named_scope(scope)`, anywhere or in what
        `start` runs.
        """
        places = self.computations.values() if start is None else self.reach(start.name)
        return [
            i
            for c in places
            for i in c.instructions
            if i.opcode == "while" and i.op_name.split("/")[-2:] == [scope, "while"]
        ]

    def body(self, loop: Instruction) -> Computation:
        return self.computations[loop.called["body"][0]]

    def in_loops(self) -> list[Computation]:
        """Every computation that runs inside some loop, conditions included."""
        found = {}
        for c in self.reach(self.entry.name):
            for i in c.instructions:
                if i.opcode == "while":
                    for part in ("body", "condition"):
                        found |= {inner.name: inner for inner in self.reach(i.called[part][0])}
        return list(found.values())


def read(text: str) -> Program:
    """Raises ValueError where the text is not what this knows how to read: a check must not pass
    for want of sight.
    """
    computations, entry, name, lines = {}, None, None, []
    for line in _COMMENT.sub("", text).splitlines():
        if name is None:
            if start := _COMPUTATION.match(line):
                is_entry, name = start.groups()
                entry = name if is_entry else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name, lines = None, []
        elif line.strip():
            lines.append(_instruction(line))
    if entry is None or name is not None:
        raise ValueError("no ENTRY computation, or one that does not end")
    return Program(computations, computations[entry])


def _instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    if not found:
        raise ValueError(f"not an instruction: {line}")
    is_root, name, rest = found.groups()
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shapes, rest = rest[:end], rest[end:].strip()
    opcode, rest = rest[: rest.index("(")], rest[rest.index("(") :]
    end = _closing(rest)
    operands, attributes = rest[1 : end - 1], rest[end:]
    op_name = _OP_NAME.search(attributes)
    trips = _TRIPS.search(attributes)
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=tuple(
            Shape(t, tuple(int(d) for d in dims.split(",") if d))
            for t, dims in _SHAPE.findall(shapes)
        ),
        operands=()
        if opcode in ("parameter", "constant")
        else tuple(re.findall(r"%([\w.\-]+)", operands)),
        called={
            key: tuple(re.findall(r"[\w.\-]+", names)) for key, names in _CALLED.findall(attributes)
        },
        op_name=op_name.group(1) if op_name else "",
        trips=int(trips.group(1)) if trips else None,
        is_root=bool(is_root),
    )


def _closing(text: str) -> int:
    """The position behind the parenthesis that closes the one at 0."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"unbalanced: {text:.120}")
