"""What each kind of KV-cache group answers, against what its queries read, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax import ConfigError, FullAttention, SlidingWindow
from paged_jax.kv_group import (
    attention_group,
    blocks_to_admit,
    first_live_blocks,
    key_group,
    longest_start,
    max_new_blocks,
    releasing_groups,
)

SIZE, COLUMNS = 4, 7
WINDOWS = [None, 1, 3, 4, 6, 9]


def read_by(window, position):
    """The positions that the query at `position` reads."""
    return range(0 if window is None else max(position - window + 1, 0), position + 1)


def live_blocks(window, num_computed, num_tokens):
    """Blocks that the queries from `num_computed` to `num_tokens` - 1 read or write."""
    read = {p for q in range(num_computed, num_tokens) for p in read_by(window, q)}
    return {position // SIZE for position in read}


@pytest.mark.parametrize("window", WINDOWS)
def test_the_first_live_block_is_the_first_that_a_later_query_reads(window):
    group = attention_group(window)
    for computed in range(30):
        low = int(group.first_live_block(jnp.int32(computed), SIZE))
        assert low == min(live_blocks(window, computed, 40))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("max_chunk", [1, 3, 8])
def test_blocks_to_admit_hold_a_sequence_in_any_chunks(window, max_chunk):
    """Never fewer than a chunk anywhere reads and writes; the whole where all of it is kept."""
    group = attention_group(window)
    for total in range(1, 30):
        bound = group.blocks_to_admit(total, max_chunk, SIZE)
        assert bound == int(group.blocks_to_admit(jnp.int32(total), max_chunk, SIZE))
        assert bound <= -(-total // SIZE)
        for start in range(total):
            end = min(start + max_chunk, total)
            assert len(live_blocks(window, start, end)) <= bound
        if group.allocates_whole:
            assert bound == -(-total // SIZE) and group.tokens_at_admission(total, 1) == total
        else:
            assert group.tokens_at_admission(total, 1) == 1


@pytest.mark.parametrize("window", WINDOWS)
def test_a_step_never_needs_more_new_blocks_than_the_bound(window):
    """Rows that are admitted (whole, where a group allocates whole) and compute any share."""
    group, rng = attention_group(window), np.random.default_rng(0)
    for _ in range(300):
        width, rows = int(rng.integers(1, 20)), int(rng.integers(1, 6))
        take = rng.multinomial(width, [1 / rows] * rows)
        needed = 0
        for count in take.tolist():
            computed = int(rng.integers(0, 20))
            total = computed + count if group.allocates_whole else 0
            have = -(-max(computed, total - 1) // SIZE)  # the last token may be new
            needed += max(-(-(computed + count) // SIZE) - have, 0)
        assert needed <= max_new_blocks((group,), width, rows, SIZE)


start = jax.jit(longest_start, static_argnums=(0, 4))


@settings(max_examples=150, deadline=None)
@given(
    which=st.sampled_from([(None,), (3,), (None, 6), (6, None, 1)]),
    seed=st.integers(0, 2**16),
    total=st.integers(1, COLUMNS * SIZE),
)
def test_the_longest_start_is_the_longest_that_every_group_can_compute_from(which, seed, total):
    groups = tuple(attention_group(window) for window in which)
    is_cached = np.random.default_rng(seed).random((len(which), COLUMNS)) < 0.8
    most = total // SIZE

    def can_start(count):
        computed = min(count * SIZE, total - 1)
        needed = [live_blocks(window, computed, total) & set(range(count)) for window in which]
        return all(is_cached[g, b] for g, blocks in enumerate(needed) for b in blocks)

    count, low = start(groups, jnp.asarray(is_cached), jnp.int32(total), jnp.int32(most), SIZE)
    assert int(count) == max(c for c in range(most + 1) if can_start(c))
    computed = min(int(count) * SIZE, total - 1)
    expected = [int(g.first_live_block(jnp.int32(computed), SIZE)) for g in groups]
    assert low.tolist() == expected


def test_groups_together():
    groups = (SlidingWindow(window=6), FullAttention(2), FullAttention(1))
    assert key_group(groups) == 1 and key_group(groups[:1]) == 0
    assert releasing_groups(groups) == (0,) and releasing_groups(groups[1:]) == ()
    assert blocks_to_admit(groups, 20, 7, SIZE) == 4 + 5 + 5
    assert first_live_blocks(groups, jnp.asarray([9, 10]), SIZE).tolist() == [
        [1, 1],
        [0, 0],
        [0, 0],
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SlidingWindow(window=0), "window=0: must be at least 1"),
        (lambda: SlidingWindow(window=None), "window=None: an int is needed"),
        (lambda: FullAttention(-1), "num_layers=-1: must be at least 0"),
        (lambda: FullAttention("two"), "num_layers='two': an int is needed"),
    ],
)
def test_what_is_no_group_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
