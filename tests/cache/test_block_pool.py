"""The pool: blocks are handed out from the head of one queue, and come back at its head or its
tail, order kept exactly.
"""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from paged_jax.cache import block_pool
from paged_jax.cache.block_pool import free_queue, init_pool
from paged_jax.errors import ConfigError
from plain_cache import PlainPool

SIZE, WIDTH, ROWS, COLUMNS = (
    14,
    5,
    3,
    4,
)  # of most pools and calls here: each other shape compiles anew

release = jax.jit(block_pool.release)
touch = jax.jit(block_pool.touch)


@partial(jax.jit, static_argnums=2)
def pop(pool, count, max_count):
    """Take blocks, whatever stands at the head."""
    return block_pool.pop_head(block_pool.compact_head(pool, count, max_count), count, max_count)


def add(pool, blocks, times=1):
    return touch(
        pool, np.asarray(blocks + [0] * (COLUMNS - len(blocks)), np.int32), np.int32(times)
    )


def remove(pool, *blocks):
    """Take free blocks out of the middle of the queue, as a prefix hit does."""
    for k in range(0, len(blocks), COLUMNS):
        pool = add(pool, list(blocks[k : k + COLUMNS]))
    return pool


def give(pool, rows, keep=False):
    blocks, worth = np.zeros((ROWS, COLUMNS), np.int32), np.zeros((ROWS, COLUMNS), bool)
    for row, ids in enumerate(rows):
        blocks[row, : len(ids)] = ids
        worth[row] = keep[row] if isinstance(keep, list) else keep
    return release(pool, blocks, worth)


def take(pool, count):
    pool, blocks, ok = pop(pool, np.int32(count), WIDTH)
    assert ok and not blocks[count:].any()
    return pool, blocks[:count].tolist()


def take_blocks(pool, count):
    """The first `count` blocks of the queue, in calls of one shape."""
    taken = []
    while len(taken) < count:
        pool, some = take(pool, min(count - len(taken), WIDTH))
        taken += some
    return pool, taken


def return_blocks(pool, blocks, keep=False):
    """Give back one reference of each block, in one go: the first first."""
    pieces = [blocks[k : k + COLUMNS][::-1] for k in range(0, len(blocks), COLUMNS)]
    for piece in pieces if keep else pieces[::-1]:
        pool, ok = give(pool, [piece], keep)
        assert ok
    return pool


def pool_of(*queue):
    """A pool with that queue, all other blocks in use."""
    pool, _ = take_blocks(init_pool(SIZE), SIZE - 1)
    return return_blocks(pool, queue, keep=True)


def is_sound(pool):
    """Every block is free once or in use, and the counters agree."""
    queue = free_queue(pool)
    used = [block for block in range(1, pool.num_blocks) if pool.ref_count[block] > 0]
    return sorted(queue + used) == list(range(1, pool.num_blocks)) and len(queue) == int(
        pool.num_free
    )


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# ---------------------------------------------------------------- the queue, by its numbers


def test_a_block_removed_from_the_middle_returns_at_the_tail():
    pool, first = take_blocks(pool_of(1, 2, 3, 4, 5), 1)
    assert first == [1]
    pool = return_blocks(remove(pool, 3), [3], keep=True)
    assert free_queue(pool) == [2, 4, 5, 3]
    for block in (2, 4, 5, 3):
        pool, taken = take_blocks(pool, 1)
        assert taken == [block]
    after, blocks, ok = pop(pool, np.int32(1), WIDTH)
    assert not ok and not blocks.any() and same(pool, after)


@pytest.mark.parametrize(
    ("keep", "orders"),
    [
        (True, ([], [1], [1, 5, 6], [1, 5, 6, 2, 3, 4])),
        (False, ([], [1], [5, 6, 1], [2, 3, 4, 5, 6, 1])),
    ],
)
def test_blocks_worth_keeping_go_to_the_tail_and_others_to_the_head_in_the_order_given(
    keep, orders
):
    pool = pool_of()
    for blocks, order in zip(([], [1], [5, 6], [2, 3, 4]), orders, strict=True):
        pool = return_blocks(pool, blocks, keep=keep)
        assert free_queue(pool) == order
        assert int(pool.num_free) == len(order)


