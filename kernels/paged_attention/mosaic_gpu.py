"""Paged attention as a Pallas Mosaic GPU kernel for Hopper (sm_90a): bfloat16 and float16, pages of 8 to 64 tokens.

A program is one warpgroup. It takes the query rows of one tile, or of a part of it, for all query heads of one KV head, so a page
is read once for the heads of its group, and its share of the context. K and V come a page at a time through TMA into a ring of
chunks; the block table is read a chunk ahead of the copies it is for. Both products are WGMMA, 64 rows wide.

Decode is bound by memory: a chunk of 64 tokens of head_dim 128 takes 0.9 us at an H200's bandwidth per multiprocessor, and about
1000 cycles of this warpgroup, so what a second warpgroup for the copies would win is small. On paper: nothing was measured.

Why WGMMA: with `plgpu.mma`, which needs no Hopper, one kernel compiles for sm_80 (cp.async) and sm_90 (TMA). But neither it nor a
copy without a barrier has a rule in the interpreters of jax 0.11.2 and 0.12.0.1, so its results could not be checked without a GPU,
and its right operand is read from shared memory by each warp anew. (For sm_100 the wheels compile no Mosaic kernel at all: ptxas
refuses the target.) Elsewhere `triton.py` runs. head_dim 256 does not fit shared memory with a ring that keeps copies in flight.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .combine import combine, num_splits, share_of_context
from .plan import AttentionPlan
from .scoring import LOG2_E, LOWEST, NO_SCALES, Scales, Scoring
from .tiles import QueryTiles

ROWS = 64  # of a WGMMA
CHUNK = 64  # tokens of context in one trip of the loop
RING = 4  # chunks of K and V in shared memory; one of them is being read


class Static(NamedTuple):
    """What a compiled kernel is made for, besides the shapes of its operands.

    Attributes:
        rows: query tokens of a program.
        heads: query heads of a program, padded to a power of two.
        parts: programs that share a tile.
    """

    rows: int
    heads: int
    parts: int
    splits: int
    scoring: Scoring
    interpret: plgpu.InterpretGPUParams | None

    @property
    def size(self) -> int:
        """Rows that are read and written; shared memory is laid out in eights."""
        return -(-self.rows * self.heads // 8) * 8


def attend(
    q, k_pages, v_pages, plan: AttentionPlan, sinks, scoring: Scoring, scales: Scales = NO_SCALES, interpret=False
):
    """Attention as `ragged_paged_attention` defines it, of checked arguments: (out[T, H, D], lse f32[T, H]).

    `interpret` may also be the interpreter's parameters.
    """
    assert scales.k is None and scales.v is None, "dispatch.py does not let scales through"
    block_size, kv_heads = k_pages.shape[1:3]
    tiles = plan.every.tiles
    heads = pl.next_power_of_2(q.shape[1] // kv_heads)
    rows = min(tiles.size, ROWS // heads)
    parts = -(-tiles.size // rows)
    # Shared memory holds the rings of two programs of head_dim 64, of one of 128.
    programs, resident = tiles.seq.shape[0] * parts * kv_heads, 128 // q.shape[2]
    splits = num_splits(programs, plan.tables.shape[1] * block_size, CHUNK, resident)
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    return _attend(q, k_pages, v_pages, plan, sinks, Static(rows, heads, parts, splits, scoring, interpret or None))


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames="static")
def _attend(q, k_pages, v_pages, plan: AttentionPlan, sinks, static: Static):
    head_dim = q.shape[2]
    kv_heads = k_pages.shape[2]
    tiles, size, splits = plan.every.tiles, static.size, static.splits
    programs = tiles.seq.shape[0] * static.parts
    partial_dtype = q.dtype if splits == 1 and sinks is None else jnp.dtype(jnp.float32)
    call = plgpu.kernel(
        partial(_kernel, static=static),
        out_type=(
            jax.ShapeDtypeStruct((splits, programs, kv_heads, size, head_dim), partial_dtype),
            jax.ShapeDtypeStruct((splits, programs, kv_heads, size), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=_tiled((ROWS, head_dim), q.dtype),
            k_smem=_tiled((RING, CHUNK, head_dim), q.dtype),
            v_smem=_tiled((RING, CHUNK, head_dim), q.dtype),
            weights_smem=_tiled((2, ROWS, CHUNK), q.dtype),
            out_smem=_tiled((ROWS, head_dim), partial_dtype),
            lse_smem=plgpu.SMEM((ROWS,), jnp.float32),
            q_ready=plgpu.Barrier(),
            k_ready=plgpu.Barrier(num_arrivals=CHUNK // k_pages.shape[1], num_barriers=RING),
            v_ready=plgpu.Barrier(num_arrivals=CHUNK // k_pages.shape[1], num_barriers=RING),
        ),
        grid=(programs, kv_heads, splits),
        grid_names=("program", "kv_head", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=static.interpret,
    )
    rows = _cut_rows(q, tiles, kv_heads, static)
    with jax.named_scope("paged_attention"):
        made = call(plan.tables, tiles.seq, tiles.num_rows, tiles.position, rows, k_pages, v_pages)
    out, lse = (_varying_as(q, x) for x in made)
    out, lse = (_by_token(x, plan, q.shape[1], static) for x in (out, lse))
    return combine(out, lse, sinks, plan.place.owned, q.dtype)


def _kernel(
    tables, seqs, counts, positions, q_ref, k_ref, v_ref, out_ref, lse_ref, /, *, static: Static, q_smem, k_smem, v_smem,
    weights_smem, out_smem, lse_smem, q_ready, k_ready, v_ready,
):  # fmt: skip
    """One program."""
    scoring = static.scoring
    program, kv_head, split = (lax.axis_index(name) for name in ("program", "kv_head", "split"))
    tile = lax.div(program, jnp.int32(static.parts))
    first_row = lax.rem(program, jnp.int32(static.parts)) * static.rows
    num_rows = jnp.minimum(counts[tile] - first_row, static.rows)
    block_size, head_dim = k_ref.shape[1], k_ref.shape[3]
    pages = CHUNK // block_size

    @pl.when(num_rows > 0)
    def _():
        seq, position = seqs[tile], positions[tile] + first_row
        end_key = position + num_rows
        first_key = 0 if scoring.window is None else jnp.maximum(position - (scoring.window - 1), 0)
        last_block = lax.div(end_key - 1, jnp.int32(block_size))
        start, chunks = share_of_context(jnp.int32(first_key), end_key, split, static.splits, CHUNK, block_size)
        first_block = lax.div(start, jnp.int32(block_size))

        def read_table(chunk):
            # Past the context its last block is read again: the copy then comes from the cache, and none is missing.
            return [tables[seq, jnp.clip(first_block + chunk * pages + j, 0, last_block)] for j in range(pages)]

        def load(chunk, blocks):
            slot = lax.rem(chunk, jnp.int32(RING))
            for j, block in enumerate(blocks):
                at = slot, pl.ds(j * block_size, block_size)
                plgpu.copy_gmem_to_smem(k_ref.at[block, :, kv_head], k_smem.at[at], k_ready.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[block, :, kv_head], v_smem.at[at], v_ready.at[slot])

        plgpu.copy_gmem_to_smem(q_ref.at[program, kv_head], q_smem.at[pl.ds(0, static.size)], q_ready)
        for ahead in range(RING - 1):

            @pl.when(ahead < chunks)
            def _(ahead=ahead):
                load(jnp.int32(ahead), read_table(ahead))

        plgpu.barrier_wait(q_ready)

        def step(i, sums):
            top, total, acc = sums
            slot = lax.rem(i, jnp.int32(RING))
            # Used further down: the copies it is for must not wait for it.
            blocks = read_table(i + (RING - 1))

            plgpu.barrier_wait(k_ready.at[slot])

            def score(scores):
                plgpu.wgmma(scores, q_smem, k_smem.at[slot].transpose((1, 0)))
                return scores[...]

            scores = pl.run_scoped(score, plgpu.ACC((ROWS, CHUNK), jnp.float32)) * scoring.scale
            if scoring.soft_cap is not None:
                scores = scoring.soft_cap * _tanh(scores * (1 / scoring.soft_cap))
            first_of_chunk = start + i * CHUNK
            keys = first_of_chunk + _iota((ROWS, CHUNK), 1)
            query = position + lax.div(_iota((ROWS, CHUNK), 0), jnp.int32(static.heads))
            visible = (keys <= query) & (keys < end_key)
            if scoring.window is not None:
                visible &= keys > query - scoring.window
            scores = jnp.where(visible, scores * LOG2_E, LOWEST)

            raised = jnp.maximum(top, scores.max(axis=1))
            # A row that has seen no key gathers weights of 1, and forgets them once it sees one.
            weights = jnp.exp2(scores - lax.broadcast_in_dim(raised, scores.shape, [0]))
            decay = jnp.exp2(top - raised)
            total = total * decay + weights.sum(axis=1)
            weights_smem[lax.rem(i, jnp.int32(2))] = weights.astype(weights_smem.dtype)

            plgpu.barrier_wait(v_ready.at[slot])

            @pl.when((first_of_chunk < first_key) | (first_of_chunk + CHUNK > end_key))
            def _():
                # What no row sees has no weight, but may be NaN.
                v = plgpu.load(v_smem.at[slot], layout=plgpu.Layout.WGMMA)
                keys = first_of_chunk + _iota((CHUNK, head_dim), 0)
                v_smem[slot] = jnp.where((keys >= first_key) & (keys < end_key), v, jnp.zeros_like(v))

            # Makes the stores visible to WGMMA, and is a barrier: from here on nothing reads the chunk before this one.
            plgpu.commit_smem()

            @pl.when(i + (RING - 1) < chunks)
            def _():
                load(i + (RING - 1), blocks)

            def weigh(summed):
                plgpu.wgmma(summed, weights_smem.at[lax.rem(i, jnp.int32(2))], v_smem.at[slot])
                return summed[...]

            summed = pl.run_scoped(weigh, plgpu.ACC((ROWS, head_dim), jnp.float32))
            return raised, total, acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + summed

        line = plgpu.Layout.WGMMA.reduce(1)
        empty = (
            plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), line),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), line),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        )
        top, total, acc = lax.fori_loop(0, chunks, step, empty)

        seen = (top > LOWEST) | (total != total)  # NaN has been seen
        total = jnp.where(seen, total, 1.0)
        share = jnp.where(seen, 1 / total, 0.0)
        out_smem[...] = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(out_smem.dtype)
        lse_smem[...] = jnp.where(seen, top * (1 / LOG2_E) + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        written = pl.ds(0, static.size)
        plgpu.copy_smem_to_gmem(out_smem.at[written], out_ref.at[split, program, kv_head])
        plgpu.copy_smem_to_gmem(lse_smem.at[written], lse_ref.at[split, program, kv_head])
        plgpu.wait_smem_to_gmem(0)


def _tanh(x):
    """With `approx_math` the instruction for tanh is right to 11 bits only, too few for a score."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


