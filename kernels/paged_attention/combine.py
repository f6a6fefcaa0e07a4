"""Combining the partial softmaxes of a row's splits, in order: a small Pallas-Triton kernel.

A split is its softmax-weighted mean of values and its log-sum-exp, -inf without a key. A program
takes one token and some of its KV heads, and reads the results of that token's own splits only. It
is plain loads and stores, so it serves the Mosaic kernel too.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from .scoring import LOWEST
from .splits import Places
from .tiles import Rows
from .triton_program import broadcast

MOST_NUMBERS = 4096  # of one program: 32 registers a thread for its sums


class Partials(NamedTuple):
    """The results of splits, by line: a row and a head. See `splits.Places`."""

    out: Float[Array, "KV lines D"]
    lse: Float[Array, "KV lines"]


class Sizes(NamedTuple):
    """The sizes of a program, all static; head counts and width are powers of two.

    Attributes:
        has_sinks: whether there are sinks.
        is_onto: whether tokens without an owner are left alone.
    """

    kv_heads: int
    heads: int
    width: int
    has_sinks: bool
    is_onto: bool


class Refs(NamedTuple):
    """References to the operands and results; `sinks` is None where there are none."""

    strip: Any
    offset: Any
    is_owned: Any
    first: Any
    lines: Any
    splits: Any
    partial_out: Any
    partial_lse: Any
    sinks: Any
    out: Any
    lse: Any


class Sums(NamedTuple):
    """The sums over the splits so far, by head."""

    top: Array
    total: Array
    acc: Array


def combine(
    q: Float[Array, "T H D"],
    partials: Partials,
    places: Places,
    rows: Rows,
    sinks: Float[Array, "H"] | None,
    onto: tuple[Array, Array] | None,
    heads: int,
    interpret: bool,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Combine the splits of each token that has an owner in `rows`.

    Others keep what is in `onto`, (out, lse), or get 0 and -inf where it is None, as does a row
    that sees no key. A sink is one more split, without a value. `heads` are the lines of a row.

    Example: means [2, 6] with lse [log 1, log 3] -> out (2 * 1 + 6 * 3) / 4 = 5, lse log 4.
    """
    num_tokens, num_heads, head_dim = q.shape
    width = pl.next_power_of_2(head_dim)
    kv_heads = partials.lse.shape[0]
    in_program = max(1, min(pl.next_power_of_2(kv_heads), MOST_NUMBERS // width // heads))
    sizes = Sizes(in_program, heads, width, sinks is not None, onto is not None)
    like = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    operands = [*rows._replace(is_owned=rows.is_owned.astype(jnp.int32)), *places, *partials]
    operands += [sinks.astype(jnp.float32)] if sinks is not None else []
    first = len(operands)
    out, lse = pl.pallas_call(
        partial(_run_program, sizes=sizes),
        grid=(num_tokens, pl.cdiv(kv_heads, in_program)),
        out_shape=(like(q.shape, q.dtype), like((num_tokens, num_heads), jnp.float32)),
        input_output_aliases={first: 0, first + 1: 1} if onto else {},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="combine_splits",
    )(*operands, *(onto or ()))
    return out, lse


def _run_program(*refs, sizes: Sizes) -> None:
    """Combine the splits of one token for some KV heads."""
    sinks = refs[8] if sizes.has_sinks else None
    refs = Refs._make([*refs[:8], sinks, *refs[-2:]])
    token, first_head = pl.program_id(0), pl.program_id(1) * sizes.kv_heads
    is_owned = refs.is_owned[token] > 0
    if not sizes.is_onto:
        _combine_token(refs, token, first_head, is_owned, sizes)
        return

    @pl.when(is_owned)
    def combine_token():
        _combine_token(refs, token, first_head, is_owned, sizes)


def _combine_token(refs: Refs, token, first_head, is_owned, sizes: Sizes) -> None:
    kv_heads, _, head_dim = refs.partial_out.shape
    group = refs.out.shape[1] // kv_heads
    line = jnp.arange(sizes.kv_heads * sizes.heads, dtype=jnp.int32)
    kv_head = first_head + lax.div(line, jnp.int32(sizes.heads))
    in_group = lax.rem(line, jnp.int32(sizes.heads))
    is_live = (kv_head < kv_heads) & (in_group < group)
    dims = jnp.arange(sizes.width, dtype=jnp.int32)[None, :]
    mask = is_live[:, None] & (dims < head_dim)
    strip = jnp.where(is_owned, refs.strip[token], 0)
    num_splits = jnp.where(is_owned, refs.splits[strip], 0)
    lines = refs.lines[strip]
    first = refs.first[strip] + refs.offset[token] * sizes.heads + in_group

    def add(j, sums: Sums) -> Sums:
        at = first + j * lines
        lse = pltriton.load(refs.partial_lse.at[kv_head, at], mask=is_live, other=-jnp.inf)
        place = broadcast(mask.shape, kv_head[:, None], at[:, None], dims)
        mean = pltriton.load(refs.partial_out.at[place], mask=mask, other=0)
        has_key = lse != -jnp.inf  # true for NaN
        top = jnp.maximum(sums.top, jnp.where(has_key, lse, LOWEST))
        weight, decay = jnp.where(has_key, jnp.exp(lse - top), 0.0), jnp.exp(sums.top - top)
        acc = sums.acc * decay[:, None] + jnp.where(has_key[:, None], mean, 0.0) * weight[:, None]
        return Sums(top, sums.total * decay + weight, acc)

    zeros = jnp.zeros(line.shape, jnp.float32)
    start = Sums(zeros + LOWEST, zeros, jnp.zeros(mask.shape, jnp.float32))
    out, lse = _finish(lax.fori_loop(0, num_splits, add, start), refs, kv_head, in_group)
    head = kv_head * group + in_group
    pltriton.store(refs.lse.at[broadcast(head.shape, token, head)], lse, mask=is_live)
    place = broadcast(mask.shape, token, head[:, None], dims)
    pltriton.store(refs.out.at[place], out.astype(refs.out.dtype), mask=mask)


def _finish(sums: Sums, refs: Refs, kv_head, in_group) -> tuple[Array, Array]:
    """Return the mean of the values and the log-sum-exp, by head; 0 and -inf without a key."""
    top, total, acc = sums
    has_any = total != 0  # true for NaN
    if refs.sinks is not None:
        num_heads = refs.out.shape[1]
        head = kv_head * (num_heads // refs.partial_out.shape[0]) + in_group
        sink = pltriton.load(refs.sinks.at[head], mask=head < num_heads, other=-jnp.inf)
        raised = jnp.maximum(top, sink)
        decay = jnp.exp(top - raised)
        top, total, acc = raised, total * decay + jnp.exp(sink - raised), acc * decay[:, None]
    total = jnp.where(has_any, total, 1.0)
    out = jnp.where(has_any[:, None], acc / total[:, None], 0.0)
    return out, jnp.where(has_any, top + jnp.log(total), -jnp.inf)
