"""A reader of PTX text: the loops of a kernel, as counts of their instructions."""

import collections
import re

_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_OPCODE = re.compile(r"^(?:@!?%\w+\s+)?([\w.:]+)")


def loops(text: str) -> list[collections.Counter]:
    """Return for each backward branch the instructions from its target to it, by opcode.

    An opcode is cut at its first dots: `setp.lt.s32` counts as `setp`, `ex2.approx.ftz.f32` as
    `ex2`.
    """
    opcodes, labels, found = [], {}, []
    for line in map(str.strip, text.splitlines()):
        if match := _LABEL.match(line):
            labels[match.group(1)] = len(opcodes)
        elif line.endswith(";") and (match := _OPCODE.match(line)) and not line.startswith("."):
            opcodes.append(match.group(1).split(".")[0])
            target = _BRANCH.search(line)
            if target and target.group(1) in labels:
                found.append(collections.Counter(opcodes[labels[target.group(1)] :]))
    return found