def _iota(shape: tuple[int, int], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _varying_as(q, x):
    """`x` as varying over the mesh axes that q varies over inside `shard_map`, which `plgpu.kernel` forgets."""
    varying, known = (jax.typeof(a).manual_axis_type.varying for a in (q, x))
    missing = tuple(sorted(varying - known))
    return lax.pcast(x, missing, to="varying") if missing else x


def _tiled(shape: tuple[int, ...], dtype):
    """Shared memory in the layout that TMA writes and WGMMA reads without bank conflicts."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _cut_rows(q, tiles: QueryTiles, kv_heads: int, static: Static):
    """The query rows of each program, [programs, KV, size, D]: row after row, the heads of each padded to a power of two."""
    rows = jnp.arange(static.parts * static.rows, dtype=jnp.int32)
    token = jnp.clip(tiles.start[:, None] + rows, 0, q.shape[0] - 1)
    rows = q[token].reshape(-1, static.rows, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, static.heads - rows.shape[3]), (0, 0)))
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(rows.shape[0], kv_heads, -1, q.shape[2])
    return jnp.pad(rows, ((0, 0), (0, 0), (0, static.size - rows.shape[2]), (0, 0)))


def _by_token(x, plan: AttentionPlan, num_heads: int, static: Static):
    """What stands by program, [splits, programs, KV, size, ...], as [splits, T, H, ...]."""
    kv_heads = x.shape[2]
    program = plan.place.tile * static.parts + plan.place.offset // static.rows
    x = x[:, :, :, : static.rows * static.heads].reshape(*x.shape[:3], static.rows, static.heads, *x.shape[4:])
    x = x[:, program, :, plan.place.offset % static.rows, : num_heads // kv_heads]
    # Index arrays apart from each other put their axis first.
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(*x.shape[:2], num_heads, *x.shape[4:])
