"""Roots of the prefix directory: numbers below 0 that stand for a salt under the params in use.

    salt None -> -71    salt "a" -> -72    new params    salt None -> -73

A number is used once in 2**31. The first is drawn at random, so that content which another engine
cached, in a state that was saved, is not hit.
"""

from dataclasses import dataclass, field

import numpy as np

LEAST_ROOT, GREATEST_ROOT = -(2**31), -1

MOST_SALTS = 2**16


def _draw() -> int:
    return -int(np.random.default_rng().integers(1, 2**30))


@dataclass
class Roots:
    """The roots in use, by salt, and the next that is free."""

    by_salt: dict[str | None, int] = field(default_factory=dict)
    next_root: int = field(default_factory=_draw)


def find_root(roots: Roots, salt: str | None) -> int:
    """Return the root of a salt, a new one where the salt has none.

    Of very many salts the one that was new longest ago is forgotten: what it cached is not hit.
    """
    if salt not in roots.by_salt:
        root = roots.next_root
        roots.next_root = GREATEST_ROOT if root == LEAST_ROOT else root - 1
        if len(roots.by_salt) >= MOST_SALTS:
            roots.by_salt.pop(next(iter(roots.by_salt)))
        roots.by_salt[salt] = root  # last: an interrupt leaves no root that two salts have
    return roots.by_salt[salt]


def with_new_roots(roots: Roots) -> Roots:
    """Return roots where every salt begins at a new one."""
    return Roots({}, roots.next_root)