def test_any_number_is_taken_from_the_head_in_order():
    pool = pool_of(2, 4, 6, 5, 1, 3)
    for count, blocks in ((0, []), (1, [2]), (2, [4, 6]), (3, [5, 1, 3])):
        pool, taken = take_blocks(pool, count)
        assert taken == blocks
        assert all(int(pool.ref_count[block]) == 1 for block in blocks)
    assert int(pool.num_free) == 0


def test_a_pool_of_the_null_block_alone_is_unused_and_has_nothing_to_give():
    pool = init_pool(1)
    assert (int(pool.num_free), free_queue(pool)) == (0, [])
    _, blocks, ok = pop(pool, np.int32(1), WIDTH)
    assert not ok and not blocks.any()
    _, _, ok = pop(pool, np.int32(0), WIDTH)
    assert ok


def test_too_many_are_refused_by_their_count_and_nothing_is_taken():
    pool = pool_of(7, 9)
    after, blocks, ok = pop(pool, np.int32(3), WIDTH)
    assert not ok and not blocks.any() and same(pool, after)
    after, _, ok = pop(init_pool(SIZE), np.int32(6), WIDTH)  # free, but wider than the call
    assert not ok and same(init_pool(SIZE), after)


def test_a_double_free_is_not_ok_and_changes_nothing():
    pool = pool_of(2, 4, 5)
    for rows in (
        [[6, 0, 1], [6, 0, 1]],
        [[1, 0], [1, 0]],
        [[2]],
        [[3, 2]],
        [[2, 3]],
    ):  # one reference too many, beside one that is there
        after, ok = give(pool, rows)
        assert not ok and same(pool, after)


def test_a_pool_needs_its_null_block():
    with pytest.raises(ConfigError, match="num_blocks=0"):
        init_pool(0)


# ---------------------------------------------------------------- references


def test_a_shared_block_is_queued_when_its_last_reference_goes():
    pool = add(pool_of(2, 3), [1], 2)
    for references in (2, 1):
        pool, ok = give(pool, [[1]])
        assert ok and int(pool.ref_count[1]) == references and free_queue(pool) == [2, 3]
    pool, ok = give(pool, [[1]])
    assert ok and free_queue(pool) == [1, 2, 3]


def test_touching_nothing_or_no_times_changes_nothing():
    pool = remove(
        init_pool(SIZE), *range(2, 13)
    )  # so many dead entries that a touch would compact first
    assert same(pool, add(pool, []))
    assert same(pool, add(pool, [2, 3, 13], 0))
    assert not same(pool, add(pool, [13]))


@pytest.mark.parametrize(
    ("keep", "order"), [(True, [7, 8, 9, 3, 5, 4, 2, 6, 1]), (False, [6, 1, 5, 4, 2, 3, 7, 8, 9])]
)
def test_rows_released_together_queue_as_if_one_after_another(keep, order):
    """Three rows share block 1 and two of them block 2; the last holder of each decides where it
    stands.
    """
    rows = [[1, 2, 3, 0], [1, 2, 4, 5], [1, 6, 0, 0]]
    pool = add(add(pool_of(7, 8, 9), [1], 2), [2])
    together, ok = give(pool, rows, keep)
    single = pool
    for row in rows:
        single, _ = give(single, [row], keep)
    assert ok and free_queue(together) == free_queue(single) == order
    assert not together.ref_count[1:7].any()


def test_the_last_holder_says_whether_a_block_is_worth_keeping():
    pool = add(pool_of(2, 3), [1])
    for keep, order in (([False, True], [2, 3, 1]), ([True, False], [1, 2, 3])):
        after, _ = give(pool, [[1], [1]], keep)
        assert free_queue(after) == order


# ---------------------------------------- dead entries, wrap-around, compaction


def test_pop_passes_more_dead_entries_than_its_window_holds():
    pool = remove(init_pool(SIZE), *range(2, 11))
    pool, blocks = take(pool, 2)  # 1, nine dead entries, 11; the call sees five at once
    assert blocks == [1, 11]
    pool, blocks = take(pool, 2)
    assert blocks == [12, 13] and int(pool.num_free) == 0 and is_sound(pool)


