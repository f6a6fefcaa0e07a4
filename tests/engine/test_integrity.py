"""The checker: silent on sound states, and one spoilt number is named."""

import jax
import numpy as np
import pytest

from paged_jax import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    FullAttention,
    SamplingParams,
    SlidingWindow,
    allocate_slots,
    check_integrity,
    fork,
    init_cache,
)
from paged_jax.engine.requests import Output, make_request, to_rows
from paged_jax.engine.step import init_state
from paged_jax.scheduling import sequences
from paged_jax.scheduling.scheduler import schedule
from toy_decoder import ToyDecoder

CONFIG = CacheConfig(12, 4, 5, block_size=4, groups=(FullAttention(), SlidingWindow(window=6)))
ENGINE = EngineConfig(12, 16, max_num_seqs=2, max_num_batched_tokens=8, num_rows=4, block_size=4)
MODEL = ToyDecoder(vocab_size=9)


@pytest.fixture(scope="module")
def cache():
    """Row 0 holds [1 2] and [3 4], row 2 shares them; 5 to 11 are free."""
    cache, _ = allocate_slots(init_cache(CONFIG), 0, 7)
    cache, _ = fork(cache, 0, 2)
    return jax.tree.map(np.array, cache)


@pytest.fixture(scope="module")
def engine():
    """Rows 0 and 3 run with 5 and 3 tokens computed, row 1 waits, row 2 is empty."""
    state = init_state(ENGINE, MODEL)
    for row, length in ((0, 6), (3, 3), (1, 4)):
        params = SamplingParams(temperature=0, max_tokens=5)
        sizes = dict(config=ENGINE, cache_config=state.cache.config)
        request = make_request("", [1] * length, params, vocab_size=9, eos_token_ids=(), **sizes)
        state = state.replace(
            seqs=jax.jit(sequences.add)(state.seqs, to_rows({row: Output(request, 0)}, ENGINE))
        )
    plan, kv = jax.jit(schedule)(state.cache, state.seqs, np.int32(8))
    seqs = plan.seqs.replace(num_computed=np.asarray([5, 0, 0, 3], np.int32))
    state = state.replace(cache=plan.cache.replace(kv=kv), seqs=seqs)
    return jax.tree.map(np.array, state)


def spoil(state, path, *changes):
    """A copy in which the array at `path` has other values at some places."""
    first, _, rest = path.partition(".")
    old = getattr(state, first)
    if rest:
        return state.replace(**{first: spoil(old, rest, *changes)})
    new = np.array(old)
    for index, value in changes:
        new[index] = value
    return state.replace(**{first: new})


def test_sound_states_have_no_faults(cache, engine):
    assert check_integrity(init_cache(CONFIG)) == []
    assert check_integrity(cache) == []
    assert check_integrity(init_state(ENGINE, MODEL)) == []
    assert check_integrity(engine) == []
    finished = spoil(
        engine, "seqs.status", (3, sequences.FINISHED)
    )  # keeps its place until the next step begins
    assert check_integrity(finished) == []


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        ("pool.stamp", [(7, -1)], "block 7: lost: neither free nor in use"),
        ("pool.stamp", [(7, -1)], "queue: 6 live entries, num_free says 7"),
        ("pool.num_free", [((), 6)], "queue: 7 live entries, num_free says 6"),
        ("pool.head", [((), 24)], "queue: head 24, span 7, 7 free do not fit a ring of 24"),
        ("pool.span", [((), 25)], "queue: head 4, span 25, 7 free do not fit a ring of 24"),
        ("pool.ring", [(4, 0)], "block 5: lost: neither free nor in use"),
        ("pool.ref_count", [(5, 1)], "block 5: free, but its reference count is 1"),
        ("pool.ref_count", [(5, 1)], "block 5: reference count 1, 0 table entries name it"),
        ("pool.ref_count", [(2, 1)], "block 2: reference count 1, 2 table entries name it"),
        ("pool.ref_count", [(2, 3)], "block 2: reference count 3, 2 table entries name it"),
        ("pool.ref_count", [(2, -1)], "block 2: reference count -1, 2 table entries name it"),
        ("pool.stamp", [(2, 3)], "block 2: not in the queue, but stamped 3"),
        ("tables.blocks", [((1, 0, 1), 3)], "group 1, row 0: names a block twice"),
        (
            "tables.blocks",
            [((0, 2, 3), 9)],
            "group 0, row 2: entries past its 2 blocks are not null",
        ),
        (
            "tables.blocks",
            [((0, 1, 0), 9)],
            "group 0, row 1: entries past its 0 blocks are not null",
        ),
        ("tables.blocks", [((0, 0, 1), 12)], "tables: name blocks outside 0 to 11"),
        ("tables.blocks", [((0, 0, 1), -1)], "tables: name blocks outside 0 to 11"),
        ("tables.num_blocks", [((0, 0), 6)], "group 0, row 0: 6 blocks in a table of 5"),
        (
            "tables.num_blocks",
            [((1, 0), 1)],
            "group 1, row 0: entries past its 1 blocks are not null",
        ),
        ("tables.num_tokens", [(0, 4)], "group 0, row 0: 2 blocks, but it asked for 4 tokens"),
    ],
)
def test_a_spoilt_cache_is_named(cache, path, changes, says):
    faults = check_integrity(spoil(cache, path, *changes))
    assert says in faults


