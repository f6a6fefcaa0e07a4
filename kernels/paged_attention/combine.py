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
    seen = owned[:, None] & (lse > -jnp.inf)
    # From here on no -inf meets another.
    top = jnp.where(seen, lse, -jnp.inf).max(0)
    any_seen = top > -jnp.inf
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


def num_splits(programs: int, context: int, chunk: int) -> int:
    """In how many parts to cut contexts of up to `context` tokens, where `programs` tiles and heads run side by side.

    Enough to give every multiprocessor two programs, but no part below a few chunks: a part costs a float32 row in memory
    for each of its query rows.
    """
    return max(1, min(-(-PROGRAMS_WANTED // programs), context // (MIN_CHUNKS * chunk), MAX_SPLITS))


def share_of_chunks(first_key, end_key, split, splits: int, chunk: int):
    """The chunks, first and end, that one of `splits` programs takes of the keys `first_key` up to `end_key`.

    Chunks begin at multiples of their size, so that pages and copies stay whole. Called inside a kernel.
    """
    first, end = lax.div(first_key, jnp.int32(chunk)), lax.div(end_key + (chunk - 1), jnp.int32(chunk))
    share = lax.div(jnp.maximum(end - first, 0) + (splits - 1), jnp.int32(splits))
    first = first + split * share
    return first, jnp.minimum(first + share, end)


PROGRAMS_WANTED = 264  # two for each multiprocessor of an H100, H200 or B200 (132); an A100 has 108
MIN_CHUNKS = 4
MAX_SPLITS = 64
