"""Paged attention with Pallas Mosaic GPU: Hopper (sm_90a), bfloat16 and float16, pages of 8 to 64.

The call is here, the kernel in `mosaic_gpu_kernel.py`, what its programs are in
`mosaic_gpu_program.py`.

Why WGMMA: with `plgpu.mma`, which needs no Hopper, one kernel compiles for sm_80 (cp.async) and
sm_90 (TMA). But neither it nor a copy without a barrier has a rule in the interpreters of jax
0.11.2 and 0.12.0.1, so its results could not be checked without a GPU, and its right operand is
read from shared memory by each warp anew. (For sm_100 the wheels compile no Mosaic kernel at all:
ptxas refuses the target.) Elsewhere `triton.py` runs. head_dim 256 does not fit shared memory with
a ring that keeps copies in flight.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .combine import combine, num_splits
from .mosaic_gpu_kernel import run_program
from .mosaic_gpu_program import CHUNK, ROWS, Static, scratch_types
from .plan import AttentionPlan
from .scoring import Scales, Scoring
from .tiles import QueryTiles


def attend(
    q,
    k_pages,
    v_pages,
    plan: AttentionPlan,
    sinks,
    scales: Scales,
    scoring: Scoring,
    interpret: bool | plgpu.InterpretGPUParams = False,
):
    """Return (out[T, H, D], lse[T, H]) of `ragged_paged_attention`, of checked arguments.

    Tests pass the interpreter's parameters as `interpret`, so that it looks for races.
    """
    assert scales.k is None and scales.v is None, "dispatch.py does not let scales through"
    block_size, kv_heads = k_pages.shape[1:3]
    tiles = plan.every.tiles
    heads = pl.next_power_of_2(q.shape[1] // kv_heads)
    rows = min(tiles.size, ROWS // heads)
    parts = pl.cdiv(tiles.size, rows)
    # Shared memory holds the rings of two programs of head_dim 64, of one of 128.
    programs, resident = tiles.seq.shape[0] * parts * kv_heads, 128 // q.shape[2]
    splits = num_splits(programs, plan.tables.shape[1] * block_size, CHUNK, resident)
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()
    static = Static(rows, heads, parts, splits, scoring, interpret or None)
    return _attend(q, k_pages, v_pages, plan, sinks, static)


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames="static")
def _attend(q, k_pages, v_pages, plan: AttentionPlan, sinks, static: Static):
    block_size, kv_heads, head_dim = k_pages.shape[1:]
    tiles, size, splits = plan.every.tiles, static.size, static.splits
    programs = tiles.seq.shape[0] * static.parts
    partial_dtype = q.dtype if splits == 1 and sinks is None else jnp.dtype(jnp.float32)
    call = plgpu.kernel(
        partial(run_program, static=static),
        out_type=(
            jax.ShapeDtypeStruct((splits, programs, kv_heads, size, head_dim), partial_dtype),
            jax.ShapeDtypeStruct((splits, programs, kv_heads, size), jnp.float32),
        ),
        scratch_types=scratch_types(block_size, head_dim, q.dtype, partial_dtype),
        grid=(programs, kv_heads, splits),
        grid_names=("program", "kv_head", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=static.interpret,
    )
    rows = _cut_rows(q, tiles, kv_heads, static)
    with jax.named_scope("paged_attention"):
        index = plan.tables, tiles.seq, tiles.num_rows, tiles.position
        out, lse = (_varying_as(q, x) for x in call(*index, rows, k_pages, v_pages))
    out, lse = (_by_token(x, plan, q.shape[1], static) for x in (out, lse))
    return combine(out, lse, sinks, plan.place.is_owned, q.dtype)


def _cut_rows(q, tiles: QueryTiles, kv_heads: int, static: Static):
    """Cut out the query rows of each program, [programs, KV, size, D].

    Row after row, the heads of each padded to a power of two, then padding up to `static.size`.

    Example, rows a and b with 3 heads of a KV head: [a0, a1, a2, 0, b0, b1, b2, 0].
    """
    rows = jnp.arange(static.parts * static.rows, dtype=jnp.int32)
    token = jnp.clip(tiles.start[:, None] + rows[None], 0, q.shape[0] - 1)
    rows = q[token].reshape(-1, static.rows, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, static.heads - rows.shape[3]), (0, 0)))
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(rows.shape[0], kv_heads, -1, q.shape[2])
    return jnp.pad(rows, ((0, 0), (0, 0), (0, static.size - rows.shape[2]), (0, 0)))


def _by_token(x, plan: AttentionPlan, num_heads: int, static: Static):
    """Gather [splits, T, H, ...] from [splits, programs, KV, size, ...], which is by program."""
    kv_heads, place = x.shape[2], plan.place
    program = place.tile * static.parts + place.offset // static.rows
    x = x[:, :, :, : static.rows * static.heads]
    x = x.reshape(*x.shape[:3], static.rows, static.heads, *x.shape[4:])
    x = x[:, program, :, place.offset % static.rows, : num_heads // kv_heads]
    # The axis of index arrays with a slice between them comes first.
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(*x.shape[:2], num_heads, *x.shape[4:])


def _varying_as(q, x):
    """Return `x` as varying over the mesh axes that q varies over inside `shard_map`.

    `plgpu.kernel` forgets them.
    """
    varying, known = (jax.typeof(a).manual_axis_type.varying for a in (q, x))
    missing = tuple(sorted(varying - known))
    return lax.pcast(x, missing, to="varying") if missing else x
