from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from paged_jax.kernels import plan_attention
from paged_jax.kernels.paged_attention.items import share_items
from paged_jax.kernels.paged_attention.tiles import (
    cut_tiles,
    locate_rows,
    max_tiles,
    query_lengths,
    tile_size,
)

T, S = 40, 6
BATCHES = [
    [40],
    [1, 1, 1, 1, 1, 35],
    [7, 0, 8, 9, 0, 16],
    [0, 0, 0, 0, 0, 0],
    [8, 8, 8],
    [],
]


def _arrays(q_lens):
    cu = np.full(S + 1, 99, np.int32)  # past the live sequences anything may stand
    cu[: len(q_lens) + 1] = np.cumsum([0, *q_lens])
    kv_lens = np.arange(S, dtype=np.int32) * 10 + 50
    return (
        jnp.asarray(cu),
        jnp.asarray(kv_lens),
        query_lengths(jnp.asarray(cu), jnp.int32(len(q_lens))),
    )


@pytest.mark.parametrize("q_lens", BATCHES, ids=str)
@pytest.mark.parametrize("size", [1, 8])
def test_tiles_cover_every_sequence_in_order(q_lens, size):
    cu, kv_lens, lengths = _arrays(q_lens)
    tiles = cut_tiles(lengths, cu, kv_lens, size, max_tiles(T, S, size))
    want = []
    for s, q_len in enumerate(q_lens):
        for first in range(0, q_len, size):
            start = int(cu[s]) + first
            want.append((s, start, min(size, q_len - first), int(kv_lens[s]) - q_len + first))
    got = list(zip(*(np.asarray(x).tolist() for x in tiles[:4]), strict=True))
    assert int(tiles.num_tiles) == len(want)
    assert got[: len(want)] == want
    assert not any(rows for _, _, rows, _ in got[len(want) :])


@pytest.mark.parametrize("q_lens", BATCHES, ids=str)
@pytest.mark.parametrize("size", [1, 8])
def test_every_owned_row_is_located_in_its_tile(q_lens, size):
    cu, kv_lens, lengths = _arrays(q_lens)
    tiles = cut_tiles(lengths, cu, kv_lens, size, max_tiles(T, S, size))
    rows = locate_rows(T, lengths, cu, size)
    n = sum(q_lens)
    assert np.asarray(rows.is_owned).tolist() == [True] * n + [False] * (T - n)
    start = np.asarray(tiles.start)[np.asarray(rows.tile)[:n]]
    np.testing.assert_array_equal(start + np.asarray(rows.offset)[:n], np.arange(n))
    assert (np.asarray(rows.offset)[:n] < size).all()


@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_bound_on_tiles_is_enough_and_is_reached(size):
    for num_tokens in range(1, 20):
        for seqs in (1, 2, 5):
            ones = min(seqs, num_tokens)
            most = max(
                sum(pl.cdiv(n, size) for n in [1] * (k - 1) + [num_tokens - k + 1])
                for k in range(1, ones + 1)
            )
            assert most <= max_tiles(num_tokens, seqs, size) <= most + 1


def test_one_token_a_sequence_makes_tiles_of_one():
    assert tile_size(8, 8) == tile_size(3, 8) == 1
    assert tile_size(9, 8) > 1


@pytest.mark.parametrize("window", [None, 1, 20, 700])
def test_a_walk_starts_at_the_first_block_of_its_window(window):
    kv_lens, cu_q_lens = np.array([1, 16, 17, 600]), np.array([0, 1, 2, 3, 36])
    index = (
        jnp.asarray(kv_lens),
        jnp.zeros((4, 40), jnp.int32),
        jnp.asarray(cu_q_lens),
        jnp.int32(4),
    )
    plan = plan_attention(40, *index, num_blocks=9, block_size=16, window=window)
    tiles, walk = plan.every.tiles, plan.every
    for t in range(int(tiles.num_tiles)):
        position = int(tiles.position[t])
        assert int(walk.first_block[t]) == _first_key(position, window) // 16
        assert int(walk.end_block[t]) == (position + int(tiles.num_rows[t]) - 1) // 16 + 1
    tiles, items = plan.wide
    num_items = int(items.shares.first_item[-1])
    _, first = np.unique(np.asarray(items.tile)[:num_items], return_index=True)
    assert len(first) == int(tiles.num_tiles)
    for item, position in zip(first, np.asarray(tiles.position), strict=False):
        assert int(items.first_key[item]) == _first_key(int(position), window) // 16 * 16


