"""The Pallas Mosaic GPU kernel of `mosaic_gpu.py`: what its warpgroups do.

A program is described in `mosaic_gpu_program.py`. Its producer (`mosaic_gpu_producer.py`) fills
rings in shared memory. A consumer, here, walks over the split of each unit in chunks of keys, with
an online softmax for 64 lines. Both products are WGMMA: the scores of a chunk are multiplied while
the softmax of the chunk before it is computed.

Decode is bound by memory: a chunk of 64 tokens of head_dim 128 takes about 1,600 cycles of an
H200's bandwidth per multiprocessor. A consumer issues 464 instructions for it, 12 of them WGMMA of
about 510 cycles, of which the first half runs beside the softmax: near 1,050 cycles in all with the
waits. On paper: nothing was measured.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .mosaic_gpu_producer import load_unit
from .mosaic_gpu_program import (
    CHUNK,
    ROWS,
    Kernel,
    Place,
    Refs,
    Scratch,
    Static,
    Unit,
    in_ring,
    walk_units,
)
from .scoring import LOG2_E, LOWEST
from .splits import LINE_GROUP

# Registers of a thread of two consumers and a producer: 504 for three, what they are launched with.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


class Turn(NamedTuple):
    """What the steps of one consumer's work on a unit share."""

    kernel: Kernel
    unit: Unit
    place: Place
    consumer: int


class Sums(NamedTuple):
    """A softmax in progress, by line; scores are in units of log 2, values cut by columns."""

    top: Array
    total: Array
    acc: tuple[Array, ...]


def run_program(*refs, static: Static, **smem) -> None:
    """Do the units of work of one program."""
    kernel = Kernel(Refs(*refs), Scratch(**smem), static)
    warpgroup = lax.axis_index("warpgroup")

    # A body for each: offsets by a number that is not static would take dozens of registers.
    for consumer in range(static.consumers):
        pl.when(warpgroup == consumer)(partial(_consume, kernel, consumer))

    @pl.when(warpgroup == static.consumers)
    def produce():
        if static.consumers > 1:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        walk_units(kernel, partial(load_unit, kernel))


def _consume(kernel: Kernel, consumer: int) -> None:
    if kernel.static.consumers > 1:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
    walk_units(kernel, lambda unit, place: _attend(Turn(kernel, unit, place, consumer)))
    plgpu.wait_smem_to_gmem(0)


def _attend(turn: Turn) -> None:
    """Run the loop over the context of a unit. Only the edges of a context are masked."""
    smem, unit, static = turn.kernel.smem, turn.unit, turn.kernel.static
    q_slot = in_ring(turn.place.unit, static.query_slots)
    plgpu.barrier_wait(smem.q_ready.at[q_slot])
    masked, whole = (partial(_advance, turn, is_masked) for is_masked in (True, False))
    last = unit.chunks - 1
    begin, end = (jnp.minimum(x, last) for x in (unit.whole_begin, unit.whole_end))
    products, _ = _multiply_keys(turn, 0)
    carry = products, _start_sums(static)
    if static.scoring.window is not None:
        carry = lax.fori_loop(0, begin, masked, carry)
    carry = lax.fori_loop(begin, end, whole, carry)
    products, sums = lax.fori_loop(end, last, masked, carry)
    plgpu.barrier_arrive(smem.q_free.at[q_slot])
    sums, decay = _add_weights(turn, True, last, products, sums)
    _write(turn, *_finish(_add_values(turn, True, last, sums, decay)))


def _start_sums(static: Static) -> Sums:
    """Return the sums over no key."""
    line = plgpu.Layout.WGMMA.reduce(1)
    zeros = jnp.zeros((ROWS, static.part), jnp.float32)
    return Sums(
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), line),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), line),
        tuple(
            plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            for _ in range(static.head_dim // static.part)
        ),
    )


def _advance(turn: Turn, is_masked: bool, i, carry: tuple[Array, Sums]) -> tuple[Array, Sums]:
    """Add chunk i of the context to the sums, and multiply the keys of the next."""
    products, sums = carry
    softmax = partial(_add_weights, turn, is_masked, i, products, sums)
    products, (sums, decay) = _multiply_keys(turn, i + 1, softmax)
    return products, _add_values(turn, is_masked, i, sums, decay)


def _multiply_keys(turn: Turn, i, meanwhile: Callable = lambda: None):
    """Return the products of the queries and the keys of chunk i, and what `meanwhile` returns."""
    smem, static = turn.kernel.smem, turn.kernel.static
    q_slot = in_ring(turn.place.unit, static.query_slots)
    slot = in_ring(turn.place.chunk + i, static.ring)
    plgpu.barrier_wait(smem.k_ready.at[slot])
    keys = smem.k.at[slot].transpose((1, 0))
    results = _multiply(smem.q.at[q_slot, turn.consumer], keys, meanwhile)
    plgpu.barrier_arrive(smem.k_free.at[slot])
    return results


