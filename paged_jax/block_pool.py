"""The physical blocks: reference counts, and the free queue that can be entered at both ends and left anywhere.

    ring    . . 7 3 9 - 4 . . .        an entry is live when stamp[ring[p]] == p; "-" was taken out of the middle
                ^head     ^head+span   positions count modulo 2N

Block 0 is the null block: it is never in the queue and its count means nothing, so N blocks give N - 1 usable ones. Pop reads
a window from the head; release puts blocks without content worth keeping at the head (reused first, while still in cache)
and the others at the tail (least recently used). The queue order is vLLM's, block for block.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import once, read_before_write
from paged_jax.errors import ConfigError, DoubleFreeError, OutOfBlocksError


class BlockPool(struct.PyTreeNode):
    """Reference counts and free queue of N physical blocks."""

    ref_count: Int[Array, "N"]
    ring: Int[Array, "2N"]  # free block ids in eviction order, dead entries among them
    stamp: Int[Array, "N"]  # the ring position at which a free block stands, else -1
    head: Int[Array, ""]  # ring position of the next block to hand out
    span: Int[Array, ""]  # entries from the head on, live and dead
    num_free: Int[Array, ""]

    @property
    def num_blocks(self) -> int:
        """N, the null block included."""
        return self.ref_count.shape[0]


def init_pool(num_blocks: int) -> BlockPool:
    """A pool of `num_blocks` with 1 to N - 1 free in that order. Raises ConfigError below one block."""
    if num_blocks < 1:
        raise ConfigError(f"num_blocks={num_blocks}: a pool needs at least 1, the null block")
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    return BlockPool(
        ref_count=jnp.zeros_like(ids),
        ring=jnp.concatenate([ids[1:], jnp.zeros(num_blocks + 1, jnp.int32)]),
        stamp=ids - 1,
        head=jnp.int32(0),
        span=jnp.int32(num_blocks - 1),
        num_free=jnp.int32(num_blocks - 1),
    )


def usage(pool: BlockPool) -> Array:
    """Share of the usable blocks in use, 0 to 1; 0 for a pool of the null block alone."""
    usable = max(pool.num_blocks - 1, 1)
    return (pool.num_blocks - 1 - pool.num_free) / usable


def _window(pool: BlockPool, width: int) -> tuple[Array, Array, Array]:
    """Block ids, liveness and ring positions of the first `width` entries from the head."""
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = (pool.head + offsets) % pool.ring.shape[0]
    ids = pool.ring[positions]
    return ids, (offsets < pool.span) & (pool.stamp[ids] == positions), positions


def head_is_ready(pool: BlockPool, count: Int[Array, ""], width: int) -> Bool[Array, ""]:
    """Whether the first `count` (`width` at most) entries are all live, so that `pop_ready` may take them."""
    width = min(width, pool.ring.shape[0])
    _, live, _ = _window(pool, width)
    return jnp.all(live | (jnp.arange(width, dtype=jnp.int32) >= count))


def ready_head(pool: BlockPool, count: Int[Array, ""], width: int) -> BlockPool:
    """Move the first `count` free blocks together at the head, past any number of dead entries. Rare: it walks the queue.

    `count` must not exceed `num_free` or `width`.
    """
    width = min(width, pool.ring.shape[0])

    def gather(carry):
        pool, found, ids = carry
        block, live, _ = _window(pool, width)
        rank = found + jnp.cumsum(live) - 1
        taken = live & (rank < count)
        ids = ids.at[jnp.where(taken, rank, width)].set(block, mode="drop")
        # Stop right behind the last one needed, so that what follows keeps its place.
        done = found + jnp.sum(live) >= count
        passed = jnp.where(done, jnp.max(jnp.where(taken, jnp.arange(width, dtype=jnp.int32) + 1, 0)), width)
        pool = pool.replace(head=(pool.head + passed) % pool.ring.shape[0], span=pool.span - passed)
        return pool, found + jnp.sum(taken, dtype=jnp.int32), ids

    start = (pool, jnp.zeros_like(count), jnp.zeros(width, jnp.int32))
    pool, found, ids = jax.lax.while_loop(lambda c: c[1] < count, gather, start)
    # The region in front of the head is free for them: they all came from behind it.
    head = (pool.head - found) % pool.ring.shape[0]
    offsets = jnp.arange(width, dtype=jnp.int32)
    taken = offsets < found
    positions = (head + offsets) % pool.ring.shape[0]
    return pool.replace(
        ring=pool.ring.at[jnp.where(taken, positions, pool.ring.shape[0])].set(ids, mode="drop"),
        stamp=pool.stamp.at[jnp.where(taken, ids, pool.num_blocks)].set(positions, mode="drop"),
        head=head,
        span=pool.span + found,
    )


def pop_ready(
    pool: BlockPool, count: Int[Array, ""], width: int
) -> tuple[BlockPool, Int[Array, "width"], Bool[Array, ""]]:
    """Take `count` blocks from the head into use (reference count 1), where `head_is_ready`.

    Returns their ids in order, 0 behind them. Not ok, and nothing changed, when fewer than `count` are free.
    """
    ok = (count <= pool.num_free) & (count <= width)
    count = jnp.where(ok, count, 0)
    offsets, ring_size = jnp.arange(width, dtype=jnp.int32), pool.ring.shape[0]
    taken = offsets < count
    blocks = jnp.where(taken, pool.ring[(pool.head + offsets) % ring_size], 0)
    target = jnp.where(taken, blocks, pool.num_blocks)
    pool = pool.replace(
        ref_count=pool.ref_count.at[target].set(1, mode="drop"),
        stamp=pool.stamp.at[target].set(-1, mode="drop"),
        head=(pool.head + count) % ring_size,
        span=pool.span - count,
        num_free=pool.num_free - count,
    )
    return pool, blocks, ok


def make_ready(pool: BlockPool, count: Int[Array, ""], width: int) -> BlockPool:
    """`ready_head` where it is needed and the pool has that many."""
    fits = (count <= pool.num_free) & (count <= width)
    return once(fits & ~head_is_ready(pool, count, width), lambda p: ready_head(p, count, width), pool)


def pop(pool: BlockPool, count: Int[Array, ""], width: int) -> tuple[BlockPool, Int[Array, "width"], Bool[Array, ""]]:
    """`pop_ready`, whatever stands at the head."""
    return pop_ready(make_ready(pool, count, width), count, width)


def release(
    pool: BlockPool, blocks: Int[Array, "rows columns"], keep: Bool[Array, "rows columns"]
) -> tuple[BlockPool, Bool[Array, ""]]:
    """Give back one reference of each block named; null entries are passed over.

    Rows are released one after another, each from its last column to its first. A block whose last reference this is goes
    to the tail of the queue where `keep`, else to its head. Not ok, and nothing changed, when a block has fewer references.
    """
    blocks, keep = jnp.flip(blocks, 1), jnp.flip(keep, 1)
    held = blocks != 0
    ref_count = pool.ref_count.at[jnp.where(held, blocks, pool.num_blocks)].add(-1, mode="drop")
    counts, ref_count = read_before_write(ref_count, blocks)
    ok = jnp.all(~held | (counts >= 0))
    ref_count = ref_count.at[jnp.where(held & ~ok, blocks, pool.num_blocks)].add(1, mode="drop")

    # A block named twice is queued where it is named last. Its stamp, -1 so far, finds that out without comparing all with all.
    held = held & ok
    order = jnp.arange(blocks.size, dtype=jnp.int32).reshape(blocks.shape)
    stamp = pool.stamp.at[jnp.where(held, blocks, pool.num_blocks)].max(order, mode="drop")
    last, stamp = read_before_write(stamp, blocks)
    is_last = held & (last == order)
    freed = is_last & (counts == 0)

    # At the head later rows stand first, at the tail earlier rows; each row from its last column on.
    ring_size = pool.ring.shape[0]
    at_head = jnp.flip(_running_count(jnp.flip(freed & ~keep, 0)), 0)
    at_tail = _running_count(freed & keep)
    num_head, num_tail = at_head[0, -1], at_tail[-1, -1]
    positions = jnp.where(keep, pool.head + pool.span + at_tail, pool.head - num_head + at_head) - 1
    positions = positions % ring_size
    pool = pool.replace(
        ref_count=ref_count,
        ring=pool.ring.at[jnp.where(freed, positions, ring_size)].set(blocks, mode="drop"),
        stamp=stamp.at[jnp.where(is_last, blocks, pool.num_blocks)].set(jnp.where(freed, positions, -1), mode="drop"),
        head=(pool.head - num_head) % ring_size,
        span=pool.span + num_head + num_tail,
        num_free=pool.num_free + num_head + num_tail,
    )
    return pool, ok


def _running_count(chosen: Bool[Array, "rows columns"]) -> Int[Array, "rows columns"]:
    """How many are chosen up to each, row by row."""
    return jnp.cumsum(chosen.ravel(), dtype=jnp.int32).reshape(chosen.shape)


def refer(pool: BlockPool, blocks: Int[Array, "*k"], times: Int[Array, ""] | int = 1) -> BlockPool:
    """Add `times` references to each distinct block named (0 is passed over); all of them are in use."""
    target = jnp.where(blocks == 0, pool.num_blocks, blocks)
    return pool.replace(ref_count=pool.ref_count.at[target].add(times, mode="drop"))


def touch(pool: BlockPool, blocks: Int[Array, "k"], times: Int[Array, ""]) -> BlockPool:
    """Add `times` references to each distinct block named (0 is passed over), taking a free one out of the queue's middle."""
    times = jnp.asarray(times, jnp.int32)
    held = (blocks != 0) & (times > 0)
    # Each free block touched leaves a dead entry behind; at most N may gather before the ring could overflow.
    dead = pool.span - pool.num_free
    pool = once(jnp.any(held) & (dead + blocks.shape[0] > pool.num_blocks), compact, pool)
    counts, ref_count = read_before_write(pool.ref_count, blocks)
    was_free = held & (counts == 0)
    return pool.replace(
        ref_count=ref_count.at[jnp.where(held, blocks, pool.num_blocks)].add(times, mode="drop"),
        stamp=pool.stamp.at[jnp.where(was_free, blocks, pool.num_blocks)].set(-1, mode="drop"),
        num_free=pool.num_free - jnp.sum(was_free, dtype=jnp.int32),
    )


