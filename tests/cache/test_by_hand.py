"""Allocate, fork, free: blocks on demand, all rows or none, in an order that can be named block by
block.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import (
    CacheConfig,
    ConfigError,
    allocate_slots,
    check_integrity,
    fork,
    free,
    init_cache,
    kv_group,
)
from paged_jax.cache import by_hand, paged_cache
from paged_jax.cache.block_pool import free_queue
from paged_jax.kv_group import FullAttention, SlidingWindow, attention_group
from plain_cache import PlainCache, books, plain_books

# Few configs: each compiles anew.
FULL = CacheConfig(num_blocks=11, num_rows=6, max_blocks_per_row=8, block_size=4)
TINY = CacheConfig(num_blocks=5, num_rows=2, max_blocks_per_row=16, block_size=4)
BOTH = CacheConfig(
    num_blocks=21,
    num_rows=5,
    max_blocks_per_row=8,
    block_size=4,
    groups=(FullAttention(), SlidingWindow(window=6)),
)


def table(cache, row, group=0):
    return cache.tables.blocks[group, row, : int(cache.tables.num_blocks[group, row])].tolist()


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def give(cache, rows, new, **options):
    cache, ok = allocate_slots(cache, rows, new, **options)
    assert ok and check_integrity(cache) == []
    return cache


# ---------------------------------------------------------------- allocate


def test_a_block_is_given_only_when_the_last_is_full():
    cache = give(init_cache(FULL), 0, 14)
    assert table(cache, 0) == [1, 2, 3, 4]
    cache = give(cache, 0, 2)  # 16
    assert table(cache, 0) == [1, 2, 3, 4]
    cache = give(cache, 0, 5)  # 21
    assert table(cache, 0) == [1, 2, 3, 4, 5, 6]


def test_one_token_at_a_time_takes_every_block_size_th_a_block():
    cache, sizes = give(init_cache(FULL), 0, 4), []
    for _ in range(9):
        cache = give(cache, 0, 1)
        sizes.append(table(cache, 0))
    assert sizes == [[1, 2]] * 4 + [[1, 2, 3]] * 4 + [[1, 2, 3, 4]]


def test_freed_blocks_come_back_last_block_first():
    cache = give(init_cache(TINY), 0, 10)
    assert table(cache, 0) == [1, 2, 3]
    cache, ok = free(cache, 0)
    assert ok and free_queue(cache.pool) == [3, 2, 1, 4]
    cache = give(cache, 1, 16)
    assert table(cache, 1) == [3, 2, 1, 4]
    after, ok = allocate_slots(cache, 1, 4)
    assert not ok and equal(cache, after)


def test_several_rows_are_served_in_the_order_named():
    cache = give(init_cache(FULL), [4, 0, 2], [9, 1, 5])
    assert [table(cache, row) for row in (4, 0, 2)] == [[1, 2, 3], [4], [5, 6]]
    cache = give(cache, [0, 2, 4], [5, 3, 4])
    assert [table(cache, row) for row in (4, 0, 2)] == [[1, 2, 3, 8], [4, 7], [5, 6]]
    assert cache.tables.num_tokens.tolist() == [6, 0, 8, 0, 13, 0]


def test_one_count_serves_all_rows():
    assert equal(give(init_cache(FULL), [1, 2, 3], 5), give(init_cache(FULL), [1, 2, 3], [5, 5, 5]))


def test_rows_that_do_not_fit_together_change_nothing():
    cache = give(init_cache(FULL), [0, 1, 2], [8, 8, 8])  # 6 of 10
    after, ok = allocate_slots(cache, [0, 1, 3], [8, 8, 1])  # 2 + 2 + 1
    assert not ok and equal(cache, after)
    assert free_queue(give(cache, [0, 1, 3], [8, 4, 1]).pool) == []


def test_a_row_longer_than_its_table_changes_nothing():
    cache = give(init_cache(FULL), [0, 1], [32, 3])  # 8 blocks are the table's width
    after, ok = allocate_slots(cache, [0, 1], [1, 1])
    assert not ok and equal(cache, after)


def test_reserved_blocks_stay_free():
    cache = init_cache(FULL)
    after, ok = allocate_slots(cache, 0, 8, reserved_blocks=9)
    assert not ok and equal(cache, after)
    assert table(give(cache, 0, 8, reserved_blocks=8), 0) == [1, 2]


def test_tokens_that_must_fit_are_counted_but_not_allocated():
    cache = init_cache(TINY)
    after, ok = allocate_slots(cache, 0, 4, must_fit_tokens=64)
    assert not ok and equal(cache, after)
    assert table(give(cache, 0, 4), 0) == [1]
    assert table(give(cache, 0, 4, must_fit_tokens=16), 0) == [1]
    after, ok = allocate_slots(cache, [0, 1], 4, must_fit_tokens=jnp.asarray([9, 8]))  # 3 + 2
    assert not ok and equal(cache, after)
    give(cache, [0, 1], 4, must_fit_tokens=jnp.asarray([8, 8]))


def test_groups_are_served_row_by_row_and_within_a_row_group_by_group():
    cache = give(init_cache(BOTH), [3, 1], [9, 5])
    assert [table(cache, 3, g) for g in (0, 1)] == [[1, 2, 3], [4, 5, 6]]
    assert [table(cache, 1, g) for g in (0, 1)] == [[7, 8], [9, 10]]
    cache, ok = free(cache, [3, 1])
    assert ok and free_queue(cache.pool) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, *range(11, 21)]


def test_both_groups_must_fit():
    cache = give(init_cache(BOTH), [0, 1], [32, 4])  # 16 + 2 of 20
    after, ok = allocate_slots(cache, [1, 2], [1, 1])
    assert not ok and equal(cache, after)
    give(cache, 2, 4)


# ---------------------------------------------------------------- fork and free


def test_a_fork_shares_every_block_the_partly_filled_last_one_too():
    cache = give(init_cache(BOTH), 2, 7)
    cache, ok = fork(cache, 2, [0, 4])
    assert ok and check_integrity(cache) == []
    for row in (0, 2, 4):
        assert [table(cache, row, g) for g in (0, 1)] == [[1, 2], [3, 4]]
    assert cache.pool.ref_count[1:6].tolist() == [3, 3, 3, 3, 0]
    assert cache.tables.num_tokens.tolist() == [7, 0, 7, 0, 7]
    assert int(cache.pool.num_free) == 16


@pytest.mark.parametrize("children", [[1], [3, 1], [0], [3, 0]])
def test_a_fork_onto_a_row_in_use_or_onto_itself_changes_nothing(children):
    cache = give(init_cache(FULL), [0, 1], [5, 1])
    after, ok = fork(cache, 0, children)
    assert not ok and equal(cache, after)


def test_a_refused_fork_changes_nothing_where_the_table_is_wider_than_the_pool():
    cache = give(init_cache(TINY), [0, 1], 4)
    after, ok = fork(cache, 0, 1)
    assert not ok and equal(cache, after)


def test_a_fork_of_an_empty_row_is_empty():
    cache, ok = fork(init_cache(FULL), 0, [1, 2])
    assert ok and equal(cache, init_cache(FULL))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_forked_rows_freed_in_one_call_are_freed_as_if_one_after_another(order):
    cache = give(init_cache(FULL), 0, 8)
    cache, _ = fork(cache, 0, [1, 2])
    cache = give(cache, [1, 2], [3, 6])  # [1 2 3] and [1 2 4 5]
    plain = PlainCache(11, 6, 8, 4, (None,))
    assert plain.allocate([0], [8]) and plain.fork(0, [1, 2]) and plain.allocate([1, 2], [3, 6])
    cache, ok = free(cache, order)
    plain.free(order)
    assert ok and books(jax.device_get(cache)) == plain_books(plain)
    assert free_queue(cache.pool)[-5:] == [6, 7, 8, 9, 10]


def test_more_rows_than_one_pass_releases_are_freed_in_order():
    cache = give(init_cache(FULL), list(range(6)), [8, 1, 1, 5, 4, 8])
    assert [table(cache, row) for row in range(6)] == [[1, 2], [3], [4], [5, 6], [7], [8, 9]]
    cache, ok = free(cache, [5, 0, 4, 1, 3, 2])
    assert ok and free_queue(cache.pool) == [4, 6, 5, 3, 7, 2, 1, 9, 8, 10]
    assert (
        not cache.tables.blocks.any()
        and not cache.tables.num_blocks.any()
        and not cache.tables.num_tokens.any()
    )


def test_freeing_an_empty_row_is_no_operation():
    cache = give(init_cache(FULL), [0, 1], [5, 1])
    after, ok = free(cache, [3])
    assert ok and equal(cache, after)
    assert equal(free(cache, [3, 1, 4])[0], free(cache, [1])[0])


def test_a_block_freed_more_often_than_held_frees_nothing():
    cache = give(init_cache(FULL), list(range(6)), [4] * 6)
    ref_count = cache.pool.ref_count.at[table(cache, 5)[0]].set(
        0
    )  # the last row, released in the second pass
    broken = cache.replace(pool=cache.pool.replace(ref_count=ref_count))
    after, ok = free(broken, list(range(6)))
    assert not ok and equal(broken, after)


@pytest.mark.parametrize("rows", [[-1], [6], [0, 6], [2, 2], [1, 3, 1]])
def test_rows_outside_the_table_or_named_twice_are_refused(rows):
    cache = init_cache(FULL)
    calls = (
        partial(allocate_slots, cache, rows, 1),
        partial(fork, cache, 4, rows),
        partial(free, cache, rows),
    )
    for call in calls:
        with pytest.raises(ConfigError) as error:
            call()
        assert f"rows={rows}" in str(error.value)


def test_a_parent_outside_the_table_is_refused():
    with pytest.raises(ConfigError, match=r"rows=\[6\]"):
        fork(init_cache(FULL), 6, [1])


@pytest.mark.parametrize(
    ("new", "says"), [(0, r"\[0\]"), ([3, 0], r"\[3, 0\]"), ([1, -2], r"\[1, -2\]")]
)
def test_a_row_must_ask_for_at_least_one_token(new, says):
    with pytest.raises(ConfigError, match=f"num_new_tokens={says}: must be at least 1"):
        allocate_slots(init_cache(FULL), [0, 1], new)


def test_counts_of_another_number_than_the_rows_are_refused():
    with pytest.raises(ConfigError, match=r"num_new_tokens: shape \(3,\) for 2 rows"):
        allocate_slots(init_cache(FULL), [0, 1], [1, 2, 3])


WRONG = [None, "a", 1.5, True, [], [[1]], [[0], [1, 2]], 2**40, np.array([2**32])]


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("value", WRONG, ids=str)
def test_what_is_no_row_is_refused_before_anything_is_cast(value):
    cache = init_cache(FULL)
    for call in (
        lambda: allocate_slots(cache, value, 1),
        lambda: fork(cache, value, [1]),
        lambda: fork(cache, 1, value),
        lambda: free(cache, value),
    ):
        with pytest.raises(ConfigError, match="rows="):
            call()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_counts_of_any_integer_dtype_are_taken(dtype):
    cache = give(init_cache(FULL), np.array([0, 1], dtype), np.array([5, 9], dtype))
    assert cache.tables.num_tokens[:2].tolist() == [5, 9]


@pytest.mark.usefixtures("no_annotation_checks")
def test_counts_that_no_pool_has_do_not_wrap():
    cache = init_cache(FULL)
    for most in (2**31 - 3, 2**31 - 1, 2**32 + 1, 2**40):
        for counts in (
            dict(num_new_tokens=most),
            dict(num_new_tokens=5, must_fit_tokens=np.array([most])),
        ):
            after, ok = allocate_slots(cache, 0, **counts)
            assert not ok and equal(cache, after)
    for name in ("num_new_tokens", "reserved_blocks", "must_fit_tokens"):
        with pytest.raises(ConfigError, match=name):
            allocate_slots(cache, 0, **({"num_new_tokens": 1} | {name: 1.5}))
        with pytest.raises(ConfigError, match=name):
            allocate_slots(cache, 0, **({"num_new_tokens": 1} | {name: -5}))


def test_traced_rows_and_counts_are_not_ok_where_concrete_ones_are_refused():
    cache = init_cache(FULL)
    allocate = jax.jit(
        lambda rows, new, free: allocate_slots(cache, rows, new, reserved_blocks=free)
    )
    assert allocate(np.array([0, 1]), np.array([1, 1]), np.int32(0))[1]
    for rows, new in (([1, 1], [1, 1]), ([0, 1], [1, 0]), ([0, 1], [1, 2**31 - 1])):
        after, ok = allocate(np.array(rows), np.array(new), np.int32(0))
        assert not ok and equal(cache, after)
    usable = FULL.num_blocks - 1
    both = np.array([0, 1]), np.full(2, FULL.max_blocks_per_row * FULL.block_size)
    if 2 * FULL.max_blocks_per_row > usable:
        assert not allocate(*both, np.int32(-9))[1], "what is reserved is never less than nothing"
    children = jax.jit(lambda rows: fork(cache, 0, rows))
    assert children(np.array([1, 2]))[1] and not children(np.array([1, 1]))[1]


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("cache", [None, 3, FULL], ids=str)
def test_what_is_no_cache_is_refused(cache):
    for call in (
        lambda: allocate_slots(cache, 0, 1),
        lambda: fork(cache, 0, 1),
        lambda: free(cache, 0),
    ):
        with pytest.raises(ConfigError, match="cache="):
            call()


# ---------------------------------------------------------------- sliding windows


def test_the_first_block_that_a_window_still_sees():
    # Window 4, blocks of 2: the query at position n sees n - 3 to n.
    window = SlidingWindow(window=4)
    live = {n: int(window.first_live_block(jnp.int32(n), 2)) for n in (0, 3, 4, 5, 6, 7, 8, 11)}
    assert live == {0: 0, 3: 0, 4: 0, 5: 1, 6: 1, 7: 2, 8: 2, 11: 4}
    assert int(FullAttention().first_live_block(jnp.int32(1000), 2)) == 0


def test_blocks_below_the_window_become_null_and_are_queued_last_first():
    config = CacheConfig(
        num_blocks=12,
        num_rows=2,
        max_blocks_per_row=8,
        block_size=2,
        groups=(SlidingWindow(window=4),),
    )
    cache = give(init_cache(config), 1, 11)
    release = jax.jit(partial(paged_cache.release_passed_blocks, max_tokens=4))

    def slide(cache, before, after):
        rows = np.asarray([1, 2])  # row 2 is padding
        return release(cache, rows, np.asarray([before, 0]), np.asarray([after, 0]))

    seen = []
    for before, after in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 11)):
        cache = slide(cache, before, after)
        assert check_integrity(cache) == []
        seen.append((table(cache, 1), free_queue(cache.pool)))
    rest = [7, 8, 9, 10, 11]
    assert seen == [
        ([1, 2, 3, 4, 5, 6], rest),
        ([0, 2, 3, 4, 5, 6], [1, *rest]),
        ([0, 2, 3, 4, 5, 6], [1, *rest]),
        ([0, 0, 3, 4, 5, 6], [2, 1, *rest]),
        ([0, 0, 0, 0, 5, 6], [4, 3, 2, 1, *rest]),
    ]
    cache, ok = free(cache, 1)
    assert ok and free_queue(cache.pool) == [6, 5, 4, 3, 2, 1, *rest]


def test_full_attention_keeps_what_a_window_beside_it_passes():
    cache = give(init_cache(BOTH), 0, 14)
    rows, before, after = (jnp.asarray([n]) for n in (0, 0, 14))
    cache = paged_cache.release_passed_blocks(cache, rows, before, after, 14)
    assert [table(cache, 0, g) for g in (0, 1)] == [[1, 2, 3, 4], [0, 0, 7, 8]]
    assert free_queue(cache.pool)[:2] == [6, 5] and check_integrity(cache) == []


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(1, 2), (4, 2), (12, 6), (13, 8), (20, 9), (32, 12)]
)
def test_admission_asks_for_whole_full_groups_and_for_a_window_and_a_chunk(num_tokens, blocks):
    # Window 6 and chunks of 7 span 12 tokens, which can touch 4 blocks of 4.
    for count in (num_tokens, jnp.int32(num_tokens)):
        assert int(kv_group.blocks_to_admit(BOTH.groups, count, 7, 4)) == blocks


# ---------------------------------------- inside a program of the user's own


def test_all_work_on_traced_rows_in_a_loop():
    @jax.jit
    def program(cache, first, new):
        cache, given = allocate_slots(cache, jnp.stack([first, first + 1]), new)

        def body(k, carry):
            cache, oks = carry
            cache, ok = fork(cache, first, first + 2 + k)
            cache, more = allocate_slots(cache, first + 2 + k, 4)
            return cache, oks & ok & more

        cache, oks = jax.lax.fori_loop(0, 2, body, (cache, given))
        cache, freed = free(cache, jnp.stack([first + 1, first]))
        return cache, oks & freed

    plain = PlainCache(11, 6, 8, 4, (None,))
    plain.allocate([1, 2], [6, 9])
    for child in (3, 4):
        plain.fork(1, [child])
        plain.allocate([child], [4])
    plain.free([2, 1])
    cache, ok = program(init_cache(FULL), jnp.int32(1), jnp.asarray([6, 9]))
    assert ok and books(jax.device_get(cache)) == plain_books(plain)
    assert check_integrity(cache) == []


def test_a_repeated_traced_row_is_freed_once_and_padding_not_at_all():
    cache = give(init_cache(FULL), [0, 1, 2], [5, 9, 4])
    program = jax.jit(free)
    after, ok = program(cache, jnp.asarray([1, 6, 1, 0, 99]))
    assert ok and equal(after, free(cache, [1, 0])[0])


def test_other_values_of_the_same_shapes_do_not_trace_again():
    traces = by_hand._allocate, by_hand._fork, by_hand._free
    cache, sizes = init_cache(FULL), None
    for k in range(4):
        cache = give(cache, [k, k + 1], [1 + k, 2], reserved_blocks=k % 2, must_fit_tokens=k)
        cache, _ = fork(cache, k, k + 2)
        cache, _ = free(cache, [k, k + 1, k + 2])
        sizes = sizes or [trace._cache_size() for trace in traces]
    assert [trace._cache_size() for trace in traces] == sizes


def test_counts_that_would_overflow_and_traced_rows_outside_the_table_change_nothing():
    config = CacheConfig(num_blocks=9, num_rows=3, max_blocks_per_row=4, block_size=4)
    cache, _ = allocate_slots(init_cache(config), 0, 1)
    allocate = jax.jit(lambda cache, row, count: allocate_slots(cache, row, count))
    share = jax.jit(lambda cache, parent, child: fork(cache, parent, child))
    for after, ok in (
        allocate_slots(cache, 0, 2**31 - 1),
        allocate(cache, 3, 4),
        allocate(cache, -1, 4),
        share(cache, 0, 3),
        share(cache, 3, 1),
    ):
        assert not ok
        assert all(
            bool((a == b).all())
            for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True)
        )


# ---------------------------------------------------------------- copy on write


def with_pages(config):
    """An empty cache whose pages name their block, slot, layer and kind in every number."""
    cache = init_cache(config)
    number = iter(range(10**6))
    kv = jax.tree.map(
        lambda p: next(number) * 1e5 + jnp.arange(p.size, dtype=p.dtype).reshape(p.shape), cache.kv
    )
    return cache.replace(kv=kv)


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
@pytest.mark.parametrize(
    ("children", "writers", "copied"),
    [(1, [0], 1), (1, [0, 1], 1), (2, [1, 0], 2), (2, [2, 0, 1], 2)],
)
def test_who_writes_into_a_shared_block_copies_it_first(windows, children, writers, copied):
    """Of k writers of a block with r references all copy if r > k, all but the last if r = k; every
    layer and group.
    """
    groups = tuple(attention_group(window, 2) for window in windows)
    config = CacheConfig(40, 4, 6, block_size=4, groups=groups, num_kv_heads=1, head_dim=2)
    cache = give(with_pages(config), 0, 10)  # two full blocks and a half
    cache, ok = fork(cache, 0, list(range(1, children + 1)))
    before = jax.device_get(cache)
    after, ok = allocate_slots(cache, writers, 1)
    assert ok and check_integrity(after) == []
    assert int(before.pool.num_free - after.pool.num_free) == copied * len(groups)
    for row in range(children + 1):
        keeps = row not in writers or (len(writers) == children + 1 and row == writers[-1])
        for g in range(len(groups)):
            old, new = before.tables.blocks[g, row], np.asarray(after.tables.blocks[g, row])
            assert old[:2].tolist() == new[:2].tolist() and (old[2] == new[2]) == keeps
            for was, now in zip(jax.tree.leaves(before.kv), jax.tree.leaves(after.kv), strict=True):
                np.testing.assert_array_equal(now[new[2]], was[old[2]])
    named = np.asarray(after.tables.blocks)
    untouched = [
        block for block in range(40) if block not in named or block in before.tables.blocks
    ]
    for was, now in zip(jax.tree.leaves(before.kv), jax.tree.leaves(after.kv), strict=True):
        np.testing.assert_array_equal(np.asarray(now)[untouched], was[untouched])


def test_copies_count_among_the_blocks_that_must_fit():
    config = CacheConfig(5, 3, 4, block_size=4)
    cache = give(init_cache(config), 0, 13)
    cache, _ = fork(cache, 0, 1)
    after, ok = allocate_slots(cache, 0, 1)
    assert not ok and equal(after, cache)
    cache, _ = free(cache, 1)
    _, ok = allocate_slots(cache, 0, 1)
    assert ok, "nobody else holds it any more"


def test_a_block_that_is_full_is_never_copied():
    config = CacheConfig(20, 3, 4, block_size=4)
    cache = give(init_cache(config), 0, 8)
    cache, _ = fork(cache, 0, 1)
    cache, _ = allocate_slots(cache, [0, 1], 1)
    assert table(cache, 0) == [1, 2, 3] and table(cache, 1) == [1, 2, 4]