def test_a_block_that_is_free_and_in_use_is_named(cache):
    """As after a release that forgot another row's reference: queued again at the head."""
    head = int(cache.pool.head) - 1
    pool = spoil(spoil(cache.pool, "ring", (head, 2)), "stamp", (2, head))
    pool = pool.replace(head=np.int32(head), span=pool.span + 1, num_free=pool.num_free + 1)
    assert check_integrity(cache.replace(pool=pool)) == [
        "block 2: free, but its reference count is 2"
    ]


def test_the_null_block_in_the_queue_is_named(cache):
    head = int(cache.pool.head)
    pool = spoil(spoil(spoil(cache.pool, "ring", (head, 0)), "stamp", (0, head)), "stamp", (5, -1))
    faults = check_integrity(cache.replace(pool=pool))
    assert faults == ["queue: holds the null block", "block 5: lost: neither free nor in use"]


def test_nulls_where_a_window_has_passed_are_sound(cache):
    passed = spoil(cache, "tables.blocks", ((1, 0, 0), 0), ((1, 0, 1), 0))
    passed = spoil(passed, "pool.ref_count", (3, 1), (4, 1))
    assert check_integrity(passed) == []


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        ("seqs.running", [(1, 0)], "running: a row stands there twice: [0, 0]"),
        ("seqs.running", [(1, 0)], "row 3: status 2, running False, waiting False"),
        ("seqs.waiting.rows", [(2, 3)], "row 3: status 2, running True, waiting True"),
        ("seqs.waiting.rows", [(2, 3)], "row 1: status 1, running False, waiting False"),
        ("seqs.waiting.count", [((), 2)], "row 0: status 2, running True, waiting True"),
        ("seqs.waiting.count", [((), 0)], "row 1: status 1, running False, waiting False"),
        ("seqs.num_running", [((), 1)], "row 3: does not run, but has blocks"),
        ("seqs.status", [(0, sequences.WAITING)], "row 0: status 1, running True, waiting False"),
        ("seqs.status", [(1, sequences.FINISHED)], "row 1: status 3, running False, waiting True"),
        ("seqs.status", [(2, sequences.RUNNING)], "row 2: status 2, running False, waiting False"),
        ("seqs.num_computed", [(3, 5)], "group 0, row 3: 1 blocks hold 5 computed tokens"),
        ("seqs.num_computed", [(3, 5)], "row 3: 5 of 3 tokens computed"),
        ("seqs.num_computed", [(0, -1)], "row 0: -1 of 6 tokens computed"),
        (
            "cache.tables.num_blocks",
            [((0, 0), 1)],
            "group 0, row 0: 1 blocks hold 5 computed tokens",
        ),
        (
            "cache.tables.num_tokens",
            [(0, 4)],
            "group 0, row 0: 2 blocks, but it asked for 4 tokens",
        ),
    ],
)
def test_a_spoilt_engine_is_named(engine, path, changes, says):
    assert says in check_integrity(spoil(engine, path, *changes))


def test_a_row_that_waits_twice_is_named(engine):
    twice = spoil(spoil(engine, "seqs.waiting.rows", (3, 1)), "seqs.waiting.count", ((), 2))
    assert check_integrity(twice) == ["waiting: a row stands there twice: [1, 1]"]


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("wrong", [None, {}, CONFIG], ids=str)
def test_what_is_no_state_is_refused(wrong):
    with pytest.raises(ConfigError, match="state="):
        check_integrity(wrong)


def test_a_cache_of_more_slots_than_ids_is_refused():
    for sizes in ((2**17, 2, 1), (2, 2, 2**17)):
        with pytest.raises(ConfigError, match="=131072: of 32768 tokens each"):
            CacheConfig(*sizes, block_size=2**15)
