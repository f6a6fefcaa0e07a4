import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels import write_kv

N, B, KV, D = 5, 4, 2, 8


def _pages(rng):
    return tuple(
        jnp.asarray(rng.standard_normal((N, B, KV, D), dtype=np.float32)) for _ in range(2)
    )


def _new(rng, num_tokens):
    return tuple(
        jnp.asarray(rng.standard_normal((num_tokens, KV, D), dtype=np.float32)) for _ in range(2)
    )


def test_each_token_lands_in_its_slot_and_nothing_else_changes():
    rng = np.random.default_rng(0)
    pages, new = _pages(rng), _new(rng, 4)
    slots = np.array([13, 0, 19, 6])
    got = write_kv(*pages, *new, jnp.asarray(slots, jnp.int32))
    for before, tokens, after in zip(pages, new, got, strict=True):
        want = np.array(before).reshape(N * B, KV, D)
        want[slots] = tokens
        np.testing.assert_array_equal(np.asarray(after).reshape(N * B, KV, D), want)


@pytest.mark.parametrize("slot", [N * B, N * B + 1, 2**31 - 1, -1, -B, -N * B, -(2**31)])
def test_a_slot_outside_the_pool_is_dropped(slot):
    rng = np.random.default_rng(1)
    pages, new = _pages(rng), _new(rng, 1)
    got = jax.jit(write_kv)(*pages, *new, jnp.array([slot], jnp.int32))
    for before, after in zip(pages, got, strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    "slot, dtype",
    [(2**32 + 1, np.int64), (-(2**32) + 1, np.int64), (2**32 - 1, np.uint32), (255, np.uint8)],
)
def test_a_slot_that_int32_does_not_hold_is_dropped(slot, dtype):
    rng = np.random.default_rng(1)
    pages, new = [np.asarray(x) for x in _pages(rng)], _new(rng, 1)
    for before, after in zip(pages, write_kv(*pages, *new, np.array([slot], dtype)), strict=True):
        np.testing.assert_array_equal(after, before)


def test_donated_pages_are_written_in_place():
    prime = 1009
    pages = jax.ShapeDtypeStruct((prime, B, KV, D), jnp.float32)
    new = jax.ShapeDtypeStruct((7, KV, D), jnp.float32)
    slots = jax.ShapeDtypeStruct((7,), jnp.int32)
    compiled = (
        jax.jit(write_kv, donate_argnums=(0, 1)).lower(pages, pages, new, new, slots).compile()
    )
    assert not [
        line for line in compiled.as_text().splitlines() if "copy(" in line and str(prime) in line
    ]
    memory = compiled.memory_analysis()
    page_bytes = prime * B * KV * D * 4
    assert memory.alias_size_in_bytes == 2 * page_bytes
    assert memory.temp_size_in_bytes < page_bytes // 10


def test_a_pool_of_more_than_2_to_the_31_numbers_is_never_indexed_flat():
    big = jax.ShapeDtypeStruct((2**22, 16, 8, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((3, 8, 128), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(write_kv)(big, big, new, new, jax.ShapeDtypeStruct((3,), jnp.int32))
    scatters = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scatter"]
    assert len(scatters) == 2
    for eqn in scatters:
        assert eqn.invars[0].aval.shape == big.shape
        assert eqn.invars[1].aval.shape == (3, 2)  # (block, offset)


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            dict(k_pages=np.zeros((N, B, KV), np.float32)),
            ValueError,
            r"k_pages has shape \(5, 4, 2\)",
        ),
        (
            dict(v_pages=np.zeros((N + 1, B, KV, D), np.float32)),
            ValueError,
            r"v_pages has shape \(6, 4, 2, 8\)",
        ),
        (
            dict(k=np.zeros((3, KV + 1, D), np.float32)),
            ValueError,
            r"k has shape \(3, 3, 8\); expected \(3, 2, 8\)",
        ),
        (
            dict(v=np.zeros((2, KV, D), np.float32)),
            ValueError,
            r"v has shape \(2, 2, 8\); expected \(3, 2, 8\)",
        ),
        (
            dict(v=np.zeros((3, KV, D), np.float16)),
            TypeError,
            "v has dtype float16; expected float32",
        ),
        (dict(slots=np.zeros((3, 1), np.int32)), ValueError, r"slots has shape \(3, 1\)"),
        (dict(slots=np.zeros(3, np.float32)), TypeError, "slots has dtype float32"),
        (dict(slots=[0, 1, 2]), TypeError, r"slots is a list; expected an array \[T\]"),
        (dict(k=None), TypeError, "k is a NoneType; expected an array"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(change, error, message):
    good = dict(zip(("k_pages", "v_pages"), _pages(np.random.default_rng(0)), strict=True))
    good |= dict(zip(("k", "v"), _new(np.random.default_rng(0), 3), strict=True))
    good |= dict(slots=jnp.zeros(3, jnp.int32))
    with pytest.raises(error, match=message):
        write_kv(**good | change)
