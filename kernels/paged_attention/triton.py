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

from ..target_device import target_device_kind
from . import dispatch
from .combine import Partials
from .in_splits import Kernel, attend_in_splits
from .plan import AttentionPlan
from .scoring import Scales, Scoring
from .splits import Work
from .tiles import QueryTiles
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
        # summed axis in registers, and a second stage would be too much. The sizes are those that
        # were found to leave no spills: ptxas would rather spill one number than run fewer
        # programs.
        rows = max(1, min(tile, 16 // heads))
        piece = 16 if kv_dtype == q_dtype else min(width, 32)
        return Blocking(rows, heads, width, piece, 16, 4 if width <= 128 else 8, 1)
    rows = max(1, min(tile, max(16, 8192 // width) // heads))
    # Numbers of one byte are converted on the way, which takes threads, or registers.
    is_byte = jnp.dtype(kv_dtype).itemsize == 1
    if is_byte and width <= 64 and not dispatch.has_fp8_conversion(device_kind):
        return Blocking(rows, heads, width, width, 32, 4, 2)
    is_large = rows * heads * width > 4096 or width > 128 or is_byte
    # With a stage more bytes of head_dim 64 spill, and so do masked dimensions of the widest.
    chunk, stages = (64, 2 if is_byte else 3) if width <= 128 else (32, 2)
    if width > 128 and head_dim < width:
        chunk, stages = (16 if is_byte else 32), 1
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
    kv_heads, head_dim = k_pages.shape[2:]
    device_kind = target_device_kind()
    programs = dispatch.num_programs(device_kind, RESIDENT, bool(interpret))

    def blocking(tile: int) -> Blocking:
        group = q.shape[1] // kv_heads
        return choose_blocking(tile, group, head_dim, q.dtype, k_pages.dtype, device_kind)

    def run(strips: QueryTiles, work: Work, tile: int, num_lines: int) -> Partials:
        has_fp8_conversion = dispatch.has_fp8_conversion(device_kind)
        sizes = blocking(tile), programs, num_lines
        static = Static(*sizes, scoring, has_fp8_conversion, bool(interpret))
        return _run(q, k_pages, v_pages, plan.tables, strips, work, scales, static)

    kernel = Kernel(
        run=run,
        heads=blocking(1).heads,
        rows=lambda tile: blocking(tile).rows,
        chunk=lambda tile: blocking(tile).chunk,
    )
    return attend_in_splits(q, kv_heads, k_pages.shape[1], plan, sinks, kernel, bool(interpret))


# Jitted, so that the layers of a decoder share one trace.
@partial(jax.jit, static_argnames="static")
def _run(
    q, k_pages, v_pages, tables, strips: QueryTiles, work: Work, scales: Scales, static: Static
) -> Partials:
    kv_heads, head_dim = k_pages.shape[2:]
    like = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q).manual_axis_type)
    call = pl.pallas_call(
        partial(run_program, static=static, has_scale=tuple(scale is not None for scale in scales)),
        grid=(static.programs,),
        out_shape=(
            like((kv_heads, static.num_lines, head_dim), jnp.float32),
            like((kv_heads, static.num_lines), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(
            num_warps=static.blocking.num_warps, num_stages=static.blocking.num_stages
        ),
        interpret=static.interpret,
        name="paged_attention",
    )
    index = (tables, strips.seq, strips.start, strips.num_rows, strips.position)
    factors = (
        jnp.asarray(scale, jnp.float32).reshape(scale.shape or (1,))
        for scale in scales
        if scale is not None
    )
    return Partials(*call(*index, *work, q, k_pages, v_pages, *factors))