def _first_key(position, window):
    return 0 if window is None else max(position - window + 1, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_shares_have_all_items_of_whole_tiles_and_about_equally_many(counts):
    ends = np.cumsum(counts)
    begins = ends - counts
    shares = share_items(jnp.asarray(begins, jnp.int32), jnp.int32(ends[-1]))
    first_item, first_tile = (np.asarray(x).tolist() for x in shares)
    assert first_item[0] == first_tile[0] == 0 and first_item[-1] == ends[-1]
    assert first_item == sorted(first_item)
    tiles = [*first_tile, len(counts)]
    for share, (first, end) in enumerate(pairwise(first_item)):
        assert sum(counts[tiles[share] : tiles[share + 1]]) == end - first
        assert end - first <= -(-ends[-1] // len(first_tile)) + max(counts)


@pytest.mark.parametrize("num_rows", [1, 7, 15, 16, 17, 40])
@pytest.mark.parametrize("window", [None, 100])
def test_groups_read_every_block_that_their_rows_see_once(num_rows, window):
    kv_lens = np.random.default_rng(num_rows).integers(0, 600, num_rows)
    tables = np.arange(1, num_rows * 40 + 1, dtype=np.int32).reshape(num_rows, 40)
    cu_q_lens = np.arange(num_rows + 1)
    index = (jnp.asarray(x) for x in (kv_lens, tables, cu_q_lens, np.int32(num_rows)))
    groups = plan_attention(
        num_rows, *index, num_blocks=num_rows * 40 + 1, block_size=16, window=window
    ).single
    seq, rank = np.asarray(groups.start), np.asarray(groups.rank)
    size, num_items = seq.shape[1], int(groups.num_items)
    per_item = groups.blocks.shape[2]
    trips = []
    for row in range(num_rows):
        g, place = divmod(int(rank[row]), size)
        assert seq[g, place] == row and int(groups.position[g, place]) == kv_lens[row] - 1
        items = [i for i in range(num_items) if int(groups.group[i]) == g]
        first = _first_key(int(kv_lens[row]) - 1, window) // 16
        end = (int(kv_lens[row]) + 15) // 16
        got = [int(b) for i in items for b in groups.blocks[i, place]]
        assert got[: end - first] == tables[row, first:end].tolist() and not any(got[end - first :])
        for k, i in enumerate(items):
            assert int(groups.first_key[i, place]) == (first + k * per_item) * 16
        trips.append((int(rank[row]), -(-(end - first) // per_item)))
    chunks = [n for _, n in sorted(trips)]
    assert chunks == sorted(chunks, reverse=True)
    assert num_items == sum(chunks[::size])


def test_an_item_is_shared_if_all_rows_that_have_blocks_there_have_the_same():
    tables = np.arange(1, 4 * 20 + 1, dtype=np.int32).reshape(4, 20)
    tables[:, :12] = tables[0, :12]  # in chunks of 12 blocks, 192 tokens
    for kv_lens, shared in (
        ([320, 300, 310, 0], [True, False]),
        ([320, 192, 191, 1], [True, True]),
        ([193, 192, 190, 1], [True, True]),
        ([300, 193, 1, 1], [True, False]),
        ([0, 0, 0, 0], []),
    ):
        kv_lens = jnp.asarray(kv_lens, jnp.int32)
        index = kv_lens, jnp.asarray(tables), jnp.arange(5), jnp.int32(4)
        groups = plan_attention(4, *index, num_blocks=81, block_size=16, window=None).single
        assert groups.blocks.shape[1:] == (4, 12)
        assert np.asarray(groups.is_shared)[: int(groups.num_items)].tolist() == shared
