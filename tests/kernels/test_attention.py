"""Rules of attention, each on every form; `test_attention_sweep.py` has the sizes and dtypes."""

import re
from dataclasses import replace

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    INTERPRETED,
    Heads,
    assert_matches,
    attend,
    each,
    every_form,
    expected,
    make_batch,
    with_arrays,
)
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from reference import reference_attention

from paged_jax.kernels import write_kv
from paged_jax.kernels.paged_attention.scoring import Scales, Scoring

# The tests share one static side, with and without sinks, and two shapes: few programs to compile.
WINDOWED = Heads(16, 16, 2, 2, dict(window=20))
WINDOWED_FOR = dict.fromkeys(cases.FORMS, WINDOWED)
WINDOWED_FOR["mosaic_gpu"] = Heads(64, 16, 2, 2, dict(window=20), dtype="bfloat16")
MIXED = dict(num_tokens=80, num_seqs=4, table_width=6)
DECODE = dict(num_tokens=4, num_seqs=4, table_width=6)
BOTH = {"decode": DECODE, "mixed": MIXED}


@every_form
def test_a_sink_far_from_the_scores_neither_overflows_nor_counts(form):
    heads = replace(WINDOWED_FOR[form], sinks=True)
    batch = make_batch(heads, [(1, 50), (1, 9)], **DECODE)
    batch = with_arrays(batch, sinks=np.float32([300, -300, 0, -np.inf]))
    assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@pytest.mark.parametrize("kv_heads", [2, 5])  # a product of all heads, and one by KV head
@pytest.mark.parametrize("lens", [[(1, 77)], []], ids=str)
def test_a_single_row_is_attended_to_by_either_product(kv_heads, lens):
    heads = replace(WINDOWED, kv_heads=kv_heads, scoring=dict(soft_cap=3.0))
    batch = make_batch(heads, lens, num_tokens=1, num_seqs=1, table_width=6)
    assert_matches(heads, attend("cpu", heads, batch), expected(heads, batch))


@each(
    "form, kind, window",
    [
        (form, *case)
        for form in cases.FORMS
        # Without a window, Mosaic's ring of chunks is filled again.
        for case in (("decode", None), ("decode", 700), ("mixed", None), ("mixed", 300))
    ],
    in_sweep=lambda form, kind, window: (
        (window is None) == (form not in INTERPRETED) or (form in INTERPRETED and kind == "mixed")
    ),
)
def test_contexts_of_several_full_chunks_match_the_reference(form, kind, window):
    heads = replace(WINDOWED_FOR[form], scoring=dict(window=window))
    lens = [(1, 1100), (1, 3), (1, 512)] if kind == "decode" else [(60, 400), (1, 300)]
    batch = make_batch(heads, lens, **BOTH[kind] | dict(table_width=71))
    assert_matches(heads, attend(form, heads, batch, small_chunks=False), expected(heads, batch))


