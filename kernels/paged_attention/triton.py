"""Paged attention with Pallas-Triton: any CUDA GPU from sm_80 on, any head or page size, any dtype.

The call is here, the kernel in `triton_kernel.py`, what its programs are in `triton_program.py`.
Pallas-Triton is deprecated upstream (jax 0.11 on). Nothing but `dispatch.py` and `api.py` knows
these files, so they can go in one commit.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from . import dispatch
from .combine import combine, num_splits
from .plan import AttentionPlan
from .scoring import Scales, Scoring
from .triton_kernel import run_program
from .triton_program import Blocking, Static

RESIDENT = 2  # programs on a multiprocessor


def choose_blocking(
    tile: int, group: int, head_dim: int, q_dtype, kv_dtype, device_kind: str | None
) -> Blocking:
    """Return the sizes of a program for tiles of `tile` tokens.

    Bounds come from registers: no combination that the tests compile spills.

    Example: tiles of 32, 4 query heads to a KV head, head_dim 128, bfloat16 -> programs of 16 rows
    and 4 heads, chunks of 64 tokens, 8 warps.
    """
    heads, width = pl.next_power_of_2(group), max(16, pl.next_power_of_2(head_dim))
    if jnp.dtype(q_dtype).itemsize > 2:
        # Products of float32 have no matrix instruction here: a thread holds its operands' whole
        # summed axis in registers. The sizes are those that were found to leave no spills: ptxas
        # would rather spill one number than run fewer programs.
        rows = max(1, min(tile, 16 // heads))
        num_warps = 4 if width <= 128 else 8
        if kv_dtype != q_dtype:
            return Blocking(rows, heads, width, min(width, 32), 16, num_warps, 1)
        stages = 2 if device_kind is None or dispatch.is_hopper(device_kind) else 3
        return Blocking(rows, heads, width, 16, 16, num_warps, stages)
    rows = max(1, min(tile, max(16, 8192 // width) // heads))
    # Numbers of one byte are converted on the way, which takes threads.
    is_byte = jnp.dtype(kv_dtype).itemsize == 1
    is_large = rows * heads * width > 4096 or width > 128 or is_byte
    chunk, stages = (64, 3) if width <= 128 else (32, 2)
    return Blocking(rows, heads, width, width, chunk, 8 if is_large else 4, stages)


def attend(
    q,
    k_pages,
    v_pages,
    plan: AttentionPlan,
    sinks,
    scales: Scales,
    scoring: Scoring,
    interpret: bool = False,
):
    """Return (out[T, H, D], lse[T, H]) of `ragged_paged_attention`, of checked arguments."""
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_pages.shape[1:3]
    tiles = plan.every.tiles
    device_kind = dispatch.target_device_kind()
    group = num_heads // kv_heads
    blocking = choose_blocking(tiles.size, group, head_dim, q.dtype, k_pages.dtype, device_kind)
    programs = tiles.seq.shape[0] * blocking.parts(tiles.size) * kv_heads
    context = plan.tables.shape[1] * block_size
    splits = num_splits(programs, context, blocking.chunk, RESIDENT)
    has_fp8_conversion = dispatch.has_fp8_conversion(device_kind)
    static = Static(blocking, tiles.size, splits, scoring, has_fp8_conversion, bool(interpret))
    return _attend(q, k_pages, v_pages, plan, sinks, scales, static)


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames="static")
def _attend(q, k_pages, v_pages, plan: AttentionPlan, sinks, scales: Scales, static: Static):
    tiles, blocking, splits = plan.every.tiles, static.blocking, static.splits
    programs = tiles.seq.shape[0] * blocking.parts(tiles.size)
    partial_dtype = q.dtype if splits == 1 and sinks is None else jnp.float32
    like = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    has_scale = tuple(scale is not None for scale in scales)
    call = pl.pallas_call(
        partial(run_program, static=static, has_scale=has_scale),
        grid=(programs, k_pages.shape[2], splits),
        out_shape=(
            like((splits, *q.shape), partial_dtype),
            like((splits, *q.shape[:2]), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(
            num_warps=blocking.num_warps, num_stages=blocking.num_stages
        ),
        interpret=static.interpret,
        name="paged_attention",
    )
    index = (plan.tables, tiles.seq, tiles.start, tiles.num_rows, tiles.position)
    factors = (
        jnp.asarray(scale, jnp.float32).reshape(scale.shape or (1,))
        for scale in scales
        if scale is not None
    )
    out, lse = call(*index, q, k_pages, v_pages, *factors)
    return combine(out, lse, sinks, plan.place.is_owned, q.dtype)
