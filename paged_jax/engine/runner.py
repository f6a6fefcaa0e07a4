"""The program that runs steps: which of those that are there serves a dispatch.

    jitted       compiles for whatever it is given
    first        compiled ahead for an engine's first arguments, or read from the cache folder
    successor    of other widths, once another process has compiled it (`later`)

All compute the same. The last of them that is there serves.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from paged_jax.engine import stored_programs
from paged_jax.engine.dispatch import shapes_of
from paged_jax.engine.later import Compilation
from paged_jax.engine.stored_programs import Spec


class Runner:
    """What was compiled ahead of its use, beside the jitted function of an engine.

    Args:
        first: takes what the jitted function takes; None where nothing was compiled yet.
        later_widths: of the successor; None for none.
    """

    def __init__(
        self, first: Callable | None, graphdef: nnx.GraphDef, later_widths: tuple[int, ...] | None
    ):
        self._first, self._graphdef, self._later_widths = first, graphdef, later_widths
        self._compilation: Compilation | None = None  # of the successor

    def run(self, jitted: Callable, *args: Any) -> Any:
        """Run steps. What was compiled for arguments of other places is not tried again."""
        program = self.pick()
        if program is None:
            return jitted(*args)
        try:
            return program(*args)
        except (TypeError, ValueError):  # before anything was donated
            self._first = self._compilation = self._later_widths = None
            return jitted(*args)

    def pick(self) -> Callable | None:
        """Return the program that serves; None where it is the jitted function."""
        if self._compilation is not None and self._compilation.program is not None:
            return self._compilation.program
        return self._first

    def forget(self) -> None:
        """Forget what was compiled: the next arguments have other shapes."""
        self._first = self._compilation = None

    def prepare(self, *args: Any) -> None:
        """Begin to compile the successor for arguments of such shapes, if that was not begun.

        Nothing is begun where an argument is not on the first device alone.
        """
        if self._later_widths is None or self._compilation is not None:
            return
        if any(_is_elsewhere(x) for x in jax.tree.leaves(args)):
            self._later_widths = None
            return
        settings = stored_programs.settings()
        spec = Spec(self._graphdef, self._later_widths, shapes_of(args), settings)
        self._compilation = Compilation(spec)

    def wait(self) -> str | None:
        """Wait until what was begun has ended; returns why there is no successor, None if one."""
        return "nothing was begun" if self._compilation is None else self._compilation.wait()


def _is_elsewhere(x: Any) -> bool:
    """Return whether an array is not on the first device alone."""
    return isinstance(x, jax.Array) and x.devices() != {jax.devices()[0]}