def _multiply(a, b, meanwhile: Callable = lambda: None):
    """Return the product of two matrices in shared memory, and what `meanwhile` returns."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        result = meanwhile()
        return accumulator[...], result  # waits for the product

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _add_weights(turn: Turn, is_masked: bool, i, products, sums: Sums) -> tuple[Sums, Array]:
    """Add a chunk to the softmax: return (sums without its values, decay), and store its weights.

    `products` are those of queries and keys.
    """
    smem, static = turn.kernel.smem, turn.kernel.static
    scores = _score(products, static)
    if is_masked:
        scores = _mask(scores, i, turn)
    top = jnp.maximum(sums.top, scores.max(axis=1))
    # A row that has seen no key adds weights of 1, and drops them once it sees one.
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    decay = jnp.exp2(sums.top - top)
    total = sums.total * decay + weights.sum(axis=1)
    slot = in_ring(i, 2)
    smem.weights[turn.consumer, slot] = weights.astype(smem.weights.dtype)
    # Makes the stores visible to WGMMA. It is a barrier, so nothing reads the weights before these.
    plgpu.commit_smem()
    return Sums(top, total, sums.acc), decay


def _score(products, static: Static) -> Array:
    """Return the scores in units of log 2."""
    scoring = static.scoring
    if scoring.soft_cap is None:
        return products * (scoring.scale * LOG2_E)
    return (scoring.soft_cap * LOG2_E) * _tanh(products * (scoring.scale / scoring.soft_cap))


def _mask(scores, i, turn: Turn) -> Array:
    """Return the scores, LOWEST where a row does not see a key."""
    unit, static = turn.unit, turn.kernel.static
    line = turn.consumer * ROWS + _iota(ROWS, 0)
    query = unit.position + lax.div(line, jnp.int32(static.heads))
    first = unit.start + i * CHUNK
    key = lax.broadcast_in_dim(_iota(CHUNK, 1), scores.shape, [1])
    # Bounds by row: few registers. An iota of two axes is an index by element.
    end = jnp.minimum(query + 1, unit.end_key) - first
    visible = key < lax.broadcast_in_dim(end, scores.shape, [0])
    if static.scoring.window is not None:
        begin = query - static.scoring.window - first
        visible &= key > lax.broadcast_in_dim(begin, scores.shape, [0])
    return jnp.where(visible, scores, LOWEST)


def _add_values(turn: Turn, is_masked: bool, i, sums: Sums, decay) -> Sums:
    """Return the sums with the values of chunk i, by the weights that are in shared memory."""
    smem, static = turn.kernel.smem, turn.kernel.static
    slot = in_ring(turn.place.chunk + i, static.ring)
    plgpu.barrier_wait(smem.v_ready.at[slot])
    if is_masked:
        first = turn.unit.start + i * CHUNK
        has_outside = (first < turn.unit.first_key) | (first + CHUNK > turn.unit.end_key)
        pl.when(has_outside)(partial(_clear_outside, turn, slot, first))
    slots = turn.consumer, in_ring(i, 2)
    acc = []
    for part, before in enumerate(sums.acc):
        columns = pl.ds(part * static.part, static.part)
        product, _ = _multiply(smem.weights.at[slots], smem.v.at[slot, :, columns])
        acc.append(before * lax.broadcast_in_dim(decay, before.shape, [0]) + product)
    plgpu.barrier_arrive(smem.v_free.at[slot])
    return sums._replace(acc=tuple(acc))


def _clear_outside(turn: Turn, slot, first) -> None:
    """Replace the values of a chunk by 0 where no row sees them: they may be NaN.

    The first consumer does, and another waits until it has.
    """
    smem, unit = turn.kernel.smem, turn.unit
    if turn.consumer > 0:
        plgpu.barrier_wait(smem.v_clean.at[slot])
        return
    v = plgpu.load(smem.v.at[slot], layout=plgpu.Layout.WGMMA)
    keys = lax.broadcast_in_dim(first + _iota(CHUNK, 0), v.shape, [0])
    is_inside = (keys >= unit.first_key) & (keys < unit.end_key)
    smem.v[slot] = jnp.where(is_inside, v, jnp.zeros_like(v))
    plgpu.commit_smem()
    if turn.kernel.static.consumers > 1:
        plgpu.barrier_arrive(smem.v_clean.at[slot])


def _finish(sums: Sums) -> tuple[tuple[Array, ...], Array]:
    """Return the mean of the values and the log-sum-exp, by row; 0 and -inf without a key."""
    has_key = (sums.top > LOWEST) | (sums.total != sums.total)  # a total of NaN has seen NaN
    total = jnp.where(has_key, sums.total, 1.0)
    factor = jnp.where(has_key, 1 / total, 0.0)
    lse = jnp.where(has_key, sums.top * (1 / LOG2_E) + jnp.log(total), -jnp.inf)
    return tuple(x * lax.broadcast_in_dim(factor, x.shape, [0]) for x in sums.acc), lse


def _write(turn: Turn, out, lse) -> None:
    """Write the results through shared memory, the groups of lines that there are."""
    smem, static = turn.kernel.smem, turn.kernel.static
    lines = min(ROWS, static.size - turn.consumer * ROWS)
    for part, values in enumerate(out):
        # What was written before must have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out[turn.consumer] = values
        if part == 0:
            smem.lse[turn.consumer] = lse
        plgpu.commit_smem()
        for group in range(lines // LINE_GROUP):
            number = turn.consumer * (ROWS // LINE_GROUP) + group
            pl.when(number < turn.unit.groups)(partial(_write_group, turn, group, number, part))


def _write_group(turn: Turn, group: int, number: int, part: int) -> None:
    """Write a group of lines. It is whole in the results, too: TMA stores whole tiles."""
    refs, smem, static = turn.kernel
    lines = turn.consumer, pl.ds(group * LINE_GROUP, LINE_GROUP)
    to = turn.unit.kv_head, turn.unit.first_group + number
    columns = slice(None), pl.ds(part * static.part, static.part)
    plgpu.copy_smem_to_gmem(smem.out.at[lines], refs.out.at[(*to, *columns)])
    if part == 0:
        plgpu.copy_smem_to_gmem(smem.lse.at[lines], refs.lse.at[to])


def _tanh(x) -> Array:
    """Return tanh. With `approx_math` its instruction is right to 11 bits only: too few here."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


def _iota(size: int, axis: int) -> Array:
    """Return 0 to size - 1, to be laid along the axis of a matrix."""
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
