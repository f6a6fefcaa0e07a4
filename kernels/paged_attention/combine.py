"""Splitting a context among programs, and putting their partial results together."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


def combine(
    out: Float[Array, "n T H D"],
    lse: Float[Array, "n T H"],
    sinks: Float[Array, "H"] | None,
    owned: Bool[Array, "T"],
    dtype,
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """(out, lse) of whole contexts, from each part's softmax-weighted mean and log-sum-exp; -inf marks a part with no key.

    A row that is not `owned` holds whatever lay in memory, and gives 0 and -inf. A sink is one more part, without a value.
    """
    seen = owned[:, None] & (lse != -jnp.inf)  # also NaN
    # From here on no -inf meets another.
    top = jnp.where(seen, lse, -jnp.inf).max(0)
    any_seen = top != -jnp.inf
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32))
    top = jnp.where(any_seen, top, 0)
    weights = jnp.where(seen, jnp.exp(lse - top), 0)
    total = weights.sum(0)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32) - top)
    total = jnp.where(any_seen, total, 1)
    values = jnp.where(seen[..., None], out.astype(jnp.float32), 0)
    mean = (values * weights[..., None]).sum(0) / total[..., None]
    lse = jnp.where(any_seen, top + jnp.log(total), -jnp.inf)
    return jnp.where(any_seen[..., None], mean, 0).astype(dtype), lse


def num_splits(programs: int, context: int, chunk: int, resident: int) -> int:
    """In how many parts to cut contexts of up to `context` tokens, where `programs` tiles and heads run side by side.

    As many as keep all programs on the device at once, `resident` on a multiprocessor, but no part below a few chunks: a part
    costs a float32 row in memory for each of its query rows.
    """
    return max(1, min(MULTIPROCESSORS * resident // programs, context // (MIN_CHUNKS * chunk), MAX_SPLITS))


MULTIPROCESSORS = 132  # of an H100 or H200; a B200 has 148, an A100 108
MIN_CHUNKS = 4
MAX_SPLITS = 64


def share_of_context(first_key, end_key, split, splits: int, chunk: int, block_size: int):
    """What one of `splits` programs takes of the keys `first_key` up to `end_key`: its first key, and how many chunks.

    Chunks are counted from the first key's block on: pages and copies stay whole, and no block before it is read. Called inside
    a kernel.
    """
    start = lax.div(first_key, jnp.int32(block_size)) * block_size
    chunks = lax.div(jnp.maximum(end_key - start, 0) + (chunk - 1), jnp.int32(chunk))
    share = lax.div(chunks + (splits - 1), jnp.int32(splits))
    first = jnp.minimum(split * share, chunks)
    return start + first * chunk, jnp.minimum(share, chunks - first)
