"""What only a GPU can show: the compiled kernels' numbers, and an engine's tokens on it.

`benchmarks/gpu_day.py` runs these on a machine that has one. Elsewhere they are skipped; the same
kernels run in their interpreters in `tests/kernels`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import Engine, EngineConfig, SamplingParams, check_integrity
from paged_jax.kernels import ragged_paged_attention
from paged_jax.kernels.paged_attention import dispatch
from paged_jax.models import Llama, LlamaConfig

ON_GPU = jax.default_backend() == "gpu"
pytestmark = pytest.mark.skipif(not ON_GPU, reason="no GPU: nothing was run on one")

if ON_GPU:
    import sys

    sys.path.insert(0, __file__.rsplit("/", 1)[0] + "/kernels")
    from cases import Heads, assert_matches, expected, make_batch, with_arrays

SIZES = dict(num_seqs=16, table_width=80)
DECODE = [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700, 1200)]
MIXED = [(1, 300), (40, 340), (1, 17), (130, 130), (2, 1100), (70, 1000)]


def _kinds():
    """Name the implementation, dtype and head_dim of each case."""
    for dtype in ("bfloat16", "float16"):
        for head_dim in (64, 128):
            yield "mosaic_gpu", dtype, head_dim
    for dtype in ("bfloat16", "float16", "float32"):
        for head_dim in (64, 80, 128, 256):
            yield "triton", dtype, head_dim


def _attend(implementation, heads, batch):
    device = jax.devices()[0].device_kind
    problem = dispatch.Problem.of(batch.q, batch.k_pages, None, None)
    reason = dispatch.why_not(implementation, problem, device)
    if reason:
        pytest.skip(f"not for this GPU: {reason}")
    call = jax.jit(
        lambda *arrays: ragged_paged_attention(
            *arrays, implementation=implementation, return_lse=True, **heads.scoring
        )
    )
    return call(*batch.arrays)


@pytest.mark.parametrize("widths", [None, (1, 4, 8, 64)])
@pytest.mark.parametrize("windows", [(None, None), (None, 24)])
def test_an_engine_gives_the_tokens_that_it_gives_in_other_company(widths, windows):
    """In float32: one request after another, and all at once in few blocks, with preemption."""
    sizes = dict(vocab_size=211, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4)
    config = LlamaConfig(**sizes, num_kv_heads=2, max_model_len=192, windows=windows)
    model = Llama(config, rngs=nnx.Rngs(0))
    prompts = [np.random.default_rng(n).integers(1, 211, n).tolist() for n in (3, 40, 17, 90, 64)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = Engine(*nnx.split(model), EngineConfig(24, 192, 8, 64), widths=widths)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished():
        engine.run(16)
    got = [[token for u in engine.take(i) for token in u.token_ids] for i in ids]
    assert check_integrity(engine.state) == []
    want = []
    for prompt in prompts:
        alone = engine.add_request(prompt, params)
        engine.run(60)
        want.append([token for u in engine.take(alone) for token in u.token_ids])
    assert got == want and all(map(len, got))


def test_pages_are_not_copied_by_a_step():
    """Memory peaks below the pages twice over: while they are made, and after."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2, max_model_len=128,
    )  # fmt: skip
    model = Llama(config, rngs=nnx.Rngs(0))
    engine = Engine(*nnx.split(model), EngineConfig(200_000, 128, 8, 64))
    pages = sum(x.nbytes for x in jax.tree.leaves(engine.state.cache.kv))
    before = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.run(30)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    assert pages <= before and peak - before < 0.5 * pages
    assert jnp.isfinite(engine.state.cache.kv.k_pages[0][0]).all()


@pytest.mark.parametrize("lens, num_tokens", [(DECODE, 16), (MIXED, 256)], ids=["decode", "mixed"])
@pytest.mark.parametrize("implementation, dtype, head_dim", _kinds())
@pytest.mark.parametrize("scoring", [{}, dict(window=100, soft_cap=20.0)], ids=["full", "window"])
def test_a_kernel_gives_what_the_reference_gives(
    implementation, dtype, head_dim, lens, num_tokens, scoring
):
    heads = Heads(head_dim, 16, 2, 4, dtype=dtype, scoring=scoring)
    batch = make_batch(heads, lens, num_tokens=num_tokens, **SIZES)
    assert_matches(heads, _attend(implementation, heads, batch), expected(heads, batch))


@pytest.mark.parametrize("implementation, dtype, head_dim", _kinds())
def test_a_row_keeps_its_bits_in_any_company(implementation, dtype, head_dim):
    heads = Heads(head_dim, 16, 2, 4, dtype=dtype)
    batch = make_batch(heads, [(1, 1200), (100, 400), (1, 3)], num_tokens=256, **SIZES)
    alone = with_arrays(batch, num_seqs=np.int32(1))
    got, want = (np.asarray(_attend(implementation, heads, b)[0][0]) for b in (batch, alone))
    np.testing.assert_array_equal(got, want)
