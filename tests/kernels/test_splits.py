"""The work of the CUDA kernels: fixed splits, evenly shared, and rows that keep their bits."""

from itertools import pairwise
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Heads, make_batch, with_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.kernels.paged_attention import dispatch, splits
from paged_jax.kernels.paged_attention.splits import Cut, cut_strips, list_work, split_bounds
from paged_jax.kernels.paged_attention.tiles import QueryTiles, Rows

CONTEXT = 131_072


def strips_of(positions, num_rows, rows=1):
    ints = [jnp.asarray(x, jnp.int32) for x in (positions, num_rows)]
    number = jnp.arange(len(positions), dtype=jnp.int32)
    offsets = jnp.arange(rows, dtype=jnp.int32)
    return QueryTiles(number, number, ints[1], ints[0], number[-1] + 1, offsets)


def cut_of(rows=1, heads=4, kv_heads=8, context=CONTEXT, chunk=64, window=None):
    return Cut(rows, heads, context, *split_bounds(rows, kv_heads), chunk, window)


def listed(strips, cut, num_lines=None):
    """The real splits as (strip, start, end, line), and the places of the results."""
    num_lines = cut.max_lines(strips.seq.shape[0], 10**6) if num_lines is None else num_lines
    work, places = jax.jit(list_work, static_argnums=(1, 2))(strips, cut, num_lines)
    number = int(work.num_splits[0])
    assert number <= work.strip.shape[0]
    return [tuple(int(x[i]) for x in work[:4]) for i in range(number)], places


lengths = st.lists(st.integers(0, 6000), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([None, 1, 100, 700]), st.sampled_from([1, 16]), st.data())
def test_splits_cover_what_rows_see_once_at_places_of_their_own(kv_lens, window, rows, data):
    num_rows = [min(n, data.draw(st.integers(0, rows))) for n in kv_lens]
    positions = [n - r for n, r in zip(kv_lens, num_rows, strict=True)]
    kv_lens, num_rows, positions = (
        [*x, *[0] * (6 - len(x))] for x in (kv_lens, num_rows, positions)
    )
    cut = cut_of(rows, context=6016, window=window)
    strips = strips_of(positions, num_rows, rows)
    found, places = listed(strips, cut)
    lines = []
    for strip, (position, count) in enumerate(zip(positions, num_rows, strict=True)):
        own = sorted((start, end, line) for s, start, end, line in found if s == strip)
        if count == 0:
            assert not own
            continue
        first = 0 if window is None else max(0, position - window + 1)
        size = int(splits.split_size(jnp.asarray([min(position + count, cut.most_seen)]), cut)[0])
        assert own[0][0] == first // 64 * 64 and own[-1][1] == position + count
        for (_, end, _), (start, _, _) in pairwise(own):
            assert end == start and start % size == 0  # at multiples, whatever else is there
        assert len(own) == int(places.splits[strip]) <= cut.max_splits
        step = int(places.lines[strip])
        assert step >= count * cut.heads and step % 8 == 0
        assert [line for *_, line in own] == [
            int(places.first[strip]) + j * step for j in range(len(own))
        ]
        lines += [line for line in range(own[0][2], own[-1][2] + step)]
    assert len(set(lines)) == len(lines)
    assert max(lines, default=0) < cut.max_lines(6, max(1, sum(num_rows)))


def load_by_program(kv_lens, num_programs=132, kv_heads=8, window=None):
    found, _ = listed(
        strips_of([n - 1 for n in kv_lens], [1] * len(kv_lens)),
        cut_of(kv_heads=kv_heads, window=window),
    )
    sizes = np.repeat([end - start for _, start, end, _ in found], kv_heads)
    load = np.zeros(num_programs)
    np.add.at(load, np.arange(len(sizes)) % num_programs, sizes)
    return load, sizes


