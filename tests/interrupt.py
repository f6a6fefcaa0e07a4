"""Exceptions at chosen places of our own code: at each line, call, return and return from C."""

import linecache
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "paged_jax"
TOOL = 4
EVENTS = sys.monitoring.events
WATCHED = (EVENTS.LINE, EVENTS.PY_START, EVENTS.PY_RETURN, EVENTS.CALL, EVENTS.C_RETURN)


class Interrupt(KeyboardInterrupt):
    """Raised by `interrupted` alone."""


@cache
def is_ours(code):
    """Whether to raise there. A signal cannot come between a `with` of a lock and its release."""
    path = Path(code.co_filename)
    return path.parent in (ROOT, ROOT / "engine") and path.name != "exclusive.py"


@cache
def is_atomic(code, event, place):
    """Whether no signal can come there: in a `finally`, before a call of C that cleans up."""
    lines = [x[0] for x in code.co_positions()] if event == EVENTS.CALL else None
    line = place if lines is None else lines[place // 2]
    return linecache.getline(code.co_filename, line).strip().startswith(("finally:", "abandon("))


def run_interrupted(operation, at):
    """Run, and raise at the event number `at`, counting each place at most twice.

    Returns whether it was reached: a loop's third turn is like its second.
    """
    seen, count, where = Counter(), 0, None

    def watch(event):
        def see(code, *place):
            nonlocal count, where
            if not is_ours(code):
                return
            if event in (EVENTS.LINE, EVENTS.CALL) and is_atomic(code, event, place[0]):
                return
            key = (event, code, place[0])
            seen[key] += 1
            if where is None and seen[key] <= 2:
                count += 1
                if count > at:
                    where = (code.co_qualname, place[0], event)
                    raise Interrupt

        return see

    sys.monitoring.use_tool_id(TOOL, "interrupt")
    try:
        for event in WATCHED:
            sys.monitoring.register_callback(TOOL, event, watch(event))
        sys.monitoring.set_events(TOOL, sum(WATCHED) - EVENTS.C_RETURN)  # comes with CALL
        operation()
    except Interrupt:
        assert where is not None
    finally:
        sys.monitoring.set_events(TOOL, 0)
        for event in WATCHED:
            sys.monitoring.register_callback(TOOL, event, None)
        sys.monitoring.free_tool_id(TOOL)
        sys.monitoring.restart_events()
    return where
