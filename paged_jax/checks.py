"""Checks of single values: each returns the value in its plain Python type, or raises `error`.

A message names the argument, the value and what is accepted.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real

MOST = 2**30  # positions and counts are 32 bits wide on the device
MOST_DIGITS = 1000  # of an int where nothing else bounds it: Python prints 4300 at most


def show(value: object) -> str:
    """Return a value as a message names it: its repr, cut, or what it is where it has none."""
    try:
        return f"{value!r:.80}"
    except Exception:  # an int of more than 4300 digits, alone or inside; a repr of the caller's
        kind = type(value).__name__
        return f"<int of {value.bit_length()} bits>" if isinstance(value, int) else f"<{kind}>"


def check_int(
    name: str,
    value: object,
    least: int,
    most: int | None = MOST,
    *,
    error: type[ValueError],
) -> int:
    """Return `value` as an int from `least` to `most`. NumPy's integers are taken, bool is not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name}={show(value)}: an int is needed, got {type(value).__name__}")
    number = int(value)
    if number < least:
        raise error(f"{name}={show(number)}: must be at least {least}")
    if most is not None and number > most:
        raise error(f"{name}={show(number)}: must be at most {most}")
    if number >= 10**MOST_DIGITS:
        raise error(f"{name}={show(number)}: must be below 10**{MOST_DIGITS}")
    return number


def check_float(
    name: str,
    value: object,
    accepted: str,
    accepts: Callable[[float], bool],
    *,
    error: type[ValueError],
) -> float:
    """Return `value` as a finite float that `accepts`; `accepted` says which those are."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name}={show(value)}: a number is needed, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not accepts(number):
        raise error(f"{name}={show(value)}: must be {accepted}")
    return number


def check_bool(name: str, value: object, *, error: type[ValueError]) -> bool:
    """Return `value`, which must be a bool."""
    if not isinstance(value, bool):
        raise error(f"{name}={show(value)}: a bool is needed")
    return value