@each("form", cases.FORMS, in_sweep=lambda form: form == "mosaic_gpu")
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(form):
    heads, total, size = WINDOWED_FOR[form], 70, WINDOWED.block_size
    atol = cases.TOLERANCE[heads.dtype]
    whole = make_batch(heads, [(total, total), (1, 20)], **MIXED)
    want, _ = expected(heads, whole)
    table = np.asarray(whole.block_tables[0])
    k, v = (
        x[table].reshape(-1, heads.kv_heads, heads.head_dim) for x in (whole.k_pages, whole.v_pages)
    )
    write = jax.jit(write_kv)
    padding = np.arange(MIXED["num_tokens"])
    # Mosaic's interpreter takes a second a call.
    for chunk in (33, total) if form == "mosaic_gpu" else (1, 7, size, 33, total):
        pages = tuple(x.at[table].set(jnp.nan) for x in (whole.k_pages, whole.v_pages))
        got = np.zeros((total, heads.num_heads, heads.head_dim))
        for start in range(0, total, chunk):
            n = min(chunk, total - start)
            t = np.minimum(start + padding, total - 1)
            slots = np.where(
                padding < n, table[t // size] * size + t % size, whole.k_pages.shape[0] * size
            )
            pages = write(*pages, k[t], v[t], jnp.asarray(slots, jnp.int32))
            q = np.zeros_like(whole.q)
            q[:n], q[n] = whole.q[start : start + n], whole.q[total]
            step = dict(q=q, k_pages=pages[0], v_pages=pages[1])
            step |= dict(kv_lens=[start + n, 20, 0, 0], cu_q_lens=[0, n, n + 1, n + 1, n + 1])
            out = np.asarray(attend(form, heads, with_arrays(whole, **step))[0])
            got[start : start + n] = out[:n]
            np.testing.assert_allclose(out[n], want[total], rtol=atol, atol=atol)
        np.testing.assert_allclose(got, want[:total], rtol=atol, atol=atol)


@every_form
@pytest.mark.parametrize("sizes", [DECODE, MIXED], ids=["decode", "mixed"])
def test_what_no_live_sequence_computed_does_not_matter(form, sizes):
    heads = WINDOWED_FOR[form]
    lens = [(1, 50), (1, 17)] if sizes is DECODE else [(1, 50), (40, 75), (2, 17)]
    clean, poisoned = (make_batch(heads, lens, **sizes, poison=poison) for poison in (False, True))
    want = [np.asarray(x) for x in attend(form, heads, clean)]
    # Past a sequence's length the table has other sequences' blocks, or none that exist; rows that
    # are not live hold anything at all. Blocks that a window has passed are the null block.
    n = len(lens)
    tables, kv_lens, cu = (
        np.array(x) for x in (poisoned.block_tables, poisoned.kv_lens, poisoned.cu_q_lens)
    )
    for s, (_, kv_len) in enumerate(lens):
        tables[s, pl.cdiv(kv_len, 16) :] = [tables[0, 0], 10**9, -7, -(2**31), 2**31 - 1, 3][
            : 6 - pl.cdiv(kv_len, 16)
        ]
    tables[0, : (50 - 20) // 16] = 0
    tables[n:], kv_lens[n:], cu[n + 1 :] = 10**6, 60, 10**6
    poisoned = with_arrays(poisoned, block_tables=tables, kv_lens=kv_lens, cu_q_lens=cu)
    for got, w in zip(attend(form, heads, poisoned), want, strict=True):
        np.testing.assert_array_equal(got, w)
    assert not np.isnan(want[0]).any()


@every_form
def test_where_blocks_lie_and_who_shares_them_does_not_matter(form):
    heads = WINDOWED_FOR[form]
    batch = make_batch(heads, [(1, 40), (9, 40), (20, 25)], **MIXED)
    tables = np.array(batch.block_tables)
    tables[1, :2] = tables[0, :2]  # a prefix of two blocks in common
    batch = with_arrays(batch, block_tables=tables)
    got = attend(form, heads, batch)
    assert_matches(heads, got, expected(heads, batch))
    order = np.random.default_rng(3).permutation(batch.k_pages.shape[0])
    moved = dict(k_pages=batch.k_pages[order], v_pages=batch.v_pages[order])
    moved |= dict(block_tables=np.argsort(order)[tables].astype(np.int32))
    for a, b in zip(attend(form, heads, with_arrays(batch, **moved)), got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_of_a_shared_prefix_read_it_once_and_match_the_reference(window):
    heads = replace(WINDOWED, scoring=dict(window=window))
    # Three rows a trip: the first group shares two chunks and not the third.
    batch = make_batch(
        heads,
        [(1, 90), (1, 70), (1, 95), (1, 40), (1, 3)],
        **dict(num_tokens=8, num_seqs=8, table_width=6),
    )
    tables = np.array(batch.block_tables)
    tables[1:3, :4] = tables[0, :4]
    batch = with_arrays(batch, block_tables=tables)
    assert_matches(heads, attend("cpu", heads, batch), expected(heads, batch))


@every_form
def test_a_row_gives_the_same_numbers_whoever_its_neighbours_are(form):
    heads = WINDOWED_FOR[form]
    batch = make_batch(heads, [(1, 77), (40, 90), (1, 3)], **MIXED)
    alone = with_arrays(batch, num_seqs=np.int32(1))
    got, want = (np.asarray(attend(form, heads, x)[0][0]) for x in (batch, alone))
    # On a CPU rows that share their context are multiplied by it together, which may round.
    rounding = 1e-6 if form == "cpu" else 0
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding)


# The Pallas interpreters do not know explicit meshes; what is compiled does
# (test_cuda_kernels_compile.py).
@each(
    "form, axis",
    [(form, "heads") for form in cases.FORMS] + [("cpu", None), ("gpu", None)],
    in_sweep=lambda form, _: form in INTERPRETED,
)
def test_it_runs_inside_shard_map_and_on_an_explicit_mesh(form, axis):
    heads = WINDOWED_FOR[form]
    batch = make_batch(heads, [(1, 40), (20, 30)], **MIXED)
    scoring = Scoring(heads.head_dim**-0.5, 20)
    f = lambda *arrays: cases.run(arrays, None, Scales(), scoring, form)  # noqa: E731
    if axis is None:
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            got = jax.jit(f)(*jax.device_put(batch.arrays, jax.sharding.NamedSharding(mesh, P())))
    else:
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        by_head, pages = P(None, "x"), P(None, None, "x")
        specs = (by_head, pages, pages, P(), P(), P(), P())
        # The Pallas interpreters do not know which values vary over a mesh.
        check = dict(check_vma=form in ("cpu", "gpu"))
        got = jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(by_head, by_head), **check)
        )(*batch.arrays)
    assert_matches(heads, got, expected(heads, batch))