def test_what_stands_behind_the_last_block_popped_keeps_its_place():
    pool = remove(init_pool(SIZE), 2, 3, 4, 6, 8, 9)
    pool, blocks = take(pool, 3)  # the window that finds 7 also sees 10
    assert blocks == [1, 5, 7]
    assert free_queue(pool) == [10, 11, 12, 13] and is_sound(pool)


def test_a_head_is_ready_where_its_first_entries_live():
    ready = jax.jit(block_pool.is_head_live, static_argnums=2)
    pool = init_pool(SIZE)
    assert ready(pool, np.int32(WIDTH), WIDTH)
    pool = remove(pool, 3)
    assert ready(pool, np.int32(2), WIDTH) and not ready(pool, np.int32(3), WIDTH)
    assert not ready(pool_of(1, 2), np.int32(3), WIDTH)  # more than there are


def test_the_ring_wraps_round_many_times():
    pool, plain = init_pool(SIZE), PlainPool(SIZE)
    for k in range(120):
        count, keep = k % 4 + 1, k // 40 != 1
        pool, blocks = take(pool, count)
        assert blocks == plain.pop(count)
        pool, _ = give(pool, [blocks], keep)
        plain.release(blocks, [keep] * count)
        assert free_queue(pool) == plain.queue


@pytest.mark.parametrize("keep", [True, False])
def test_touching_and_returning_for_ever_never_overflows_the_ring(keep):
    pool, plain = init_pool(SIZE), PlainPool(SIZE)
    for k in range(100):  # the head stands or moves backward, so only compaction makes room
        blocks = [2 + (k + j) % 11 for j in range(k % 4 + 1)]
        pool = remove(pool, *blocks)
        assert int(pool.span) < 2 * SIZE
        pool, _ = give(pool, [blocks], keep)
        plain.touch(blocks)
        plain.release(blocks, [keep] * len(blocks))
        assert free_queue(pool) == plain.queue and is_sound(pool)


class AgainstPlainPool(RuleBasedStateMachine):
    """Random operations on 13 blocks, against a list."""

    def __init__(self):
        super().__init__()
        self.pool, self.plain = init_pool(SIZE), PlainPool(SIZE)

    def compare(self):
        pool = self.pool = jax.device_get(self.pool)
        positions = (pool.head + np.arange(pool.span)) % len(pool.ring)
        ids = pool.ring[positions]
        assert ids[pool.stamp[ids] == positions].tolist() == self.plain.queue
        assert pool.ref_count[1:].tolist() == self.plain.ref_count[1:]
        assert (pool.num_free, pool.ref_count[0]) == (len(self.plain.queue), 0)
        assert pool.span < len(pool.ring)

    @rule(count=st.integers(0, WIDTH))
    def pop(self, count):
        self.pool, blocks, ok = pop(self.pool, np.int32(count), WIDTH)
        expected = self.plain.pop(count)
        assert bool(ok) == (expected is not None)
        assert blocks.tolist() == (expected or []) + [0] * (WIDTH - len(expected or []))
        self.compare()

    @rule(
        blocks=st.lists(st.integers(1, SIZE - 1), max_size=4, unique=True), times=st.integers(0, 2)
    )
    def touch(self, blocks, times):
        self.pool = add(self.pool, blocks, times)
        self.plain.touch(blocks, times)
        self.compare()

    @precondition(lambda self: any(self.plain.ref_count))
    @rule(
        data=st.data(),
        keep=st.lists(st.booleans(), min_size=ROWS * COLUMNS, max_size=ROWS * COLUMNS),
    )
    def release(self, data, keep):
        """A block has one column, and stands there in up to as many rows as it has references."""
        left = list(self.plain.ref_count)
        rows = np.zeros((ROWS, COLUMNS), np.int32)
        for row, column in np.ndindex(*rows.shape):
            here = [b for b in range(1, SIZE) if left[b] > 0 and b % COLUMNS == column]
            rows[row, column] = data.draw(st.sampled_from([0, *here]))
            left[rows[row, column]] -= 1
        keep = np.asarray(keep).reshape(rows.shape)
        self.pool, ok = release(self.pool, rows, keep)
        assert ok
        for blocks, worth in zip(rows.tolist(), keep.tolist(), strict=True):
            self.plain.release(blocks, worth)
        self.compare()


TestAgainstPlainPool = pytest.mark.usefixtures("no_annotation_checks")(AgainstPlainPool.TestCase)
TestAgainstPlainPool.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
