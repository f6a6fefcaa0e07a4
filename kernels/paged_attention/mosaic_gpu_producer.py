"""The producer of the Mosaic GPU kernel: a warpgroup that copies what the consumers multiply.

It takes the same units in the same order as they do, and runs ahead of them as far as the rings in
shared memory let it: the queries and the first chunks of the next unit arrive while the last unit
is still multiplied. A page comes through TMA. The block table is read before the wait for a free
place.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .mosaic_gpu_program import CHUNK, ROWS, Kernel, Place, Unit, in_ring


def load_unit(kernel: Kernel, unit: Unit, place: Place) -> None:
    """Start the copies of all that a unit needs, each as soon as its place is free."""
    _load_queries(kernel, unit, place.unit)

    def load_chunk(i, blocks):
        _load_pages(kernel, unit, place.chunk + i, blocks)
        return _read_table(kernel, unit, i + 1)

    lax.fori_loop(0, unit.chunks, load_chunk, _read_table(kernel, unit, jnp.int32(0)))


def _load_queries(kernel: Kernel, unit: Unit, number) -> None:
    """Start the copies of the queries of the unit that is `number` in this program's order."""
    refs, smem, static = kernel
    slot = in_ring(number, static.query_slots)
    _wait_if(number >= static.query_slots, smem.q_free.at[slot])
    queries = refs.q.at[unit.strip, unit.kv_head]
    for consumer in range(static.consumers):
        first = consumer * ROWS
        lines = min(ROWS, static.size - first)
        to = smem.q.at[slot, consumer, pl.ds(0, lines)]
        plgpu.copy_gmem_to_smem(queries.at[pl.ds(first, lines)], to, smem.q_ready.at[slot])


def _read_table(kernel: Kernel, unit: Unit, chunk) -> tuple[Array, ...]:
    """Read the ids of a chunk's blocks.

    Past the split the last block's is read again: its copy comes from the cache, and every copy
    that a barrier waits for is made.

    Example, pages of 16, blocks 0 to 5 in the context: chunk 1 has the blocks (4, 5, 5, 5).
    """
    pages = CHUNK // kernel.refs.k.shape[1]
    columns = (unit.column + chunk * pages + j for j in range(pages))
    return tuple(
        kernel.refs.tables[unit.seq, jnp.clip(column, 0, unit.last_column)] for column in columns
    )


def _load_pages(kernel: Kernel, unit: Unit, number, blocks: tuple[Array, ...]) -> None:
    """Start the copies of K and V of the chunk that is `number` in this program's order."""
    refs, smem, static = kernel
    slot = in_ring(number, static.ring)
    block_size = refs.k.shape[1]
    for pages, ring, ready, free in (
        (refs.k, smem.k, smem.k_ready, smem.k_free),
        (refs.v, smem.v, smem.v_ready, smem.v_free),
    ):
        _wait_if(number >= static.ring, free.at[slot])
        for j, block in enumerate(blocks):
            to = ring.at[slot, pl.ds(j * block_size, block_size)]
            page = pages.at[block, slice(None), unit.kv_head]
            plgpu.copy_gmem_to_smem(page, to, ready.at[slot])


def _wait_if(condition, barrier) -> None:
    @pl.when(condition)
    def wait():
        plgpu.barrier_wait(barrier)
