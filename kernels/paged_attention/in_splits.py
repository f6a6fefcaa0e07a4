"""What the two CUDA kernels share: rows of one query and wider tiles, each split, then combined.

A row with one query is attended to by the same program at every width of the step, so it keeps its
bits beside a prefill.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from .combine import Partials, combine
from .plan import AttentionPlan
from .splits import Cut, Work, cut_strips, list_work, split_bounds
from .tiles import QueryTiles


class Kernel(NamedTuple):
    """A kernel as a function of static sizes.

    Attributes:
        run: from (strips, work, tile size, number of lines) to the results of all splits.
        heads: query heads of a KV head, padded to a power of two.
        rows: from a tile's rows to those that one program takes.
        chunk: from a tile's rows to the tokens that a program reads in one trip of its loop.
    """

    run: Callable[[QueryTiles, Work, int, int], Partials]
    heads: int
    rows: Callable[[int], int]
    chunk: Callable[[int], int]


def attend_in_splits(
    q: Float[Array, "T H D"],
    kv_heads: int,
    block_size: int,
    plan: AttentionPlan,
    sinks: Float[Array, "H"] | None,
    kernel: Kernel,
    interpret: bool,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Return (out, lse) of all tokens; 0 and -inf where no sequence owns a token."""
    context, window = plan.tables.shape[1] * block_size, plan.planned.window
    kinds = [(plan.rows, plan.row_place)]
    if plan.every.tiles.size > 1:
        kinds.append((plan.wide[0], plan.wide_place))
    result = None
    for tiles, place in kinds:
        rows = kernel.rows(tiles.size)
        strips, place = cut_strips(tiles, place, rows)
        shortest, most = split_bounds(tiles.size, kv_heads)
        cut = Cut(rows, kernel.heads, context, shortest, most, kernel.chunk(tiles.size), window)
        num_lines = cut.max_lines(strips.seq.shape[0], q.shape[0])
        work, places = list_work(strips, cut, num_lines)
        partials = kernel.run(strips, work, tiles.size, num_lines)
        result = combine(q, partials, places, place, sinks, result, cut.heads, interpret)
    assert result is not None
    return result
