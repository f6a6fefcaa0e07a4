"""Batches for the attention tests: sequences in shuffled pages, NaN where nothing was computed."""

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from reference import reference_attention

from paged_jax.kernels.paged_attention import (
    dispatch,
    items,
    mosaic_gpu,
    plan,
    splits,
    triton,
    xla,
)
from paged_jax.kernels.paged_attention.scoring import Scales, Scoring

RACES = mosaic_gpu.plgpu.InterpretGPUParams(detect_races=True)

# Everything that computes attention, as a function of the arguments of `xla.attend`; kernels in
# their interpreters.
FORMS = {
    "cpu": partial(xla.attend, form=xla.few_rows_at_a_time),
    "gpu": partial(xla.attend, form=xla.all_tiles_at_once),
    "triton": partial(triton.attend, interpret=True),
    "mosaic_gpu": partial(mosaic_gpu.attend, interpret=RACES),
}

INTERPRETED = ("triton", "mosaic_gpu")


def each(names: str, values, *, in_sweep=lambda *_: False):
    """Parametrize a test. What `in_sweep(*case)` chooses is left to `make test-kernels`."""
    params = []
    for case in values:
        case = case if isinstance(case, tuple) else (case,)
        marks = [pytest.mark.kernels] if in_sweep(*case) else []
        params.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return pytest.mark.parametrize(names, params)


every_form = each("form", FORMS)


# Largest difference from the float64 reference, for queries, keys and values of unit scale: outputs
# are averages of values, so of unit scale too. bfloat16 has 8 bits, float16 11.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True)
class Heads:
    """The static side of a case."""

    head_dim: int = 16
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    scoring: dict = field(default_factory=dict)
    sinks: bool = False
    dtype: str = "float32"
    kv_dtype: str | None = None
    scales: str | None = None  # "token" or "tensor"

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    def __str__(self):
        extras = (
            "".join(f"-{name}{value}" for name, value in self.scoring.items())
            + "-sinks" * self.sinks
        )
        extras += "".join(f"-{x}" for x in (self.kv_dtype, self.scales) if x)
        heads = f"KV{self.kv_heads}x{self.group}"
        return f"D{self.head_dim}-B{self.block_size}-{heads}-{self.dtype}{extras}"


