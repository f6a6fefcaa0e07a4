"""Pools of more than 2^31 numbers: no index wraps around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import ragged_paged_attention, write_kv

LIMIT = 2**31
BLOCK = 16, 2, 64  # tokens, KV heads, head_dim
INDEX = jnp.array([20, 3], jnp.int32), jnp.array([0, 1, 2], jnp.int32), jnp.int32(2)


def _triton_module(blocks: int, dtype) -> str:
    """What Triton is given for a pool of so many blocks, on a machine without a GPU."""
    from jax._src.interpreters import mlir
    from jax._src.lib import triton
    from jax._src.lib.mlir import ir

    kv_lens, cu_q_lens, num_seqs = INDEX
    q, pages = (
        jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((blocks, *BLOCK), dtype),
    )
    arguments = q, pages, pages, kv_lens, jnp.zeros((2, 9), jnp.int32), cu_q_lens, num_seqs
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Explicit,), abstract_device=device
    )
    call = jax.jit(lambda *arrays: ragged_paged_attention(*arrays, implementation="triton"))
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = call.trace(*arguments).lower(lowering_platforms=("cuda",))
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            config = op.attributes["mhlo.backend_config"]
            if config["name"].value == "paged_attention":
                found.append(config["ir"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    (module,) = found
    with mlir.make_ir_context() as context:
        triton.dialect.register_dialect(context)
        return str(ir.Module.parse(module))


@pytest.mark.parametrize("dtype, limit", [(jnp.bfloat16, 2**31), (jnp.int8, 2**32)])
def test_triton_multiplies_block_ids_in_64_bits_once_32_do_not_reach(dtype, limit):
    size = np.prod(BLOCK)
    offsets = "tensor<64x64xi64>"
    assert offsets not in _triton_module(LIMIT // size, dtype)
    assert offsets in _triton_module(limit // size + 1, dtype)


def test_triton_refuses_the_pools_for_which_pallas_takes_32_bits_that_do_not_reach():
    size = np.prod(BLOCK)
    for blocks in (LIMIT // size + 1, 2 * LIMIT // size):
        with pytest.raises(
            NotImplementedError, match="bytes large are not covered: Pallas-Triton's offsets wrap"
        ):
            _triton_module(blocks, jnp.int8)


@pytest.mark.kernels  # four gigabytes
def test_xla_writes_and_reads_the_last_blocks_of_a_pool_of_more_than_2_31_numbers():
    rng = np.random.default_rng(0)
    blocks = LIMIT // int(np.prod(BLOCK)) + 4
    k = jnp.asarray(rng.integers(-9, 9, (23, *BLOCK[1:])), jnp.int8)
    q = jnp.asarray(rng.standard_normal((2, 4, 64)), jnp.float32)
    kv_lens, cu_q_lens, num_seqs = INDEX

    def attend(blocks, ids):
        table = np.zeros((2, 2), np.int32)
        table[0], table[1, 0] = ids[:2], ids[2]
        position = np.r_[:20, :3]
        slots = jnp.asarray(
            np.r_[table[0].repeat(16)[:20], table[1].repeat(16)[:3]] * 16 + position % 16, jnp.int32
        )
        write = jax.jit(write_kv, donate_argnums=(0, 1))
        pages, _ = write(
            jnp.zeros((blocks, *BLOCK), jnp.int8),
            jnp.zeros((blocks, 16, 2, 1), jnp.int8),
            k,
            k[..., :1],
            slots,
        )
        call = jax.jit(
            lambda pages: ragged_paged_attention(
                q, pages, pages, kv_lens, table, cu_q_lens, num_seqs
            )
        )
        return np.asarray(call(pages))

    # A wrapped id would fall on a block of zeros.
    want = attend(8, [3, 1, 6])
    assert np.abs(want).max() > 1
    np.testing.assert_array_equal(attend(blocks, [blocks - 2, blocks - 1, blocks - 3]), want)
