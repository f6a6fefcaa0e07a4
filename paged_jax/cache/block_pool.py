"""The physical blocks: reference counts, and a free queue that is entered at both ends.

    ring    . . 7 3 9 - 4 . . .        an entry is live when stamp[ring[p]] == p
                ^head     ^head+span   "-" is dead: its block was taken out of the middle

Positions count modulo 2N. Block 0 is the null block: it is never in the queue and its count means
nothing, so N blocks give N - 1 usable ones.

Pop takes blocks from the head. Release puts blocks without content worth keeping at the head (they
are reused first, while still in cache) and the others at the tail (least recently used). The order
is vLLM's, block for block.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import apply_if, read_before_write
from paged_jax.checks import check_int
from paged_jax.errors import ConfigError


class BlockPool(struct.PyTreeNode):
    """Reference counts and free queue of N physical blocks.

    Attributes:
        ring: free block ids in eviction order, dead entries among them.
        stamp: ring position of a free block, -1 of a block in use.
        head: ring position of the next block to hand out.
        span: entries from the head on, live and dead.
    """

    ref_count: Int[Array, "N"]
    ring: Int[Array, "2*N"]
    stamp: Int[Array, "N"]
    head: Int[Array, ""]
    span: Int[Array, ""]
    num_free: Int[Array, ""]

    @property
    def num_blocks(self) -> int:
        """N, the null block included."""
        return self.ref_count.shape[0]


def init_pool(num_blocks: int) -> BlockPool:
    """Return a pool with the blocks 1 to N - 1 free in that order. Raises ConfigError for N < 1."""
    check_int("num_blocks", num_blocks, 1, error=ConfigError)
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    return BlockPool(
        ref_count=jnp.zeros_like(ids),
        ring=jnp.concatenate([ids[1:], jnp.zeros(num_blocks + 1, jnp.int32)]),
        stamp=ids - 1,
        head=jnp.int32(0),
        span=jnp.int32(num_blocks - 1),
        num_free=jnp.int32(num_blocks - 1),
    )


# ---------------------------------------------------------------- take


def is_head_live(pool: BlockPool, count: Int[Array, ""], max_count: int) -> Bool[Array, ""]:
    """Return whether the first `count` entries are all live, so that `pop_head` may take them."""
    max_count = min(max_count, pool.ring.shape[0])
    _, is_live, _ = _peek(pool, max_count)
    return jnp.all(is_live | (jnp.arange(max_count, dtype=jnp.int32) >= count))


def compact_head(pool: BlockPool, count: Int[Array, ""], max_count: int) -> BlockPool:
    """Make the first `count` entries live, if the pool has that many free blocks.

    count 3:  7 - 3 - 9 4 -> 7 3 9 4    the queue's order stays
    """
    fits = (count <= pool.num_free) & (count <= max_count)
    is_needed = fits & ~is_head_live(pool, count, max_count)
    return apply_if(is_needed, lambda p: _gather_head(p, count, max_count), pool)


def pop_head(
    pool: BlockPool, count: Int[Array, ""], max_count: int
) -> tuple[BlockPool, Int[Array, "max_count"], Bool[Array, ""]]:
    """Take the first `count` blocks of the queue into use, with one reference each.

    The head must be live that far (`is_head_live`). Returns the ids in order, 0 behind them. Not
    ok, and nothing changed, when fewer than `count` are free.
    """
    ok = (count <= pool.num_free) & (count <= max_count)
    count = jnp.where(ok, count, 0)
    offsets, ring_size = jnp.arange(max_count, dtype=jnp.int32), pool.ring.shape[0]
    is_taken = offsets < count
    blocks = jnp.where(is_taken, pool.ring[(pool.head + offsets) % ring_size], 0)
    target = jnp.where(is_taken, blocks, pool.num_blocks)
    pool = pool.replace(
        ref_count=pool.ref_count.at[target].set(1, mode="drop"),
        stamp=pool.stamp.at[target].set(-1, mode="drop"),
        head=(pool.head + count) % ring_size,
        span=pool.span - count,
        num_free=pool.num_free - count,
    )
    return pool, blocks, ok


def _peek(pool: BlockPool, count: int) -> tuple[Array, Array, Array]:
    """Return block ids, liveness and ring positions of the first `count` entries from the head."""
    offsets = jnp.arange(count, dtype=jnp.int32)
    positions = (pool.head + offsets) % pool.ring.shape[0]
    ids = pool.ring[positions]
    return ids, (offsets < pool.span) & (pool.stamp[ids] == positions), positions


def _gather_head(pool: BlockPool, count: Int[Array, ""], max_count: int) -> BlockPool:
    """Gather the first `count` free blocks at the head, past any number of dead entries.

    Rare: it walks the queue. `count` must not exceed `num_free` or `max_count`.
    """
    length, ring_size = min(max_count, pool.ring.shape[0]), pool.ring.shape[0]
    offsets = jnp.arange(length, dtype=jnp.int32)

    def pass_entries(carry):
        pool, found, ids = carry
        block, is_live, _ = _peek(pool, length)
        rank = found + jnp.cumsum(is_live, dtype=jnp.int32) - 1
        is_taken = is_live & (rank < count)
        ids = ids.at[jnp.where(is_taken, rank, length)].set(block, mode="drop")
        # Stop right behind the last one needed, so that what follows keeps its place.
        is_last = found + jnp.sum(is_live, dtype=jnp.int32) >= count
        passed = jnp.where(is_last, jnp.max(jnp.where(is_taken, offsets + 1, 0)), length)
        pool = pool.replace(head=(pool.head + passed) % ring_size, span=pool.span - passed)
        return pool, found + jnp.sum(is_taken, dtype=jnp.int32), ids

    start = (pool, jnp.zeros_like(count), jnp.full_like(pool.head, 0, shape=(length,)))
    pool, found, ids = jax.lax.while_loop(lambda c: c[1] < count, pass_entries, start)
    # The region in front of the head has room for them: they all came from behind it.
    head = (pool.head - found) % ring_size
    is_taken = offsets < found
    positions = (head + offsets) % ring_size
    stamped = jnp.where(is_taken, ids, pool.num_blocks)
    return pool.replace(
        ring=pool.ring.at[jnp.where(is_taken, positions, ring_size)].set(ids, mode="drop"),
        stamp=pool.stamp.at[stamped].set(positions, mode="drop"),
        head=head,
        span=pool.span + found,
    )


# ---------------------------------------------------------------- give back


def release(
    pool: BlockPool, blocks: Int[Array, "rows columns"], keep: Bool[Array, "rows columns"]
) -> tuple[BlockPool, Bool[Array, ""]]:
    """Decrement the reference count of each block given; null entries are skipped.

    Rows are released one after another, each from its last column to its first. A block without
    references left goes to the tail of the queue where `keep`, else to its head. Not ok, and
    nothing changed, when a block has fewer references.

        queue 8 9, rows 1 2 3 and 1 4, of which 1 has two references, nothing kept
        -> 4 1 3 2 8 9    row 0 queues 3 2 at the head, then row 1 queues 4 1 before them
    """
    blocks, keep = jnp.flip(blocks, 1), jnp.flip(keep, 1)
    is_held = blocks != 0
    past = pool.num_blocks
    ref_count = pool.ref_count.at[jnp.where(is_held, blocks, past)].add(-1, mode="drop")
    counts, ref_count = read_before_write(ref_count, blocks)
    ok = jnp.all(~is_held | (counts >= 0))
    ref_count = ref_count.at[jnp.where(is_held & ~ok, blocks, past)].add(1, mode="drop")

    # A block given twice is queued where it stands last. Its stamp, -1 so far, finds that place
    # without comparing all with all.
    is_held = is_held & ok
    order = jnp.arange(blocks.size, dtype=jnp.int32).reshape(blocks.shape)
    stamp = pool.stamp.at[jnp.where(is_held, blocks, past)].max(order, mode="drop")
    last, stamp = read_before_write(stamp, blocks)
    is_last = is_held & (last == order)
    is_freed = is_last & (counts == 0)

    # At the head later rows stand first, at the tail earlier ones; each from its last column on.
    ring_size = pool.ring.shape[0]
    at_head = jnp.flip(_running_count(jnp.flip(is_freed & ~keep, 0)), 0)
    at_tail = _running_count(is_freed & keep)
    num_head, num_tail = at_head[0, -1], at_tail[-1, -1]
    positions = jnp.where(keep, pool.head + pool.span + at_tail, pool.head - num_head + at_head)
    positions = (positions - 1) % ring_size
    stamped = jnp.where(is_freed, positions, -1)
    pool = pool.replace(
        ref_count=ref_count,
        ring=pool.ring.at[jnp.where(is_freed, positions, ring_size)].set(blocks, mode="drop"),
        stamp=stamp.at[jnp.where(is_last, blocks, past)].set(stamped, mode="drop"),
        head=(pool.head - num_head) % ring_size,
        span=pool.span + num_head + num_tail,
        num_free=pool.num_free + num_head + num_tail,
    )
    return pool, ok


def _running_count(is_chosen: Bool[Array, "rows columns"]) -> Int[Array, "rows columns"]:
    """Count the chosen ones up to each, row by row."""
    return jnp.cumsum(is_chosen.ravel(), dtype=jnp.int32).reshape(is_chosen.shape)


# ---------------------------------------------------------------- share


def add_references(
    pool: BlockPool, blocks: Int[Array, "*k"], times: Int[Array, ""] | int = 1
) -> BlockPool:
    """Add `times` references to each of the distinct blocks, all of them in use; 0 is skipped."""
    target = jnp.where(blocks == 0, pool.num_blocks, blocks)
    return pool.replace(ref_count=pool.ref_count.at[target].add(times, mode="drop"))


def drop_shared_references(pool: BlockPool, blocks: Int[Array, "k"]) -> BlockPool:
    """Drop one reference for each entry that names a block others hold too; 0 is skipped.

    Never the last one: then a block would have to be queued (`release`).
    """
    target = jnp.where(blocks == 0, pool.num_blocks, blocks)
    return pool.replace(ref_count=pool.ref_count.at[target].add(-1, mode="drop"))


def touch(pool: BlockPool, blocks: Int[Array, "k"], times: Int[Array, ""] | int) -> BlockPool:
    """Add `times` references to each of the distinct blocks; 0 is skipped.

    A free block leaves the middle of the queue (vLLM's word for that is touch).

        queue 7 3 9, touch 3 -> 7 - 9
    """
    times = jnp.asarray(times, jnp.int32)
    is_held = (blocks != 0) & (times > 0)
    # Each free block touched leaves a dead entry. At most N may gather before the ring overflows.
    num_dead = pool.span - pool.num_free
    is_late = jnp.any(is_held) & (num_dead + blocks.shape[0] > pool.num_blocks)
    pool = apply_if(is_late, compact_ring, pool)
    counts, ref_count = read_before_write(pool.ref_count, blocks)
    was_free = is_held & (counts == 0)
    past = pool.num_blocks
    return pool.replace(
        ref_count=ref_count.at[jnp.where(is_held, blocks, past)].add(times, mode="drop"),
        stamp=pool.stamp.at[jnp.where(was_free, blocks, past)].set(-1, mode="drop"),
        num_free=pool.num_free - jnp.sum(was_free, dtype=jnp.int32),
    )


def compact_ring(pool: BlockPool) -> BlockPool:
    """Drop the dead entries of the queue. Rare: it costs a pass over the pool."""
    ids, is_live, _ = _peek(pool, pool.ring.shape[0])
    rank = jnp.cumsum(is_live, dtype=jnp.int32) - 1
    rank = jnp.where(is_live, rank, pool.ring.shape[0])
    return pool.replace(
        ring=jnp.zeros_like(pool.ring).at[rank].set(ids, mode="drop"),
        stamp=pool.stamp.at[jnp.where(is_live, ids, pool.num_blocks)].set(rank, mode="drop"),
        head=jnp.zeros_like(pool.head),
        span=pool.num_free,
    )


# ---------------------------------------------------------------- on the host


def free_queue(pool: BlockPool) -> list[int]:
    """List the free blocks in the order in which they would be handed out."""
    pool = jax.device_get(pool)
    positions = (int(pool.head) + np.arange(int(pool.span))) % pool.ring.shape[0]
    ids = pool.ring[positions]
    return ids[pool.stamp[ids] == positions].tolist()