@pytest.mark.parametrize("form", ["cpu", "gpu"])  # an interpreter's program copies what it likes
@pytest.mark.parametrize("num_tokens", [8, 64])
def test_no_layer_copies_a_page_array(form, num_tokens):
    heads = Heads(dtype="float32")
    prime, layers, seqs, width = 4001, 2, 8, 6
    shape = (prime, heads.block_size, heads.kv_heads, heads.head_dim)

    def step(pages, q, k, v, slots, *index):
        new = []
        for k_pages, v_pages in pages:
            k_pages, v_pages = write_kv(k_pages, v_pages, k, v, slots)
            q, _ = cases.run((q, k_pages, v_pages, *index), None, Scales(), Scoring(1.0), form)
            new.append((k_pages, v_pages))
        return new, q

    spec = jax.ShapeDtypeStruct
    pages = [(spec(shape, jnp.float32),) * 2] * layers
    kv = spec((num_tokens, heads.kv_heads, heads.head_dim), jnp.float32)
    ints = [spec(s, jnp.int32) for s in ((num_tokens,), (seqs,), (seqs, width), (seqs + 1,), ())]
    q = spec((num_tokens, heads.num_heads, heads.head_dim), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(pages, q, kv, kv, *ints).compile()
    makes_pages = re.compile(
        rf"= \S*\[[\d,]*\b{prime}\b[\d,]*\]\S* (copy|broadcast|reduce|transpose|convert|select)\("
    )
    assert not [line for line in compiled.as_text().splitlines() if makes_pages.search(line)]
    page_bytes = 4 * np.prod(shape)
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * layers * page_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < page_bytes // 2


def test_the_reference_is_attention_as_jax_has_it():
    rng = np.random.default_rng(0)
    length, size = 24, 8
    q, k, v = (rng.standard_normal((length, heads, 16), dtype=np.float32) for heads in (6, 2, 2))
    pages = [x.reshape(length // size, size, 2, 16) for x in (k, v)]
    index = np.array([length]), np.arange(3)[None], np.array([0, length]), 1
    for window in (None, 7):
        got, _ = reference_attention(q, *pages, *index, window=window)
        local = None if window is None else (window - 1, 0)
        want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


NO_KEYS = {"decode": [(1, 0), (1, 3), (1, 0)], "mixed": [(1, 0), (1, 9), (3, 2), (36, 5)]}


@each(
    "form, kind, sinks",
    [(form, kind, sinks) for form in cases.FORMS for kind in NO_KEYS for sinks in (False, True)],
    in_sweep=lambda form, kind, sinks: form in INTERPRETED and kind == "mixed" and sinks,
)
def test_a_row_that_sees_no_key_gives_zero_and_no_mass(form, kind, sinks):
    heads = replace(WINDOWED_FOR[form], sinks=sinks)
    batch = make_batch(heads, NO_KEYS[kind], **BOTH[kind])
    assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@every_form
def test_nan_of_a_live_row_is_seen_in_its_result_and_in_no_other(form):
    heads = WINDOWED_FOR[form]
    batch = make_batch(heads, [(1, 50), (1, 96), (2, 9)], **DECODE)
    want = expected(heads, batch)
    q = np.array(batch.q, np.float32)
    q[1] = np.nan
    out, lse = attend(form, heads, with_arrays(batch, q=jnp.asarray(q, batch.q.dtype)))
    assert np.isnan(np.asarray(out[1], np.float32)).all() and np.isnan(lse[1]).all()
    others = np.array([0, 2, 3])
    assert_matches(heads, (out[others], lse[others]), [x[others] for x in want])


@every_form
def test_lengths_and_rows_that_point_outside_are_brought_inside(form):
    heads = WINDOWED_FOR[form]
    batch = make_batch(
        heads, [(2, 50), (1, 96)], num_tokens=4, num_seqs=4, table_width=6, poison=False
    )
    outside = with_arrays(
        batch, kv_lens=np.array([50, 400, 7, -9]), cu_q_lens=np.array([-5, 2, 3, 99, -1])
    )
    outside = with_arrays(outside, num_seqs=np.int32(2))
    assert_matches(heads, attend(form, heads, outside), expected(heads, batch))
