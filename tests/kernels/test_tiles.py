import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.paged_attention.tiles import cut_tiles, locate_rows, max_tiles, query_lengths, tile_size

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
    return jnp.asarray(cu), jnp.asarray(kv_lens), query_lengths(T, jnp.asarray(cu), jnp.int32(len(q_lens)))


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
    assert np.asarray(rows.owned).tolist() == [True] * n + [False] * (T - n)
    start = np.asarray(tiles.start)[np.asarray(rows.tile)[:n]]
    np.testing.assert_array_equal(start + np.asarray(rows.offset)[:n], np.arange(n))
    assert (np.asarray(rows.offset)[:n] < size).all()


@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_bound_on_tiles_is_enough_and_is_reached(size):
    for num_tokens in range(1, 20):
        for seqs in (1, 2, 5):
            ones = min(seqs, num_tokens)
            most = max(sum(-(-n // size) for n in [1] * (k - 1) + [num_tokens - k + 1]) for k in range(1, ones + 1))
            assert most <= max_tiles(num_tokens, seqs, size) <= most + 1


def test_one_token_a_sequence_makes_tiles_of_one():
    assert tile_size(8, 8) == tile_size(3, 8) == 1
    assert tile_size(9, 8) > 1
