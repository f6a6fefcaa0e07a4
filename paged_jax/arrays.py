"""Array idioms that the state modules share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def read_before_write(array: Array, index) -> tuple[Array, Array]:
    """`array[index]`, no index negative, and `array`, ordered so that a later write of `array` happens in place.

    Without the barrier XLA may fuse the read into a consumer that runs after the write, and copies the whole array to keep
    the old values alive.
    """
    old = array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jax.lax.optimization_barrier((old, array))


def ceil_div(a, b: int):
    """a / b rounded up, for b > 0."""
    return (a + b - 1) // b


def spread(counts: Int[Array, "n"], length: int) -> tuple[Array, Array, Array]:
    """`counts[i]` entries for each i in turn, `length` in all: for each entry its i, its rank among those of i, and whether it
    is one. Counts must not sum to more.

    The search is unrolled: as a loop it would be a host sync on a GPU, and as a compare of all with all a CPU writes the
    `n x length` table out.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(length, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="scan_unrolled"), counts.shape[0] - 1)
    return owner, index - (ends - counts)[owner], index < ends[-1]


def once(condition, body, carry):
    """`body(carry)` if `condition` else `carry`, as a loop of one trip or none.

    A `lax.cond` with the page arrays among its operands copies them on a GPU; a loop carries them in place.
    """
    out = jax.lax.while_loop(
        lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), body(c[1])), (jnp.asarray(condition), carry)
    )
    return out[1]
