import functools
import re
from dataclasses import replace

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Heads, assert_matches, attend, expected, make_batch, with_arrays
from jax.sharding import PartitionSpec as P

from paged_jax.kernels import plan_attention, ragged_paged_attention, write_kv
from paged_jax.kernels.paged_attention.scoring import Scales, Scoring
from reference import reference_attention

every_form = pytest.mark.parametrize("form", cases.FORMS)


def sweep(heads, mosaic=(), triton=()):
    """The cases of every form: `heads`, and those that are one kernel's alone. Mosaic's interpreter is slow, and gets its own."""
    forms = {"cpu": heads, "gpu": heads, "triton": [*heads, *triton], "mosaic_gpu": mosaic}
    pairs = [(form, case, i) for form, listed in forms.items() for i, case in enumerate(listed)]
    assert all(cases.covers(form, case) for form, case, _ in pairs)
    # Of a kernel the first case is enough for a quick run.
    slow = lambda form, i: [pytest.mark.slow] if i and form in ("triton", "mosaic_gpu") else []  # noqa: E731
    pairs = [
        pytest.param(form, case, marks=slow(form, i), id=f"{form}-{case}")
        for form, case, i in pairs
    ]
    return pytest.mark.parametrize("form, heads", pairs)


# Each value of each parameter at least once, and each option with more than one shape: pairs, not the full product.
HEADS = [
    Heads(16, 1, 2, 3),
    Heads(64, 16, 3, 3, dict(window=20)),
    Heads(80, 24, 1, 4, dict(soft_cap=2.0), sinks=True),
    Heads(96, 8, 4, 1, dict(window=1, scale=0.3), sinks=True),
    Heads(128, 32, 1, 8, dict(window=33, soft_cap=1.0)),
    Heads(64, 16, 2, 4, dict(window=40), sinks=True, dtype="bfloat16"),
    Heads(256, 8, 1, 2, dtype="float16"),
]
FOR_MOSAIC = [
    Heads(64, 16, 1, 3, dict(window=20), sinks=True, dtype="bfloat16"),
    Heads(128, 8, 1, 4, dict(soft_cap=2.0), dtype="float16"),
    Heads(128, 32, 1, 8, dict(window=33, scale=0.3), dtype="bfloat16"),
    Heads(64, 64, 1, 1, sinks=True, dtype="float16"),
]
QUANTISED = [
    Heads(64, 16, 2, 4, kv_dtype="int8", scales="token"),
    Heads(
        80, 8, 1, 3, dict(soft_cap=5.0), dtype="bfloat16", kv_dtype="float8_e4m3fn", scales="token"
    ),
    Heads(
        16,
        16,
        2,
        1,
        dict(window=30),
        sinks=True,
        dtype="float16",
        kv_dtype="float8_e5m2",
        scales="tensor",
    ),
]
QUANTISED_FOR_TRITON = [
    Heads(64, 16, 1, 8, dtype="bfloat16", kv_dtype="int8", scales="tensor"),
    Heads(32, 16, 2, 2, kv_dtype="bfloat16"),
    Heads(32, 16, 2, 2, kv_dtype="float8_e4m3fn"),
]

# The tests below the sweep share one static side and two shapes, so that few programs are compiled.
WINDOWED = Heads(16, 16, 2, 2, dict(window=20))
WINDOWED_FOR = dict.fromkeys(cases.FORMS, WINDOWED)
WINDOWED_FOR["mosaic_gpu"] = Heads(64, 16, 2, 2, dict(window=20), dtype="bfloat16")
MIXED = dict(num_tokens=80, num_seqs=4, table_width=6)
DECODE = dict(num_tokens=4, num_seqs=4, table_width=6)


def _edge_lengths(size):
    return [1, size - 1 or 1, size, size + 1, 3 * size, 3 * size + 1]


