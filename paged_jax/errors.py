"""What goes wrong, as types: everything this package raises on purpose is a `PagedJaxError`."""

import os
import warnings


class PagedJaxError(Exception):
    """Base of the errors below."""


class ConfigError(PagedJaxError, ValueError):
    """A size or option that cannot work; the message names it, its value and what is accepted."""


class InvalidRequestError(PagedJaxError, ValueError):
    """A prompt or a sampling parameter that cannot be served; other requests are not touched."""


class NoProgressError(PagedJaxError, RuntimeError):
    """Requests wait, none runs and none can be admitted."""


class EngineBusyError(PagedJaxError, RuntimeError):
    """A call of an engine from a signal handler or a finalizer, in the middle of another call."""


class EngineClosedError(PagedJaxError, RuntimeError):
    """An engine whose state was lost in an interrupted or failed call; `reset()` opens it."""


class UnknownOptionError(PagedJaxError, TypeError):
    """A keyword that a function or class does not have; the message says what replaces it."""


def warn(message: str) -> None:
    """Warn of what is used otherwise than a file says, at the line of the caller."""
    warnings.warn(message, UserWarning, skip_file_prefixes=(os.path.dirname(__file__),))
