"""A reader of PTX text: the loops of a kernel, as their instructions."""

import collections
import re

_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_OPCODE = re.compile(r"^(?:@!?%\w+\s+)?([\w.:]+)")


def loops(text: str) -> list[list[str]]:
    """Return for each backward branch the opcodes from its target to it, in order."""
    opcodes, labels, found = [], {}, []
    for line in map(str.strip, text.splitlines()):
        if match := _LABEL.match(line):
            labels[match.group(1)] = len(opcodes)
        elif line.endswith(";") and (match := _OPCODE.match(line)) and not line.startswith("."):
            opcodes.append(match.group(1))
            target = _BRANCH.search(line)
            if target and target.group(1) in labels:
                found.append(opcodes[labels[target.group(1)] :])
    return found


def count(opcodes: list[str]) -> collections.Counter:
    """Count opcodes by their first word: `setp.lt.s32` is `setp`, `ex2.approx.ftz.f32` is `ex2`."""
    return collections.Counter(opcode.split(".")[0] for opcode in opcodes)
