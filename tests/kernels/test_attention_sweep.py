"""Attention against the reference, over head sizes, page sizes, groups, options and dtypes."""

import pytest
from cases import Heads, assert_matches, attend, covers, each, expected, make_batch
from jax.experimental import pallas as pl

pytestmark = pytest.mark.slow


def sweep(heads, mosaic=(), triton=()):
    """Run `heads` on every form but Mosaic, whose interpreter is slow, and those of one kernel.

    `make test` has the first case of each form.
    """
    listed = {"cpu": heads, "gpu": heads, "triton": [*heads, *triton], "mosaic_gpu": mosaic}
    pairs = [(form, case) for form, cases in listed.items() for case in cases]
    assert all(covers(form, case) for form, case in pairs)
    return each("form, heads", pairs, in_sweep=lambda form, case: case not in listed[form][:1])


# Each value of each parameter at least once, and each option with more than one shape: pairs, not
# the full product.
HEADS = [
    Heads(80, 24, 1, 4, dict(soft_cap=2.0), sinks=True),
    Heads(64, 16, 3, 3, dict(window=20)),
    Heads(16, 1, 2, 3),
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
FP8, OTHER_FP8 = (dict(kv_dtype=name) for name in ("float8_e4m3fn", "float8_e5m2"))
QUANTISED = [
    Heads(64, 16, 2, 4, kv_dtype="int8", scales="token"),
    Heads(80, 8, 1, 3, dict(soft_cap=5.0), dtype="bfloat16", scales="token", **FP8),
    Heads(16, 16, 2, 1, dict(window=30), True, dtype="float16", scales="tensor", **OTHER_FP8),
]
QUANTISED_FOR_TRITON = [
    Heads(64, 16, 1, 8, dtype="bfloat16", kv_dtype="int8", scales="tensor"),
    Heads(32, 16, 2, 2, kv_dtype="bfloat16"),
    Heads(32, 16, 2, 2, **FP8),
]


def _edge_lengths(size):
    return [1, size - 1 or 1, size, size + 1, 3 * size, 3 * size + 1]


@sweep(HEADS[1::2], FOR_MOSAIC[::2])
def test_decoding_rows_match_the_reference(heads, form):
    size = heads.block_size
    width = max(pl.cdiv(100, size) + 1, 4)  # not a multiple of the chunk
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
    sizes = dict(num_tokens=96, num_seqs=7, table_width=pl.cdiv(100, size) + 1)
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
    sizes = dict(num_tokens=40, num_seqs=4, table_width=pl.cdiv(100, heads.block_size))
    for lens in [(1, 40), (30, 96), (1, 1), (2, 90)], [(1, 96), (1, 3)]:
        batch = make_batch(heads, lens, **sizes)
        assert_matches(heads, attend(form, heads, batch), expected(heads, batch))
