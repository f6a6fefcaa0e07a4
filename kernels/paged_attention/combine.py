"""Splitting a context among programs, and combining their partial softmaxes."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

MULTIPROCESSORS = 132  # of an H100 or H200; a B200 has 148, an A100 108
MIN_CHUNKS = 4  # of a split
MAX_SPLITS = 64


def num_splits(programs: int, context: int, chunk: int, resident: int) -> int:
    """Return how many parts to cut contexts of up to `context` tokens into.

    All parts of all programs should be on the device at once. A part costs a float32 row in memory
    for each of its query rows, so none is shorter than `MIN_CHUNKS` chunks.

    Args:
        programs: tiles times KV heads, which run side by side anyway.
        context: tokens that the block table can hold.
        chunk: tokens that a program reads in one trip of its loop.
        resident: programs on one multiprocessor at a time.

    Example: 8 programs, 4096 tokens, chunks of 64, 2 resident -> min(33, 16, 64) = 16.
    """
    by_programs = MULTIPROCESSORS * resident // programs
    by_context = context // (MIN_CHUNKS * chunk)
    return max(1, min(by_programs, by_context, MAX_SPLITS))


def share_of_context(first_key, end_key, split, splits: int, chunk: int, block_size: int):
    """Return the part that `split` takes of the keys `first_key` to `end_key - 1`.

    Chunks are counted from the first key's block on. So pages and copies stay whole, and no block
    before it is read. Called inside a kernel.

    Returns:
        The first key of the part, and its number of chunks.

    Example: keys 130 to 899, blocks of 16, chunks of 64, 3 splits. The block of key 130 begins at
    128, so there are 13 chunks, 5 a split: (128, 5), (448, 5), (768, 3).
    """
    start = lax.div(first_key, jnp.int32(block_size)) * block_size
    chunks = pl.cdiv(jnp.maximum(end_key - start, 0), jnp.int32(chunk))
    share = pl.cdiv(chunks, jnp.int32(splits))
    first = jnp.minimum(split * share, chunks)
    return start + first * chunk, jnp.minimum(share, chunks - first)


def combine(
    out: Float[Array, "n T H D"],
    lse: Float[Array, "n T H"],
    sinks: Float[Array, "H"] | None,
    is_owned: Bool[Array, "T"],
    dtype,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Combine the results of n parts of each context: (out, lse) of the whole.

    A part is its softmax-weighted mean of values and its log-sum-exp; -inf marks a part without a
    key. A row without an owner holds whatever was in memory; it gives 0 and -inf. A sink is one
    more part, without a value.

    Example: means [2, 6] with lse [log 1, log 3] -> out (2 * 1 + 6 * 3) / 4 = 5, lse log 4.
    """
    has_key = is_owned[None, :, None] & (lse != -jnp.inf)  # true for NaN
    # From here on no -inf meets another.
    top = jnp.where(has_key, lse, -jnp.inf).max(0)
    has_any = top != -jnp.inf
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), top.shape)
        top = jnp.maximum(top, sinks)
    top = jnp.where(has_any, top, 0)
    weights = jnp.where(has_key, jnp.exp(lse - top[None]), 0)
    total = weights.sum(0)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    total = jnp.where(has_any, total, 1)
    values = jnp.where(has_key[..., None], out.astype(jnp.float32), 0)
    mean = (values * weights[..., None]).sum(0) / total[..., None]
    lse = jnp.where(has_any, top + jnp.log(total), -jnp.inf)
    return jnp.where(has_any[..., None], mean, 0).astype(dtype), lse