@sweep(HEADS[1::2], FOR_MOSAIC[::2])
def test_decoding_rows_match_the_reference(heads, form):
    size = heads.block_size
    width = max(-(-100 // size) + 1, 4)  # not a multiple of the chunk
    sizes = dict(num_tokens=8, num_seqs=8, table_width=width)
    edges = [(1, n) for n in _edge_lengths(size)]
    batches = (
        edges,
        [(0, 5), (1, 97), (0, 0), (1, 2), (3, 70)],
        [(1, 100), (1, 1), (1, 37)],
        [(1, width * size)],
        [],
    )
    for lens in batches[:2] if form == "mosaic_gpu" else batches:
        batch = make_batch(heads, lens, **sizes)
        assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@sweep(HEADS, FOR_MOSAIC[1::2])
def test_prefill_chunks_and_decoding_rows_in_one_batch_match_the_reference(heads, form):
    size = heads.block_size
    sizes = dict(num_tokens=96, num_seqs=7, table_width=-(-100 // size) + 1)
    edges = [(n if n % 2 else 1, n) for n in _edge_lengths(size) if n < 26]
    batches = (
        edges,
        [(1, 40), (96 - 4, 96), (1, 1), (2, 90)],
        [(0, 0), (33, 33), (1, 50), (0, 9), (32, 99), (30, 90)],
        [(64, 100), (1, 3)],
        [],
    )
    if form == "mosaic_gpu":
        sizes, batches = (
            sizes | dict(num_tokens=40, num_seqs=4),
            [[(1, 40), (30, 96), (1, 1), (2, 90)], []],
        )
    for lens in batches:
        batch = make_batch(heads, lens, **sizes)
        assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@sweep(QUANTISED, triton=QUANTISED_FOR_TRITON)
def test_pages_of_a_narrower_dtype_match_the_reference(heads, form):
    sizes = dict(num_tokens=40, num_seqs=4, table_width=-(-100 // heads.block_size))
    for lens in [(1, 40), (30, 96), (1, 1), (2, 90)], [(1, 96), (1, 3)]:
        batch = make_batch(heads, lens, **sizes)
        assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@every_form
def test_a_sink_far_from_the_scores_neither_overflows_nor_counts(form):
    heads = FOR_MOSAIC[0] if form == "mosaic_gpu" else HEADS[3]
    batch = make_batch(heads, [(1, 50), (1, 9)], num_tokens=8, num_seqs=8, table_width=14)
    batch = with_arrays(batch, sinks=np.float32([300, -300, 0, -np.inf])[-heads.num_heads :])
    assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@every_form
@pytest.mark.parametrize(
    "lens, num_tokens", [([(1, 1100), (1, 3), (1, 512)], 4), ([(60, 400), (1, 300)], 64)]
)
def test_contexts_of_several_full_chunks_match_the_reference(form, lens, num_tokens):
    for window in (700, None):  # without, Mosaic's ring of chunks is filled again
        heads = replace(WINDOWED_FOR[form], scoring=dict(window=window))
        batch = make_batch(heads, lens, num_tokens=num_tokens, num_seqs=4, table_width=71)
        assert_matches(
            heads, attend(form, heads, batch, small_chunks=False), expected(heads, batch)
        )


@every_form
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
    for chunk in (
        (33, total) if form == "mosaic_gpu" else (1, 7, size, 33, total)
    ):  # its interpreter takes a second a call
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
    # Past a sequence's length the table names other sequences' blocks, or none that exist; rows that are not live hold
    # anything at all. Blocks that a window has passed are the null block.
    n = len(lens)
    tables, kv_lens, cu = (
        np.array(x) for x in (poisoned.block_tables, poisoned.kv_lens, poisoned.cu_q_lens)
    )
    for s, (_, kv_len) in enumerate(lens):
        tables[s, -(-kv_len // 16) :] = [tables[0, 0], 10**9, -7, -(2**31), 2**31 - 1, 3][
            : 6 - -(-kv_len // 16)
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


@every_form
def test_a_row_gives_the_same_numbers_whoever_its_neighbours_are(form):
    heads = WINDOWED_FOR[form]
    batch = make_batch(heads, [(1, 77), (40, 90), (1, 3)], **MIXED)
    alone = with_arrays(batch, num_seqs=np.int32(1))
    together = attend(form, heads, batch)
    np.testing.assert_array_equal(attend(form, heads, alone)[0][0], together[0][0])


# The Pallas interpreters do not know explicit meshes; what is compiled does (test_cuda_kernels_compile.py).
@pytest.mark.parametrize(
    "form, axis",
    [
        (form, axis)
        for form in cases.FORMS
        for axis in ("heads", None)
        if axis or form in ("cpu", "gpu")
    ],
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


def test_the_public_call_defaults_to_causal_attention_scaled_by_the_head_dim():
    heads = Heads()
    batch = make_batch(heads, [(3, 30), (1, 5)], num_tokens=4, num_seqs=4, table_width=3)
    batch = with_arrays(batch, num_seqs=[2])  # as an array of one number, like JAX's op
    got = jax.jit(functools.partial(ragged_paged_attention, return_lse=True, implementation="xla"))(
        *batch.arrays
    )
    assert_matches(heads, got, expected(heads, batch))
    assert got[0].dtype == batch.q.dtype and got[1].dtype == jnp.float32
    alone = jax.eval_shape(ragged_paged_attention, *batch.arrays)
    assert alone.shape == batch.q.shape and alone.dtype == batch.q.dtype


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


@pytest.mark.parametrize("real, integer", [(float, int), (np.float64, np.int64)])
def test_options_of_the_public_call_reach_the_scores(real, integer):
    scoring = dict(scale=real(0.7), window=integer(9), soft_cap=real(1.5))
    heads = Heads(scoring=scoring, sinks=True)
    batch = make_batch(heads, [(3, 30), (1, 5)], num_tokens=4, num_seqs=4, table_width=3)
    call = functools.partial(ragged_paged_attention, return_lse=True, **heads.scoring)
    got = jax.jit(lambda arrays, sinks: call(*arrays, sinks=sinks))(batch.arrays, batch.sinks)
    assert_matches(heads, got, expected(heads, batch))


@pytest.mark.parametrize("empty", [dict(T=0), dict(S=0), dict(M=0)], ids=str)
def test_a_batch_with_nothing_in_it_gives_zeros(empty):
    size = dict(T=3, S=2, M=2) | empty
    out, lse = ragged_paged_attention(
        jnp.ones((size["T"], 4, 16)),
        *[jnp.ones((5, 8, 2, 16))] * 2,
        jnp.full(size["S"], 9),
        jnp.ones((size["S"], size["M"]), jnp.int32),
        jnp.arange(size["S"] + 1),
        size["S"],
        return_lse=True,
    )
    assert out.shape == (size["T"], 4, 16) and not out.any()
    assert lse.shape == (size["T"], 4) and np.isneginf(lse).all()


@every_form
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "lens, num_tokens", [([(1, 0), (1, 3), (1, 0)], 4), ([(1, 0), (1, 9), (3, 2), (36, 5)], 48)]
)
def test_a_row_that_sees_no_key_gives_zero_and_no_mass(form, sinks, lens, num_tokens):
    heads = replace(WINDOWED_FOR[form], sinks=sinks)
    batch = make_batch(heads, lens, num_tokens=num_tokens, num_seqs=4, table_width=6)
    assert_matches(heads, attend(form, heads, batch), expected(heads, batch))


@every_form
def test_nan_of_a_live_row_is_seen_in_its_result_and_in_no_other(form):
    heads = WINDOWED_FOR[form]
    batch = make_batch(heads, [(1, 50), (1, 96), (2, 9)], num_tokens=4, num_seqs=4, table_width=6)
    want = expected(heads, batch)
    q = np.array(batch.q, np.float32)
    q[1] = np.nan
    out, lse = attend(form, heads, with_arrays(batch, q=jnp.asarray(q, batch.q.dtype)))
    assert np.isnan(np.asarray(out[1], np.float32)).all() and np.isnan(lse[1]).all()
    others = np.array([0, 2, 3])
    assert_matches(heads, (out[others], lse[others]), [x[others] for x in want])


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("lens, num_tokens", [([(1, 50), (1, 9)], 2), ([(7, 50), (1, 9)], 9)])
def test_with_64_bit_numbers_enabled_nothing_changes(implementation, lens, num_tokens):
    heads = Heads(16, 16, 2, 2, dict(window=20))
    batch = make_batch(heads, lens, num_tokens=num_tokens, num_seqs=2, table_width=4)
    interpret = implementation != "xla"
    options = dict(
        implementation=implementation, interpret=interpret, return_lse=True, **heads.scoring
    )
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(ragged_paged_attention, **options))(*batch.arrays)
        wide = [np.asarray(x, np.float64 if x.ndim > 2 else np.int64) for x in batch.arrays]
        wider = ragged_paged_attention(*wide, return_lse=True, **heads.scoring)
    assert got[1].dtype == wider[1].dtype == jnp.float32 and wider[0].dtype == jnp.float64
    assert_matches(heads, got, expected(heads, batch))
    assert_matches(heads, wider, expected(heads, batch))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16])
def test_integers_that_int32_does_not_hold_do_not_wrap_around(dtype):
    heads = Heads(16, 16, 2, 2)
    batch = make_batch(heads, [(1, 96), (1, 9)], num_tokens=2, num_seqs=2, table_width=6)
    q, k_pages, v_pages, kv_lens, tables, cu_q_lens, _ = map(np.asarray, batch.arrays)
    large = min(2**40, np.iinfo(dtype).max)
    kv_lens = np.array([large, 9], dtype)
    got = ragged_paged_attention(
        q, k_pages, v_pages, kv_lens, tables, cu_q_lens, 2**70, return_lse=True
    )
    assert_matches(heads, got, expected(heads, batch))


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


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(kv_lens=[3, 5]), TypeError, r"kv_lens is a list; expected an array \[S\]"),
        (dict(cu_q_lens=jnp.arange(4)), ValueError, r"cu_q_lens has shape \(4,\); expected \(3,\)"),
        (dict(num_tokens=0), ValueError, r"num_tokens=0; expected at least 1"),
        (dict(num_tokens=2.0), TypeError, r"num_tokens=2\.0; expected an int"),
        (dict(num_blocks=0), ValueError, "num_blocks=0; expected at least 1"),
        (dict(block_size=0), ValueError, "block_size=0; expected at least 1"),
        (dict(window=0), ValueError, "window=0; expected at least 1"),
    ],
)
def test_a_bad_argument_of_a_plan_is_named_with_its_value(change, error, message):
    good = dict(
        num_tokens=2,
        kv_lens=jnp.array([3, 5]),
        block_tables=jnp.zeros((2, 4), jnp.int32),
        cu_q_lens=jnp.arange(3),
    )
    with pytest.raises(error, match=message):
        plan_attention(**good | dict(num_seqs=2, num_blocks=5, block_size=8, window=None) | change)


def test_a_plan_serves_only_what_it_was_made_for():
    q, pages, index = (
        _f32(2, 4, 16),
        _f32(5, 8, 2, 16),
        (jnp.array([3, 5]), jnp.zeros((2, 4), jnp.int32), jnp.arange(3), 2),
    )
    sizes = dict(num_blocks=5, block_size=8, window=None)
    plan = plan_attention(2, *index, **sizes)
    assert ragged_paged_attention(q, pages, pages, *index, plan=plan).shape == q.shape
    for change in (dict(num_blocks=99), dict(block_size=16), dict(window=3)):
        with pytest.raises(
            ValueError, match=r"plan was made for Planned\(num_tokens=2.*; expected Planned\("
        ):
            ragged_paged_attention(
                q, pages, pages, *index, plan=plan_attention(2, *index, **sizes | change)
            )
    with pytest.raises(ValueError, match="plan was made for Planned"):
        ragged_paged_attention(_f32(1, 4, 16), pages, pages, *index, plan=plan)
    with pytest.raises(TypeError, match="plan is a tuple; expected what plan_attention made"):
        ragged_paged_attention(q, pages, pages, *index, plan=())


def _f32(*shape):
    return jnp.zeros(shape, jnp.float32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=_f32(4, 64)), ValueError, r"q has shape \(4, 64\); expected \[T, H, D\]"),
        (
            dict(q=_f32(4, 5, 16)),
            ValueError,
            "q has 5 heads; expected a multiple of the 2 KV heads",
        ),
        (dict(q=_f32(4, 4, 8)), ValueError, "k_pages has head_dim 16; expected 8"),
        (
            dict(q=jnp.zeros((4, 4, 16), jnp.int32)),
            TypeError,
            "q has dtype int32; expected float32, bfloat16",
        ),
        (
            dict(q=jnp.zeros((4, 4, 16), jnp.bfloat16)),
            TypeError,
            "k_pages has dtype float32; expected bfloat16",
        ),
        (dict(k_pages=_f32(5, 8, 32)), ValueError, r"k_pages has shape \(5, 8, 32\)"),
        (
            dict(v_pages=_f32(5, 8, 2, 8)),
            ValueError,
            r"v_pages has shape \(5, 8, 2, 8\); expected \(5, 8, 2, 16\)",
        ),
        (
            dict(v_pages=jnp.zeros((5, 8, 2, 16), jnp.bfloat16)),
            TypeError,
            "v_pages has dtype bfloat16",
        ),
        (
            dict(k_pages=jnp.zeros((5, 8, 2, 16), jnp.int16)),
            TypeError,
            "k_pages has dtype int16; expected float32",
        ),
        (
            dict(k_scale=_f32(5, 8)),
            ValueError,
            r"k_scale has shape \(5, 8\); expected a scalar or \(5, 8, 2\)",
        ),
        (dict(v_scale=_f32(1)), ValueError, r"v_scale has shape \(1,\); expected a scalar"),
        (dict(v_scale=2), TypeError, "v_scale has dtype int32; expected a floating dtype"),
        (
            dict(kv_lens=jnp.zeros((2, 1), jnp.int32)),
            ValueError,
            r"kv_lens has shape \(2, 1\); expected \[S\]",
        ),
        (dict(kv_lens=_f32(2)), TypeError, "kv_lens has dtype float32; expected an integer dtype"),
        (
            dict(block_tables=jnp.zeros((3, 4), jnp.int32)),
            ValueError,
            r"block_tables has shape \(3, 4\); expected \(2, 4\)",
        ),
        (dict(block_tables=_f32(2, 4)), TypeError, "block_tables has dtype float32"),
        (
            dict(cu_q_lens=jnp.zeros(2, jnp.int32)),
            ValueError,
            r"cu_q_lens has shape \(2,\); expected \(3,\)",
        ),
        (
            dict(num_seqs=jnp.zeros(2, jnp.int32)),
            ValueError,
            r"num_seqs has shape \(2,\); expected a scalar",
        ),
        (dict(num_seqs=1.5), TypeError, "num_seqs is a float; expected an array"),
        (dict(num_seqs=jnp.float32(1)), TypeError, "num_seqs has dtype float32"),
        (dict(sinks=_f32(2)), ValueError, r"sinks has shape \(2,\); expected \(4,\)"),
        (dict(window=0), ValueError, "window=0; expected at least 1"),
        (dict(window=-3), ValueError, "window=-3; expected at least 1"),
        (dict(window=2.0), TypeError, r"window=2\.0; expected an int of at least 1"),
        (dict(scale="a"), TypeError, "scale='a'; expected a Python number or None"),
        (dict(scale=_f32()), TypeError, "scale=Array.*; expected a Python number or None"),
        (dict(scale=float("inf")), ValueError, "scale=inf; expected a finite number"),
        (dict(soft_cap="a"), TypeError, "soft_cap='a'; expected a Python number or None"),
        (dict(soft_cap=True), TypeError, "soft_cap=True; expected a Python number or None"),
        (
            dict(scale=1e300),
            ValueError,
            "scale=1e[+]300; expected a finite number that float32 holds",
        ),
        (
            dict(soft_cap=10**400),
            ValueError,
            "soft_cap=10*; expected a finite number above 0 that float32 holds",
        ),
        (
            dict(q=_f32(4, 0, 16)),
            ValueError,
            r"q has shape \(4, 0, 16\); expected at least one head",
        ),
        (
            dict(q=jnp.zeros((4, 4, 16), jnp.float8_e5m2)),
            TypeError,
            "q has dtype float8_e5m2; expected float32",
        ),
        (
            dict(sinks=jnp.zeros(4, jnp.int32)),
            TypeError,
            "sinks has dtype int32; expected a floating dtype",
        ),
        (dict(num_seqs=None), TypeError, "num_seqs is a NoneType; expected an array"),
        (dict(num_seqs="x"), TypeError, "num_seqs is a str"),
        (dict(k_scale="1"), TypeError, "k_scale is a str; expected an array or a number"),
        (
            dict(kv_lens=np.array(["a", "b"])),
            TypeError,
            "kv_lens has dtype <U1; expected an integer dtype",
        ),
        (dict(q=[[[0.0]]]), TypeError, "q is a list; expected an array"),
        (dict(v_pages=None), TypeError, "v_pages is a NoneType; expected an array"),
        (dict(sinks=[0.0] * 4), TypeError, "sinks is a list; expected an array"),
        (dict(soft_cap=0.0), ValueError, r"soft_cap=0\.0; expected a finite number above 0"),
        (dict(soft_cap=float("nan")), ValueError, "soft_cap=nan"),
        (dict(implementation="cudnn"), ValueError, "implementation='cudnn'; expected 'xla'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_a_bad_argument_is_named_with_its_value(change, error, message):
    good = dict(q=_f32(4, 4, 16), k_pages=_f32(5, 8, 2, 16), v_pages=_f32(5, 8, 2, 16))
    good |= dict(
        kv_lens=jnp.array([3, 5]),
        block_tables=jnp.zeros((2, 4), jnp.int32),
        cu_q_lens=jnp.array([0, 3, 4]),
    )
    with pytest.raises(error, match=message):
        ragged_paged_attention(**good | dict(num_seqs=2) | change)
