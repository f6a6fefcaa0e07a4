"""Paged attention with Pallas Mosaic GPU: Hopper (sm_90a), bfloat16 and float16, pages of 8 to 64.

The call is here, the kernel in `mosaic_gpu_kernel.py`, its loads in `mosaic_gpu_producer.py`, what
its programs are in `mosaic_gpu_program.py`.

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

from ..target_device import target_device_kind
from . import dispatch
from .combine import Partials
from .in_splits import Kernel, attend_in_splits
from .mosaic_gpu_kernel import run_program
from .mosaic_gpu_program import CHUNK, Static, scratch_types, strip_rows
from .plan import AttentionPlan
from .scoring import Scales, Scoring
from .splits import LINE_GROUP, Work
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
    kv_heads, head_dim = k_pages.shape[2:]
    heads = pl.next_power_of_2(q.shape[1] // kv_heads)
    # Shared memory holds the rings of one program.
    programs = dispatch.num_programs(target_device_kind(), 1, bool(interpret))
    params = plgpu.InterpretGPUParams() if interpret is True else interpret or None

    def rows(tile: int) -> int:
        return strip_rows(tile, heads, k_pages.shape[1], scoring)

    def run(strips: QueryTiles, work: Work, tile: int, num_lines: int) -> Partials:
        static = Static(rows(tile), heads, programs, num_lines, head_dim, scoring, params)
        return _run(q, k_pages, v_pages, plan.tables, strips, work, static)

    kernel = Kernel(run=run, heads=heads, rows=rows, chunk=lambda _: CHUNK)
    return attend_in_splits(q, kv_heads, k_pages.shape[1], plan, sinks, kernel, bool(interpret))


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames="static")
def _run(q, k_pages, v_pages, tables, strips: QueryTiles, work: Work, static: Static) -> Partials:
    block_size, kv_heads, head_dim = k_pages.shape[1:]
    groups = kv_heads, static.num_lines // LINE_GROUP, LINE_GROUP
    call = plgpu.kernel(
        partial(run_program, static=static),
        out_type=(
            jax.ShapeDtypeStruct((*groups, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(groups, jnp.float32),
        ),
        scratch_types=scratch_types(block_size, q.dtype, static),
        grid=(static.programs,),
        grid_names=("program",),
        num_threads=static.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=static.interpret,
    )
    rows = _cut_rows(q, strips, kv_heads, static)
    with jax.named_scope("paged_attention"):
        index = tables, strips.seq, strips.num_rows, strips.position
        results = call(*index, *work, rows, k_pages, v_pages)
    out, lse = (_varying_as(q, x) for x in results)
    return Partials(out.reshape(kv_heads, -1, head_dim), lse.reshape(kv_heads, -1))


def _cut_rows(q, strips: QueryTiles, kv_heads: int, static: Static):
    """Cut out the query rows of each strip, [strips, KV, size, D].

    Row after row, the heads of each padded to a power of two, then padding up to `static.size`.

    Example, rows a and b with 3 heads of a KV head: [a0, a1, a2, 0, b0, b1, b2, 0].
    """
    token = jnp.clip(strips.start[:, None] + strips.offsets[None], 0, q.shape[0] - 1)
    rows = q[token].reshape(*token.shape, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, static.heads - rows.shape[3]), (0, 0)))
    rows = rows.transpose(0, 2, 1, 3, 4).reshape(rows.shape[0], kv_heads, -1, q.shape[2])
    return jnp.pad(rows, ((0, 0), (0, 0), (0, static.size - rows.shape[2]), (0, 0)))


def _varying_as(q, x):
    """Return `x` as varying over the mesh axes that q varies over inside `shard_map`.

    `plgpu.kernel` forgets them.
    """
    varying, known = (jax.typeof(a).manual_axis_type.varying for a in (q, x))
    missing = tuple(sorted(varying - known))
    return lax.pcast(x, missing, to="varying") if missing else x
