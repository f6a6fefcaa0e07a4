"""The work of the CUDA kernels: contexts cut at fixed places, listed over what is alive.

A context is cut at multiples of a length that depends alone on how much of it is seen. What else is
in the batch decides which program takes a split, never what is in it, so a row with one query has
its sums added in one order in any company. (Of a prompt, company decides the chunks.) The programs
are as many as the device runs at once. A unit is a split, longest first, and a KV head, which comes
first; program p takes the units p, p + programs, ..., so none has more than the mean and one split.

All of it is compares and sums on small arrays, equal for all layers of a decoder, so XLA computes
it once a step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from ..running_sum import running_sum
from .tiles import QueryTiles, Rows

LINE_GROUP = 8  # lines of results are written in groups: shared memory is laid out in eights
SHORTEST_SPLIT = 256  # tokens, of one row; a multiple of every chunk
SHORTEST_WIDE_SPLIT = 2048  # of a tile of more rows, whose results are more
UNITS = 256  # splits of a row times KV heads, at most: about two for each program
WIDE_SPLITS = 4


class Cut(NamedTuple):
    """How the contexts of some strips are cut, and how their results are stored. All of it static.

    A strip is a tile of query rows that one program takes. A line is a row of it and a head.

    Attributes:
        rows: most query rows of a strip.
        heads: query heads of a KV head, padded to a power of two.
        context: most tokens of a context.
        shortest: tokens of a split of a short context.
        most: splits of a context, at most; longer contexts have longer splits.
        chunk: tokens that a program reads in one trip of its loop.
        window: the sliding window.
    """

    rows: int
    heads: int
    context: int
    shortest: int
    most: int
    chunk: int
    window: int | None

    @property
    def most_seen(self) -> int:
        """Return the most tokens that the rows of a strip see: all, or what is in their windows."""
        if self.window is None:
            return self.context
        return min(self.context, self.window + self.rows - 1)

    @property
    def max_splits(self) -> int:
        """Return the most splits of a strip. A window may begin and end inside of one."""
        splits = min(self.most, pl.cdiv(self.most_seen, self.shortest))
        return max(1, splits + (self.window is not None))

    def max_lines(self, num_strips: int, num_tokens: int) -> int:
        """Return the most lines that the results of strips of T tokens can take."""
        by_strip = num_strips * _in_groups(self.rows * self.heads)
        by_token = num_tokens * self.heads + num_strips * (LINE_GROUP - 1)
        return _in_groups(min(by_strip, by_token)) * self.max_splits


def split_bounds(rows: int, kv_heads: int) -> tuple[int, int]:
    """Return the tokens of a split of a short context, and how many splits one has at most.

    Fewer KV heads make fewer units of work of a split, so contexts are cut into more.

    Example: 1 row, 8 KV heads -> (256, 32): splits of 256 tokens up to 8k, of 1,024 at 32k.
    """
    if rows > 1:
        return SHORTEST_WIDE_SPLIT, WIDE_SPLITS
    return SHORTEST_SPLIT, max(1, UNITS // kv_heads)


class Work(NamedTuple):
    """The splits, longest first.

    Attributes:
        strip: strip of each split.
        start: position of the first key of its first chunk, a multiple of the chunk.
        end: position after its last key.
        line: its first line of the results.
        num_splits: number of real splits.
    """

    strip: Int[Array, "I"]
    start: Int[Array, "I"]
    end: Int[Array, "I"]
    line: Int[Array, "I"]
    num_splits: Int[Array, "1"]


def for_each_unit(program, programs: int, num_splits, kv_heads, run: Callable, carry):
    """Fold `run(number, carry)` over the units of one program, in a loop of the kernel."""
    num_units = num_splits * kv_heads
    trips = pl.cdiv(jnp.maximum(num_units - program, 0), jnp.int32(programs))
    return lax.fori_loop(0, trips, lambda i, carry: run(program + i * programs, carry), carry)


def locate_in_work(number, kv_heads: int) -> tuple[Array, Array]:
    """Return the split and the KV head of a unit: 2 KV heads, unit 5 -> split 2, head 1."""
    return lax.div(number, jnp.int32(kv_heads)), lax.rem(number, jnp.int32(kv_heads))


class Places(NamedTuple):
    """Where the results of each strip are: those of split j begin at `first + j * lines`."""

    first: Int[Array, "P"]
    lines: Int[Array, "P"]
    splits: Int[Array, "P"]


def cut_strips(tiles: QueryTiles, place: Rows, rows: int) -> tuple[QueryTiles, Rows]:
    """Cut tiles into strips of up to `rows` rows, and locate the tokens in them.

    Example: a tile of 5 rows from token 7 on, strips of 2 rows: start [7, 9, 11],
    num_rows [2, 2, 1].
    """
    parts = pl.cdiv(tiles.size, rows)
    if parts == 1:
        return tiles, place
    first = jnp.arange(parts, dtype=jnp.int32) * rows
    seq = jnp.broadcast_to(tiles.seq[:, None], (*tiles.seq.shape, parts)).reshape(-1)
    num_rows = jnp.clip(tiles.num_rows[:, None] - first, 0, rows).reshape(-1)
    start, position = ((x[:, None] + first).reshape(-1) for x in (tiles.start, tiles.position))
    offsets = jnp.arange(rows, dtype=jnp.int32)
    # Strips without rows lie among the others, so none of them is counted out by num_tiles.
    strips = QueryTiles(seq, start, num_rows, position, tiles.num_tiles * parts, offsets)
    strip = place.tile * parts + lax.div(place.offset, jnp.int32(rows))
    return strips, Rows(strip, lax.rem(place.offset, jnp.int32(rows)), place.is_owned)


def list_work(strips: QueryTiles, cut: Cut, num_lines: int) -> tuple[Work, Places]:
    """List the splits of the strips' contexts, of which the results are in `num_lines` lines.

    What would pass them is left out: rows are more than tokens where `cu_q_lens` decreases.

    Example: two strips of one row at the positions 599 and 99, splits of 256 tokens: strip
    [0, 0, 1, 0], start [0, 256, 0, 512], end [256, 512, 100, 600].
    """
    end = jnp.where(strips.num_rows > 0, strips.position + strips.num_rows, 0)
    first = jnp.zeros_like(end)
    if cut.window is not None:
        first = jnp.where(end > 0, jnp.maximum(strips.position - (cut.window - 1), 0), 0)
    size = split_size(end if cut.window is None else jnp.minimum(end, cut.most_seen), cut)
    first_split = lax.div(first, size)
    splits = jnp.maximum(pl.cdiv(end, size) - first_split, 0)
    lines = _in_groups(strips.num_rows * cut.heads)
    space = splits * lines
    last_line = running_sum(space)
    splits = jnp.where(last_line <= num_lines, splits, 0)
    places = Places(last_line - space, lines, splits)
    bound = strips.seq.shape[0] * cut.max_splits
    strip, j, num_splits = _longest_first(first, end, size, splits, cut, bound)
    begin = (first_split[strip] + j) * size[strip]
    start = jnp.maximum(begin, lax.div(first, jnp.int32(cut.chunk))[strip] * cut.chunk)
    stop = jnp.minimum(begin + size[strip], end[strip])
    line = places.first[strip] + j * lines[strip]
    return Work(strip, start, stop, line, num_splits[None]), places


def split_size(seen: Int[Array, "P"], cut: Cut) -> Int[Array, "P"]:
    """Return the tokens of a split, where so many are seen.

    Example, up to 32 splits of 256 tokens and more: 100 -> 256, 8192 -> 256, 8193 -> 512.
    """
    size, longest = jnp.full_like(seen, cut.shortest), cut.shortest * cut.most
    while longest < cut.most_seen:
        size = jnp.where(seen > longest, size * 2, size)
        longest *= 2
    return size


def _longest_first(first, end, size, splits, cut: Cut, bound: int):
    """Return for each of `bound` splits its strip and its place there, and how many are real.

    Of a strip the splits in the middle are equally long. So there are three lists a strip: its
    first split, the middle, its last; or two, without a window. The lists are ordered.

    Example: a strip with splits of 200, 256, 256, 7 tokens and one with one of 100, chunks of 64:
    lists of 4, 4 and 4, 1, 2 chunks -> strip [0, 0, 0, 1, 0], place [0, 1, 2, 0, 3].
    """
    tail = jnp.where(splits > 1, lax.rem(end - 1, size) + 1, end - first)
    has_tail = (splits > 0).astype(jnp.int32)
    lists = [(splits - 1, has_tail, tail), (0 * splits, splits - has_tail, size)]
    if cut.window is not None:
        has_head = (splits > 1).astype(jnp.int32)
        lists[1] = (has_head, splits - has_tail - has_head, size)
        lists.append((0 * splits, has_head, size - lax.rem(first, size)))
    begin, count, tokens = (jnp.concatenate(x) for x in zip(*lists, strict=True))
    chunks = jnp.where(count > 0, pl.cdiv(tokens, jnp.int32(cut.chunk)), 0)
    number = jnp.arange(count.shape[0], dtype=jnp.int32)
    after = chunks[:, None]
    is_before = (chunks > after) | ((chunks == after) & (number < number[:, None]))
    place = jnp.where(is_before, count, 0).sum(1, dtype=jnp.int32)
    item = jnp.arange(bound, dtype=jnp.int32)
    in_list = item[:, None] - place
    is_in = (in_list >= 0) & (in_list < count)
    # One list at most has the item, so a sum picks it.
    of_item = jnp.where(is_in, number, 0).sum(1, dtype=jnp.int32)
    strip = lax.rem(of_item, jnp.int32(end.shape[0]))
    return strip, begin[of_item] + item - place[of_item], count.sum(dtype=jnp.int32)


def _in_groups(lines):
    """Round up to whole groups of lines."""
    return (lines + LINE_GROUP - 1) & -LINE_GROUP
