"""Compare greedy tokens with those of a reference."""

from collections.abc import Sequence
from typing import Any

Tokens = Sequence[Sequence[int]]


def compare(tokens: Tokens, expected: Tokens) -> dict[str, Any]:
    """Return how many outputs are equal, and the output and place of the first that is not."""
    pairs = list(zip(tokens, expected, strict=True))
    differing = [i for i, (own, other) in enumerate(pairs) if list(own) != list(other)]
    found: dict[str, Any] = {"equal": len(pairs) - len(differing), "of": len(pairs)}
    if differing:
        own, other = pairs[differing[0]]
        places = [i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b]
        place = places[0] if places else min(len(own), len(other))
        found["first_difference"] = {"prompt": differing[0], "token": place}
    return found