DRAWS = {
    "one long among short": [32_768] + [512] * 63,
    "one alone": [32_768],
    "the longest alone": [CONTEXT],
    "log-normal": np.random.default_rng(0).lognormal(7, 1.2, 64).astype(int).clip(1, CONTEXT),
    "uniform": np.random.default_rng(1).integers(1, 20_000, 256),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("window", [None, 4096])
def test_no_program_has_more_than_the_mean_and_one_split(draw, kv_heads, window, record_property):
    load, sizes = load_by_program(list(map(int, DRAWS[draw])), kv_heads=kv_heads, window=window)
    record_property(
        "measured", f"{draw}, KV {kv_heads}, window {window}: {load.max() / load.mean():.2f} x mean"
    )
    # Chunks are whole, so a first and a last split may count as up to a chunk more.
    assert load.max() <= load.mean() + sizes.max() + 2 * 64


def test_results_that_would_pass_the_array_are_left_out():
    """Rows of which the numbers sum to more than there are tokens: 600 keys take three splits."""
    strips = strips_of([599, 599, 599], [1, 1, 1])
    cut = cut_of(heads=8)
    assert [line for *_, line in sorted(listed(strips, cut)[0])] == [8 * i for i in range(9)]
    found, places = listed(strips, cut, 50)
    assert sorted({strip for strip, *_ in found}) == [0, 1] and max(x[3] for x in found) + 8 <= 50
    assert places.splits.tolist() == [3, 3, 0]


def test_a_tile_is_cut_into_strips_that_have_its_rows():
    offsets = jnp.arange(5, dtype=jnp.int32)
    tiles = QueryTiles(*(jnp.asarray([x], jnp.int32) for x in (3, 7, 5, 20)), jnp.int32(1), offsets)
    place = Rows(jnp.zeros(5, jnp.int32), offsets, jnp.ones(5, bool))
    strips, located = cut_strips(tiles, place, 2)
    assert strips.start.tolist() == [7, 9, 11] and strips.num_rows.tolist() == [2, 2, 1]
    assert strips.position.tolist() == [20, 22, 24] and strips.seq.tolist() == [3, 3, 3]
    assert located.tile.tolist() == [0, 0, 1, 1, 2] and located.offset.tolist() == [0, 1, 0, 1, 0]


KINDS = {
    ("triton", "float32"): Heads(16, 16, 1, 2),
    ("triton", "bfloat16"): Heads(16, 16, 1, 2, dtype="bfloat16"),
    ("mosaic_gpu", "bfloat16"): Heads(64, 16, 1, 2, dtype="bfloat16"),
}


@pytest.mark.parametrize("form, dtype", KINDS)
def test_a_row_keeps_its_bits_in_any_company_and_at_any_width(form, dtype):
    """Alone, beside 255 others, beside a prefill; at the widths 8, 256 and 2048."""
    heads = KINDS[form, dtype]
    others = np.random.default_rng(2).integers(1, 60, 255)
    sizes = dict(num_seqs=256, table_width=22)
    full = make_batch(heads, [(1, 340), *((1, int(n)) for n in others)], num_tokens=256, **sizes)
    q = np.zeros((2048, *full.q.shape[1:]), np.float32)
    q[:256] = full.q
    q = jnp.asarray(q, full.q.dtype)
    first = jnp.full(257, 1, jnp.int32).at[0].set(0)
    alone = dict(num_seqs=np.int32(1), cu_q_lens=first)
    companies = {
        "width 256, alone": with_arrays(full, **alone),
        "width 256, beside 255": full,
        "width 2048, beside a prefill": with_arrays(
            full, q=q, num_seqs=np.int32(2), cu_q_lens=first.at[2:].set(1 + int(others[0]))
        ),
    }
    narrow = {name: getattr(full, name)[:8] for name in ("q", "kv_lens", "block_tables")} | dict(
        cu_q_lens=first[:9], num_seqs=np.int32(1)
    )
    got = cases.attend(form, heads, with_arrays(full, **narrow), small_chunks=False)
    want = [np.asarray(x[0]) for x in got]
    assert np.isfinite(want[0].astype(np.float32)).all() and want[0].any()
    for name, batch in companies.items():
        with mock.patch.object(dispatch, "INTERPRETED_PROGRAMS", 5):
            got = cases.attend(form, heads, batch, small_chunks=False)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(g[0]), w, err_msg=name)


def test_the_grid_is_what_the_device_runs_at_once():
    assert dispatch.num_programs("NVIDIA H200", 1, False) == 132
    assert dispatch.num_programs("NVIDIA A100-SXM4-80GB", 2, False) == 216
    assert dispatch.num_programs(None, 2, False) == 264
