"""A lock around an object's methods."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate

from paged_jax.errors import EngineBusyError


def new_lock() -> Any:
    """Return a lock that knows its holder."""
    return threading.RLock()


def exclusive[S, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let one thread at a time run the methods of an object that has a `_lock`.

    Others wait. The thread that is inside already, and comes again from a signal handler or a
    finalizer, cannot wait for itself: EngineBusyError. So these methods do not call each other.
    """

    @functools.wraps(method)
    def alone(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._lock._is_owned():
            raise EngineBusyError(
                f"{method.__name__}: was called inside another call of the engine, by a signal "
                "handler or a finalizer; `abandon` alone may be"
            )
        with self._lock:
            return method(self, *args, **kwargs)

    return alone
