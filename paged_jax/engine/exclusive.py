"""A lock around an object's methods."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate


def new_lock() -> Any:
    """Return a lock that its holder may take again."""
    return threading.RLock()


def exclusive[S, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let one thread at a time run the methods of an object that has a `_lock`."""

    @functools.wraps(method)
    def alone(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone
