from functools import partial

import jax
import jax.numpy as jnp
import pytest

from paged_jax.kernels import ragged_paged_attention
from paged_jax.kernels.paged_attention import dispatch
from paged_jax.kernels.paged_attention.dispatch import Problem

COMMON = Problem(
    "bfloat16", "bfloat16", head_dim=128, block_size=16, group=4, pool_size=10**9, has_scales=False
)


@pytest.mark.parametrize(
    "device_kind, change, want",
    [
        ("NVIDIA H200", {}, "mosaic_gpu"),
        ("NVIDIA H100 80GB HBM3", {}, "mosaic_gpu"),
        ("NVIDIA A100-SXM4-80GB", {}, "triton"),
        ("NVIDIA B200", {}, "triton"),
        ("Tesla V100-SXM2-16GB", {}, "xla"),
        ("Tesla T4", {}, "xla"),
        ("NVIDIA GeForce RTX 2080 Ti", {}, "xla"),
        ("NVIDIA RTX 6000 Ada Generation", {}, "triton"),
        (None, {}, "xla"),
        ("NVIDIA H200", dict(head_dim=80), "triton"),
        ("NVIDIA H200", dict(block_size=24), "triton"),
        ("NVIDIA H200", dict(q_dtype="float32", kv_dtype="float32"), "triton"),
        ("NVIDIA H200", dict(kv_dtype="float8_e4m3fn"), "triton"),
        ("NVIDIA H200", dict(has_scales=True), "triton"),
        ("NVIDIA H200", dict(head_dim=512), "xla"),
        ("NVIDIA H200", dict(q_dtype="float64", kv_dtype="float64"), "xla"),
        ("NVIDIA H200", dict(kv_dtype="int8", pool_size=2**31), "triton"),
        ("NVIDIA H200", dict(kv_dtype="int8", pool_size=2**31 + 1), "xla"),
        ("NVIDIA H200", dict(kv_dtype="int8", pool_size=2**32 + 1), "triton"),
    ],
)
def test_what_is_picked_on_cuda(device_kind, change, want):
    assert dispatch.pick_for_cuda(COMMON._replace(**change), device_kind) == want


def _arguments(q_dtype=jnp.float32, head_dim=64, block_size=8):
    q = jnp.zeros((2, 4, head_dim), q_dtype)
    pages = jnp.zeros((5, block_size, 2, head_dim), q_dtype)
    return q, pages, pages, jnp.array([3, 5]), jnp.zeros((2, 4), jnp.int32), jnp.array([0, 1, 2]), 2


@pytest.mark.parametrize(
    "implementation, change, reason",
    [
        ("triton", dict(head_dim=512), "head_dim 512 is not covered, only 1 to 256"),
        ("mosaic_gpu", {}, "q of dtype float32 is not covered, only bfloat16, float16"),
        (
            "mosaic_gpu",
            dict(q_dtype=jnp.bfloat16, head_dim=80),
            "head_dim 80 is not covered, only 64, 128",
        ),
        (
            "mosaic_gpu",
            dict(q_dtype=jnp.bfloat16, block_size=12),
            "block_size 12 is not covered, only 8, 16, 32, 64",
        ),
    ],
)
def test_a_named_implementation_that_does_not_cover_the_arguments_says_why(
    implementation, change, reason
):
    with pytest.raises(
        NotImplementedError, match=f"implementation='{implementation}' cannot run this: {reason}"
    ):
        ragged_paged_attention(*_arguments(**change), implementation=implementation, interpret=True)


@pytest.mark.parametrize(
    "implementation, kind, devices",
    [
        ("triton", "Tesla T4", "Ampere .sm_80. and later"),
        ("mosaic_gpu", "NVIDIA A100-SXM4-80GB", "Hopper .sm_90a."),
    ],
)
def test_a_named_implementation_that_the_device_cannot_run_says_why(implementation, kind, devices):
    with pytest.raises(
        NotImplementedError, match=f"device '{kind}' is not covered, only {devices}"
    ):
        _lower_for(kind, jnp.bfloat16, implementation=implementation)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_kernel_for_cuda_does_not_run_on_a_cpu(implementation, transform):
    call = transform(lambda *arrays: ragged_paged_attention(*arrays, implementation=implementation))
    with pytest.raises(
        NotImplementedError,
        match=f"'{implementation}' cannot run on the platform this is lowered for",
    ):
        call(*_arguments(jnp.bfloat16))


def test_on_a_cpu_none_is_xla():
    texts = []
    for name in (None, "xla"):
        call = jax.jit(partial(ragged_paged_attention, implementation=name))
        texts.append(call.lower(*_arguments()).as_text())
    assert texts[0].count("stablehlo.while") == texts[1].count("stablehlo.while") > 0
    assert "triton" not in texts[0] and "mosaic_gpu" not in texts[0]


def _lower_for(kind, dtype, *, platform="cuda", **options) -> str:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Explicit,), abstract_device=device
    )
    specs = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in _arguments(dtype)]
    call = jax.jit(lambda *arrays: ragged_paged_attention(*arrays, **options))
    with jax.sharding.use_abstract_mesh(mesh):
        return call.trace(*specs).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    "kind, want", [("NVIDIA H200", "mosaic_gpu"), ("NVIDIA A100-SXM4-80GB", "triton")]
)
def test_lowered_for_a_gpu_none_is_its_kernel(kind, want):
    text = _lower_for(kind, jnp.bfloat16)
    is_triton = 'name = "paged_attention"' in text  # the splits are combined by Triton in any case
    assert (is_triton, "mosaic_gpu" in text) == (want == "triton", want == "mosaic_gpu")


def test_lowered_for_another_platform_none_is_xla():
    text = _lower_for("AMD Instinct MI300X", jnp.bfloat16, platform="rocm")
    assert "stablehlo.while" in text and "triton" not in text and "mosaic_gpu" not in text


def _products(jaxpr):
    """All dot_general equations, those inside kernels and loops too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _products(inner)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_no_product_of_float32_is_done_in_tensor_float_32(implementation):
    call = partial(ragged_paged_attention, implementation=implementation, interpret=True)
    products = list(_products(jax.make_jaxpr(call)(*_arguments()).jaxpr))
    assert len(products) >= 2
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    assert [e for e in products if e.params["precision"] != highest] == []
