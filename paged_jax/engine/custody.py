"""What becomes of a state that is donated: kept, not touched yet, or lost.

program not begun      the state is as before       the engine goes on
program returned       the new state is kept        the engine goes on
raised in between      the old state is gone        the engine is closed until it is reset
"""

from collections.abc import Callable
from typing import Any

import jax

from paged_jax.errors import EngineClosedError


class Custody:
    """Whether an engine has its state.

    Attributes:
        lost_in: the call in which it was lost, or may have been; None where it is there.
    """

    def __init__(self):
        self.lost_in: str | None = None

    def check(self) -> None:
        """Raise EngineClosedError where the state was lost."""
        if self.lost_in is not None:
            raise EngineClosedError(
                f"engine: its state was lost when {self.lost_in} was interrupted or failed; "
                "engine.reset() goes on with new pages, and keeps all requests"
            )

    def donate[T](
        self, call: str, state: Any, program: Callable[[], T], keep: Callable[[T], None]
    ) -> None:
        """Run a program that consumes the state, and keep what it returns.

        The state counts as lost where the old one is gone and it is not sure that the new one is
        kept, with all that belongs to it.
        """
        self.check()
        self.lost_in = call
        try:
            result = program()
        except BaseException:
            if not any(array.is_deleted() for array in jax.tree.leaves(state)):
                self.lost_in = None  # it was not begun
            raise
        keep(result)
        self.lost_in = None
