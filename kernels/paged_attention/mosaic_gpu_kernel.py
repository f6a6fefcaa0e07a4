"""The Pallas Mosaic GPU kernel of `mosaic_gpu.py`.

A program (`mosaic_gpu_program.py`) takes units of work in turn, and walks over each one's split of
a context in chunks of keys, with an online softmax. K and V come a page at a time through TMA into
a ring of chunks in shared memory; the block table is read at the start of the trip that copies.
Both products are WGMMA, 64 rows wide.

Decode is bound by memory: a chunk of 64 tokens of head_dim 128 takes about 1,600 cycles of an
H200's bandwidth per multiprocessor. This warpgroup issues about 540 instructions for it, and its
12 WGMMA take about 510 cycles more. Of that nothing overlaps but the copies, so it is near 1,400
in all. On paper: nothing was measured.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .mosaic_gpu_program import (
    CHUNK,
    RING,
    ROWS,
    Kernel,
    Refs,
    Scratch,
    Static,
    Unit,
    locate_unit,
)
from .scoring import LOG2_E, LOWEST
from .splits import LINE_GROUP, for_each_unit


class Sums(NamedTuple):
    """A softmax in progress, by row; scores are in units of log 2."""

    top: Array
    total: Array
    acc: Array


def run_program(*refs, static: Static, **smem) -> None:
    """Do the units of work of one program."""
    refs, scratch = Refs(*refs), Scratch(**smem)

    def run(number):
        _attend(Kernel(refs, scratch, static, locate_unit(number, refs, static)))

    sizes = static.programs, refs.num_splits[0], refs.k.shape[2]
    for_each_unit(lax.axis_index("program"), *sizes, run)


def _attend(kernel: Kernel) -> None:
    """Run the loop over the context of a unit, with copies RING - 1 chunks ahead of it."""
    refs, smem, static, unit = kernel
    queries = refs.q.at[unit.strip, unit.kv_head]
    plgpu.copy_gmem_to_smem(queries, smem.q.at[pl.ds(0, static.size)], smem.q_ready)
    for chunk in range(RING - 1):
        pl.when(chunk < unit.chunks)(partial(_read_and_load, kernel, chunk))
    plgpu.barrier_wait(smem.q_ready)
    # Only the edges of a context are masked.
    masked, whole = (partial(_add_chunk, kernel, is_masked) for is_masked in (True, False))
    sums = _start_sums(refs.k.shape[3])
    if static.scoring.window is not None:
        sums = lax.fori_loop(0, unit.whole_begin, masked, sums)
    sums = lax.fori_loop(unit.whole_begin, unit.whole_end, whole, sums)
    sums = lax.fori_loop(unit.whole_end, unit.chunks, masked, sums)
    _write(kernel, *_finish(sums))


def _read_and_load(kernel: Kernel, chunk: int) -> None:
    _load(kernel, jnp.int32(chunk), _read_table(kernel, chunk))


def _read_table(kernel: Kernel, chunk) -> list[Array]:
    """Read the ids of a chunk's blocks.

    Past the split the last block's is read again: its copy comes from the cache, and every copy
    that a barrier waits for is made.

    Example, pages of 16, blocks 0 to 5 in the context: chunk 1 has the blocks [4, 5, 5, 5].
    """
    unit, pages = kernel.unit, CHUNK // kernel.refs.k.shape[1]
    columns = (unit.column + chunk * pages + j for j in range(pages))
    return [
        kernel.refs.tables[unit.seq, jnp.clip(column, 0, unit.last_column)] for column in columns
    ]


def _load(kernel: Kernel, chunk, blocks: list[Array]) -> None:
    """Start the copies of a chunk's K and V into its place in the ring.

    One warp does: where all four come together for it, each copy costs a barrier.
    """
    refs, smem, kv_head = kernel.refs, kernel.smem, kernel.unit.kv_head
    slot, block_size = lax.rem(chunk, jnp.int32(RING)), refs.k.shape[1]

    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def run_in_warps():
        @pl.when(lax.axis_index("warp") == 0)
        def copy():
            for j, block in enumerate(blocks):
                at = slot, pl.ds(j * block_size, block_size)
                page = block, slice(None), kv_head
                plgpu.copy_gmem_to_smem(refs.k.at[page], smem.k.at[at], smem.k_ready.at[slot])
                plgpu.copy_gmem_to_smem(refs.v.at[page], smem.v.at[at], smem.v_ready.at[slot])


def _start_sums(head_dim: int) -> Sums:
    """Return the sums over no key."""
    line = plgpu.Layout.WGMMA.reduce(1)
    return Sums(
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), line),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), line),
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
    )


def _add_chunk(kernel: Kernel, is_masked: bool, i, sums: Sums) -> Sums:
    """Add chunk i of the context to the sums, and start the copies of the chunk RING - 1 ahead."""
    smem, unit = kernel.smem, kernel.unit
    slot, ahead = lax.rem(i, jnp.int32(RING)), i + (RING - 1)
    # Used further down: the copies that need them must not wait for them.
    blocks = _read_table(kernel, ahead)
    plgpu.barrier_wait(smem.k_ready.at[slot])
    scores = _score(kernel, slot)
    if is_masked:
        scores = _mask(scores, i, unit, kernel.static)
    top = jnp.maximum(sums.top, scores.max(axis=1))
    # A row that has seen no key adds weights of 1, and drops them once it sees one.
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    decay = jnp.exp2(sums.top - top)
    total = sums.total * decay + weights.sum(axis=1)
    weights_slot = lax.rem(i, jnp.int32(2))
    smem.weights[weights_slot] = weights.astype(smem.weights.dtype)
    plgpu.barrier_wait(smem.v_ready.at[slot])
    if is_masked:
        first = unit.start + i * CHUNK
        has_outside = (first < unit.first_key) | (first + CHUNK > unit.end_key)
        pl.when(has_outside)(partial(_clear_outside, kernel, slot, first))
    # Makes the stores visible to WGMMA, and is a barrier: from here on nothing reads the chunk
    # before this one.
    plgpu.commit_smem()
    pl.when(ahead < unit.chunks)(partial(_load, kernel, ahead, blocks))
    summed = _multiply(smem.weights.at[weights_slot], smem.v.at[slot])
    return Sums(top, total, sums.acc * lax.broadcast_in_dim(decay, summed.shape, [0]) + summed)


def _score(kernel: Kernel, slot) -> Array:
    """Return the scores of a chunk in units of log 2, [ROWS, CHUNK]."""
    scoring = kernel.static.scoring
    products = _multiply(kernel.smem.q, kernel.smem.k.at[slot].transpose((1, 0)))
    if scoring.soft_cap is None:
        return products * (scoring.scale * LOG2_E)
    return (scoring.soft_cap * LOG2_E) * _tanh(products * (scoring.scale / scoring.soft_cap))


def _mask(scores, i, unit: Unit, static: Static) -> Array:
    """Return the scores, LOWEST where a row does not see a key."""
    keys = unit.start + i * CHUNK + _iota(scores.shape, 1)
    query = unit.position + lax.div(_iota(scores.shape, 0), jnp.int32(static.heads))
    visible = (keys <= query) & (keys < unit.end_key)
    if static.scoring.window is not None:
        visible &= keys > query - static.scoring.window
    return jnp.where(visible, scores, LOWEST)


def _clear_outside(kernel: Kernel, slot, first) -> None:
    """Replace the values of a chunk by 0 where no row sees them: they may be NaN."""
    smem, unit = kernel.smem, kernel.unit
    v = plgpu.load(smem.v.at[slot], layout=plgpu.Layout.WGMMA)
    keys = first + _iota(v.shape, 0)
    is_inside = (keys >= unit.first_key) & (keys < unit.end_key)
    smem.v[slot] = jnp.where(is_inside, v, jnp.zeros_like(v))


def _multiply(a, b) -> Array:
    """Return the product of two matrices in shared memory."""
    shape = (a.shape[0], b.shape[1])
    return pl.run_scoped(partial(_multiply_into, a, b), plgpu.ACC(shape, jnp.float32))


def _multiply_into(a, b, product) -> Array:
    plgpu.wgmma(product, a, b)
    return product[...]


def _finish(sums: Sums) -> tuple[Array, Array]:
    """Return the mean of the values and the log-sum-exp, by row; 0 and -inf without a key."""
    has_key = (sums.top > LOWEST) | (sums.total != sums.total)  # a total of NaN has seen NaN
    total = jnp.where(has_key, sums.total, 1.0)
    factor = jnp.where(has_key, 1 / total, 0.0)
    lse = jnp.where(has_key, sums.top * (1 / LOG2_E) + jnp.log(total), -jnp.inf)
    return sums.acc * lax.broadcast_in_dim(factor, sums.acc.shape, [0]), lse


def _write(kernel: Kernel, out, lse) -> None:
    """Write the results through shared memory, the groups of lines that there are."""
    smem, static, unit = kernel.smem, kernel.static, kernel.unit
    smem.out[...] = out
    smem.lse[...] = lse
    plgpu.commit_smem()
    for group in range(static.size // LINE_GROUP):
        pl.when(group < unit.groups)(partial(_write_group, kernel, group))
    plgpu.wait_smem_to_gmem(0)


def _write_group(kernel: Kernel, group: int) -> None:
    """Write a group of lines. It is whole in the results, too: TMA stores whole tiles."""
    refs, smem, _, unit = kernel
    lines, place = pl.ds(group * LINE_GROUP, LINE_GROUP), (unit.kv_head, unit.first_group + group)
    plgpu.copy_smem_to_gmem(smem.out.at[lines], refs.out.at[place])
    plgpu.copy_smem_to_gmem(smem.lse.at[lines], refs.lse.at[place])


def _tanh(x) -> Array:
    """Return tanh. With `approx_math` its instruction is right to 11 bits only: too few here."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