@dataclass(frozen=True)
class Batch:
    """The array arguments, in order; `sinks` goes by name."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    kv_lens: jax.Array
    block_tables: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    sinks: jax.Array | None
    scales: Scales

    @property
    def arrays(self):
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:-2])


def covers(form: str, heads: Heads) -> bool:
    """Return whether the form is meant for the case."""
    if form in ("cpu", "gpu"):
        return True
    kv_dtype = heads.kv_dtype or heads.dtype
    shape = heads.head_dim, heads.block_size, heads.group, 10**6
    return not dispatch.why_not(
        form, dispatch.Problem(heads.dtype, kv_dtype, *shape, heads.scales is not None), None
    )


def make_batch(
    heads: Heads, lens, *, num_tokens, num_seqs, table_width, seed=0, poison=True
) -> Batch:
    """Make sequences of `(q_len, kv_len)` in `lens`, padded to the given sizes."""
    rng = np.random.default_rng(seed)
    size, width = heads.block_size, table_width
    num_blocks = num_seqs * width + 3
    pages = rng.standard_normal(
        (2, num_blocks, size, heads.kv_heads, heads.head_dim), dtype=np.float32
    )
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((num_seqs, width), np.int32)
    computed = np.zeros((num_blocks, size), bool)
    for s, (_, kv_len) in enumerate(lens):
        for column in range(pl.cdiv(kv_len, size)):
            tables[s, column] = next(ids)
            computed[tables[s, column], : kv_len - column * size] = True
    if poison:
        pages[:, ~computed] = np.nan
    kv_lens, cu = np.zeros(num_seqs, np.int32), np.zeros(num_seqs + 1, np.int32)
    kv_lens[: len(lens)] = [kv_len for _, kv_len in lens]
    cu[1 : len(lens) + 1] = np.cumsum([q_len for q_len, _ in lens])
    cu[len(lens) + 1 :] = cu[len(lens)]
    assert cu[-1] <= num_tokens
    q = rng.standard_normal((num_tokens, heads.num_heads, heads.head_dim), dtype=np.float32)
    sinks = (
        jnp.asarray(rng.standard_normal(heads.num_heads, dtype=np.float32)) if heads.sinks else None
    )
    (k, k_scale), (v, v_scale) = (_store(heads, x, rng) for x in pages)
    index = map(jnp.asarray, (kv_lens, tables, cu, np.int32(len(lens))))
    return Batch(jnp.asarray(q, heads.dtype), k, v, *index, sinks, Scales(k_scale, v_scale))


def _store(heads: Heads, pages, rng):
    """Return the pages in their dtype, with scales that bring the numbers into its range.

    int8 has no NaN: there the scales hold it.
    """
    dtype = jnp.dtype(heads.kv_dtype or heads.dtype)
    if heads.scales is None:
        return jnp.asarray(pages, dtype), None
    spread = rng.uniform(0.5, 2, () if heads.scales == "tensor" else pages.shape[:3]).astype(
        np.float32
    )
    largest = 127 if dtype == jnp.int8 else 240
    scale = spread * 4.5 / largest
    numbers = pages / (scale[..., None] if scale.ndim else scale)
    if dtype == jnp.int8:
        unused = np.isnan(numbers)
        numbers = np.where(unused, 77, np.clip(np.round(numbers), -127, 127))
        if scale.ndim:
            scale = np.where(unused[..., 0], np.nan, scale)
    return jnp.asarray(numbers).astype(dtype), jnp.asarray(scale)


SMALL_CHUNKS = {
    items: dict(GROUP_SIZE=3, ROW_CHUNK=32),
    plan: dict(TILE_CHUNK=48),
    xla: dict(ALL_TILES_DECODE_CHUNK=32, ALL_TILES_WIDE_CHUNK=48),
    splits: dict(SHORTEST_SPLIT=64, SHORTEST_WIDE_SPLIT=64),  # contexts are split over programs
}
_compiled = {}


def run(arrays, sinks, scales, scoring, form):
    """Run a form on the arguments of the public call, the plan included."""
    q, k_pages, v_pages, *index = arrays
    made = make_plan(index, q.shape[0], k_pages.shape, scoring.window)
    return FORMS[form](q, k_pages, v_pages, made, sinks, scales, scoring)


def make_plan(index, num_tokens, pages_shape, window):
    sizes = dict(num_blocks=pages_shape[0], block_size=pages_shape[1], window=window)
    return plan.plan_attention(num_tokens, *index, **sizes)


def attend(form: str, heads: Heads, batch: Batch, *, small_chunks=True):
    """Return (out, lse) of a form, compiled once for all batches of one static side.

    The plan is a program of its own, which all forms share: it takes as long to compile as they do.
    Small chunks make a short context take several trips, which is what most tests are after.
    """
    q, k_pages, v_pages, *index = batch.arrays
    scoring = Scoring(**{"scale": heads.head_dim**-0.5} | heads.scoring)
    shapes = (small_chunks, q.shape[0], k_pages.shape[:2], *(x.shape for x in index))
    with contextlib.ExitStack() as stack:
        for module, sizes in SMALL_CHUNKS.items() if small_chunks else ():
            stack.enter_context(mock.patch.multiple(module, **sizes))
        made = _run_compiled(
            ("plan", scoring.window, shapes),
            lambda index: make_plan(index, q.shape[0], k_pages.shape, scoring.window),
            index,
        )
        return _run_compiled(
            (form, str(heads), shapes),
            lambda *arrays: FORMS[form](*arrays, scoring),
            *(q, k_pages, v_pages, made, batch.sinks, batch.scales),
        )


def _run_compiled(key: tuple, function, *args):
    if key not in _compiled:
        # GPUs' forms are run here for their numbers, which need no optimised machine code: half the
        # compile time.
        options = {"xla_backend_optimization_level": 0} if key[0] not in ("cpu", "plan") else None
        _compiled[key] = jax.jit(function).lower(*args).compile(options)
    return _compiled[key](*args)


def expected(heads: Heads, batch: Batch):
    """Return (out, lse) of the float64 reference."""
    scales = dict(k_scale=batch.scales.k, v_scale=batch.scales.v)
    return reference_attention(*batch.arrays, sinks=batch.sinks, **scales, **heads.scoring)


def assert_matches(heads: Heads, got, want):
    out, lse = (np.asarray(x, np.float64) for x in got)
    assert_close(out, want[0], TOLERANCE[heads.dtype])
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want[1]))
    seen = ~np.isneginf(want[1])
    assert_close(lse[seen], want[1][seen], TOLERANCE[heads.dtype])


def assert_close(got, want, tolerance):
    """Assert that each error is within the tolerance times the number, or times 1 if larger."""
    np.testing.assert_array_less(np.abs(got - want) / np.maximum(1, np.abs(want)), tolerance)


def with_arrays(batch: Batch, **changes) -> Batch:
    return replace(batch, **{name: jnp.asarray(x) for name, x in changes.items()})