def compact(pool: BlockPool) -> BlockPool:
    """Drop the dead entries of the queue. Rare: it costs a pass over the pool."""
    ids, live, _ = _window(pool, pool.ring.shape[0])
    rank = jnp.where(live, jnp.cumsum(live, dtype=jnp.int32) - 1, pool.ring.shape[0])
    return pool.replace(
        ring=jnp.zeros_like(pool.ring).at[rank].set(ids, mode="drop"),
        stamp=pool.stamp.at[jnp.where(live, ids, pool.num_blocks)].set(rank, mode="drop"),
        head=jnp.zeros_like(pool.head),
        span=pool.num_free,
    )


def free_queue(pool: BlockPool) -> list[int]:
    """The free blocks in the order in which they would be handed out. On the host; for inspection and tests."""
    pool = jax.device_get(pool)
    positions = (int(pool.head) + np.arange(int(pool.span))) % pool.ring.shape[0]
    ids = pool.ring[positions]
    return ids[pool.stamp[ids] == positions].tolist()


# ---------------------------------------------------------------- on the host, with exceptions for flags


_pop = jax.jit(pop, static_argnums=2)
_release = jax.jit(release)


def take_blocks(pool: BlockPool, count: int) -> tuple[BlockPool, list[int]]:
    """`count` blocks from the head of the queue. Raises OutOfBlocksError, naming the count, when fewer are free."""
    if count < 0:
        raise ConfigError(f"count={count}: must be at least 0")
    free = int(pool.num_free)
    if count > free:
        raise OutOfBlocksError(f"count={count}: {free} of {pool.num_blocks - 1} blocks are free")
    pool, blocks, _ = _pop(pool, np.int32(count), _round_up(count))
    return pool, blocks[:count].tolist()


def return_blocks(pool: BlockPool, blocks: Sequence[int], *, keep: bool = False) -> BlockPool:
    """Give back one reference of each of `blocks`, the first first; freed ones go to the tail where `keep`, else to the head.

    Those that go to the head stand there in the order given. Raises DoubleFreeError, and releases nothing, for a block
    without a reference left; ConfigError for one that is not of the pool, or the null block.
    """
    blocks = list(blocks)
    if any(not 1 <= block < pool.num_blocks for block in blocks):
        raise ConfigError(f"blocks={blocks}: each must be from 1 to {pool.num_blocks - 1}")
    # `release` goes from the last column to the first.
    ids = np.zeros((1, _round_up(len(blocks))), np.int32)
    ids[0, : len(blocks)] = blocks[::-1]
    after, ok = _release(pool, ids, np.full(ids.shape, keep))
    if not ok or len(set(blocks)) < len(blocks):
        raise DoubleFreeError(f"blocks={blocks}: one has fewer references than are given back")
    return after


def _round_up(count: int) -> int:
    """A power of two, 8 at least, that holds `count`: few shapes to compile."""
    return 1 << max(count - 1, 7).bit_length()
