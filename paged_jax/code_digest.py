"""A digest of this package's code as it is loaded in this process.

What is compiled of it may be kept under such a digest: a module of an edited file has another one,
and so has a function or a constant that someone has put in place of ours.
"""

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

PACKAGE = __name__.partition(".")[0]
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic)


def code_digest() -> str:
    """Return the digest of all modules of the package, in hexadecimal digits."""
    digest, known = hashlib.sha256(), {}
    modules = dict(sys.modules)  # another thread may import meanwhile
    for name in sorted(name for name in modules if name.partition(".")[0] == PACKAGE):
        file = Path(getattr(modules[name], "__file__", None) or "")
        digest.update(file.read_bytes() if file.is_file() else b"")
        for part in _members(name, dict(vars(modules[name])), known):
            digest.update(part.encode(errors="surrogatepass"))
    return digest.hexdigest()


def _members(owner: str, members: Any, known: dict[int, tuple[Any, str]]) -> Iterator[str]:
    """Yield a line for each member: `paged_jax.config.BLOCK_SIZE=16`."""
    for name, value in sorted(members.items()):
        if not name.startswith("__") or isinstance(value, FunctionType):
            yield f"{owner}.{name}={_describe(value, known)}\n"


def _describe(value: Any, known: dict[int, tuple[Any, str]]) -> str:
    """Return a text that is another one for other code.

    `known` has the objects that were seen, by their address, and their texts.
    """
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, type(value).__name__  # where it contains itself
    text = "".join(_parts(value, known))
    known[id(value)] = value, text
    return text


def _parts(value: Any, known: dict[int, tuple[Any, str]]) -> Iterator[str]:
    if isinstance(value, PLAIN):
        yield repr(value)
    elif isinstance(value, tuple | list):
        yield from _several(value, known)
    elif isinstance(value, set | frozenset | dict):
        items = value.items() if isinstance(value, dict) else value
        yield from sorted(_describe(item, known) for item in items)
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        yield from _several((value.co_names, value.co_varnames, *value.co_consts), known)
    elif isinstance(value, type):
        yield f"{value.__qualname__} of {value.__bases__}"
        if value.__module__.partition(".")[0] == PACKAGE:
            yield from _members(value.__qualname__, vars(value), known)
    elif isinstance(value, functools.partial):
        yield from _several((value.func, value.args, value.keywords), known)
    elif isinstance(value, property):
        yield from _several((value.fget, value.fset), known)
    elif isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if _is_full(cell))
        yield from _several((value.__code__, value.__defaults__, value.__kwdefaults__), known)
        yield from _several(cells, known)
    else:  # a jitted function, a static method: what it wraps; of other objects their type
        yield type(value).__name__
        wrapped = getattr(value, "__wrapped__", None)
        yield "" if isinstance(value, type(sys)) else _describe(wrapped, known)


def _several(values: Iterable[Any], known: dict[int, tuple[Any, str]]) -> Iterator[str]:
    for value in values:
        yield f"{_describe(value, known)},"


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False
