"""The public call: its defaults, options and dtypes, plans, and what it says of bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Heads, assert_matches, each, expected, make_batch, with_arrays

from paged_jax.kernels import plan_attention, ragged_paged_attention


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


BATCHES_64 = {"decode": ([(1, 50), (1, 9)], 2), "mixed": ([(7, 50), (1, 9)], 9)}


def _batch_64(kind):
    heads = Heads(16, 16, 2, 2, dict(window=20))
    lens, num_tokens = BATCHES_64[kind]
    batch = make_batch(heads, lens, num_tokens=num_tokens, num_seqs=2, table_width=4)
    return heads, batch, dict(return_lse=True, **heads.scoring)


@each(
    "implementation, kind",
    [(name, kind) for name in ("xla", "triton") for kind in BATCHES_64],
    in_sweep=lambda name, kind: (name == "triton") == (kind == "mixed"),
)
def test_with_64_bit_numbers_enabled_nothing_changes(implementation, kind):
    heads, batch, options = _batch_64(kind)
    options |= dict(implementation=implementation, interpret=implementation != "xla")
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(ragged_paged_attention, **options))(*batch.arrays)
    assert got[1].dtype == jnp.float32
    assert_matches(heads, got, expected(heads, batch))


@each("kind", BATCHES_64, in_sweep=lambda kind: kind == "decode")
def test_64_bit_arguments_give_64_bit_results(kind):
    heads, batch, options = _batch_64(kind)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64 if x.ndim > 2 else np.int64) for x in batch.arrays]
        got = ragged_paged_attention(*wide, **options)
    assert got[0].dtype == jnp.float64 and got[1].dtype == jnp.float32
    assert_matches(heads, got, expected(heads, batch))


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


@pytest.mark.usefixtures("no_annotation_checks")
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
        (
            dict(implementation="cudnn"),
            ValueError,
            "implementation='cudnn'; expected 'mosaic_gpu', 'triton', 'xla'",
        ),
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
