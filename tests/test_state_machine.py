"""Random sequences of every operation on the cache, against the plain model: the same blocks in the same order, always sound."""

from functools import cache as memoize
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paged_jax import allocate_slots, block_pool, cache_manager, check_integrity, fork, free, init_cache
from paged_jax.config import CacheConfig
from plain_cache import PlainCache, books, plain_books

ROWS, BLOCK_SIZE, MAX_BLOCKS = 6, 4, 7
CONFIGS = [
    CacheConfig(num_blocks, ROWS, MAX_BLOCKS, block_size=BLOCK_SIZE, windows=windows)
    for num_blocks, windows in ((14, (None,)), (13, (6,)), (31, (None, 6)))
]
APPENDED, CHILDREN = 3, 2  # rows in one call of a fixed shape


def _adopt(cache, row, blocks):
    """Let an empty row begin with blocks that others hold or that are free, as a prefix hit does."""
    count = jnp.sum(blocks[0] >= 0, dtype=jnp.int32)
    blocks = jnp.maximum(blocks, 0)
    tables = cache.tables.replace(
        blocks=cache.tables.blocks.at[:, row].set(blocks),
        num_blocks=cache.tables.num_blocks.at[:, row].set(count),
        num_tokens=cache.tables.num_tokens.at[row].set(count * BLOCK_SIZE),
    )
    return cache.replace(pool=block_pool.touch(cache.pool, blocks.ravel(), 1), tables=tables), jnp.bool(True)


def _slide(config, cache, rows, before, after):
    pool, tables = cache_manager.release_below_window(config, cache.pool, cache.tables, rows, before, after, MAX_BLOCKS)
    return cache.replace(pool=pool, tables=tables), jnp.bool(True)


@memoize
def compiled(config):
    """An empty cache, and each operation at one shape or two, so that nothing compiles again."""
    functions = {"allocate": allocate_slots, "fork": fork, "free": free, "slide": _slide}
    programs = {name: jax.jit(partial(function, config)) for name, function in functions.items()}
    return init_cache(config), programs | {"adopt": jax.jit(_adopt)}


def ints(values, length=ROWS, padding=ROWS):
    return np.asarray(list(values) + [padding] * (length - len(values)), np.int32)


class AgainstPlainCache(RuleBasedStateMachine):
    @initialize(config=st.sampled_from(CONFIGS))
    def begin(self, config):
        self.config = config
        self.cache, self.run = compiled(config)
        self.plain = PlainCache(config.num_blocks, ROWS, MAX_BLOCKS, BLOCK_SIZE, config.windows)
        self.slid = [0] * ROWS  # tokens up to which a row's window groups have let go

    def after(self, operation, *arguments, expect=True, **options):
        """Run it, then compare everything."""
        cache, ok = self.run[operation](self.cache, *arguments, **options)
        before, self.cache = self.cache, cache
        ok, fetched = jax.device_get((ok, cache))
        assert bool(ok) == expect
        assert books(fetched) == plain_books(self.plain)
        assert check_integrity(fetched, block_size=BLOCK_SIZE) == []
        if not expect:
            assert all(
                np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(fetched), strict=True)
            )

    def shares(self, row, other):
        return any(set(table[row]) & set(table[other]) - {0} for table in self.plain.tables)

    def used(self):
        return [row for row in range(ROWS) if not self.plain.is_empty(row)]

    def empty(self):
        return [row for row in range(ROWS) if self.plain.is_empty(row)]

    @rule(row=st.integers(0, ROWS - 1), new=st.integers(1, 30), reserved=st.integers(0, 4), must_fit=st.integers(0, 40))
    def allocate(self, row, new, reserved, must_fit):
        fits = self.plain.allocate([row], [new], reserved, must_fit)
        options = {"reserved_blocks": np.int32(reserved), "must_fit_tokens": np.int32(must_fit)}
        self.after("allocate", ints([row], 1), ints([new], 1), expect=fits, **options)

    @rule(
        rows=st.permutations(range(ROWS)),
        new=st.one_of(st.just([1] * APPENDED), st.lists(st.integers(1, 9), min_size=APPENDED, max_size=APPENDED)),
    )
    def append_to_several(self, rows, new):
        rows = rows[:APPENDED]
        fits = self.plain.allocate(rows, new)
        self.after("allocate", ints(rows, APPENDED), ints(new, APPENDED), expect=fits)

    @rule(rows=st.permutations(range(ROWS)), onto_empty=st.booleans())
    def fork(self, rows, onto_empty):
        parent, *children = sorted(rows, key=self.plain.is_empty) if onto_empty else rows
        children = (children[::-1] if onto_empty else children)[:CHILDREN]
        fits = self.plain.fork(parent, children)
        if fits:
            for child in children:
                self.slid[child] = self.slid[parent]
        self.after("fork", ints([parent], 1), ints(children, CHILDREN), expect=fits)

    @rule(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    def free(self, rows):
        self.plain.free(rows)
        for row in rows:
            self.slid[row] = 0
        self.after("free", ints(rows))

    @rule(order=st.permutations(range(ROWS)))
    def free_all(self, order):
        self.free(order)
        assert len(self.plain.pool.queue) == self.config.num_blocks - 1

    @precondition(lambda self: any(self.config.windows))
    @rule(order=st.permutations(range(ROWS)), data=st.data())
    def slide(self, order, data):
        """Rows that share a block let it go in calls of their own: see `block_pool.release`."""
        rows = []
        for row in order:
            if not any(self.shares(row, other) for other in rows):
                rows.append(row)
        before = [self.slid[row] for row in rows]
        after = [
            data.draw(st.integers(self.slid[row], max(self.slid[row], self.plain.num_tokens[row]))) for row in rows
        ]
        for row, low, high in zip(rows, before, after, strict=True):
            self.plain.release_below_window(row, low, high)
            self.slid[row] = high
        self.after("slide", ints(rows), ints(before, padding=0), ints(after, padding=0))

    @precondition(lambda self: self.empty())
    @rule(data=st.data(), count=st.integers(1, MAX_BLOCKS))
    def adopt(self, data, count):
        """A prefix of another row's blocks, then free ones from anywhere in the queue."""
        row = data.draw(st.sampled_from(self.empty()))
        parent = data.draw(st.sampled_from(self.used() or [row]))
        kept = data.draw(st.integers(0, min(count, len(self.plain.tables[0][parent]))))
        free = data.draw(st.permutations(self.plain.pool.queue))
        extra = count - kept
        if extra * len(self.config.windows) > len(free):
            return
        for table in self.plain.tables:
            table[row] = table[parent][:kept] + free[:extra]
            free = free[extra:]
            self.plain.pool.touch(table[row])
        self.plain.num_tokens[row] = count * BLOCK_SIZE
        self.slid[row] = min(self.slid[parent], kept * BLOCK_SIZE) if kept else 0
        self.after("adopt", np.int32(row), np.stack([ints(table[row], MAX_BLOCKS, -1) for table in self.plain.tables]))


TestAgainstPlainCache = AgainstPlainCache.TestCase
TestAgainstPlainCache.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
