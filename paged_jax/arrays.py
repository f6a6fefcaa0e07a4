"""Array idioms that the state modules share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def read_before_write(array: Array, index: Any) -> tuple[Array, Array]:
    """Return `array[index]` (no index negative) and `array`, so that a later write is in place.

    Without the barrier XLA may fuse the read into a consumer that runs after the write. It then
    copies the whole array to keep the old values alive.
    """
    old = array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jax.lax.optimization_barrier((old, array))


def vary_with[T](tree: T, others: Any) -> T:
    """Let each array vary over the axes of a `jax.shard_map` that any of `others` varies over.

    A loop must return its carry as it got it, and what is made anew varies over none. It costs
    nothing: a select between equals is not compiled.
    """
    zeros = [jnp.zeros_like(x, shape=(), dtype=jnp.int32) for x in jax.tree.leaves(others)]
    is_any = sum(zeros, start=jnp.int32(0)) == 0
    return jax.tree.map(lambda x: jax.lax.select(is_any, x, x), tree)


def ceil_div(a: Any, b: int) -> Any:
    """Divide an int or an array by b > 0 and round up."""
    return (a + b - 1) // b


def minimum(a: Any, b: Any) -> Any:
    """Return the smaller of two: on the host where both are ints, else in the program."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def count_to_last(is_chosen: Bool[Array, "n"]) -> Int[Array, ""]:
    """Count the places up to the last chosen one.

    F T F T F -> 4
    """
    place = jnp.arange(1, is_chosen.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(is_chosen, place, 0))


class RaggedIndices(NamedTuple):
    """L entries that belong to n owners, owner after owner, padding behind them."""

    owner: Int[Array, "L"]
    rank: Int[Array, "L"]
    is_valid: Bool[Array, "L"]


def ragged_indices(counts: Int[Array, "n"], length: int) -> RaggedIndices:
    """Enumerate `counts[i]` entries for each i in turn, `length` of them at most.

        counts 2 0 3, length 6 -> owner    0 0 2 2 2 2
                                  rank     0 1 0 1 2 3
                                  is_valid T T T T T F

    The search is unrolled: as a loop it would be a host sync on a GPU, and as a comparison of all
    with all a CPU writes the `n x length` table out.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(length, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right", method="scan_unrolled")
    owner = jnp.minimum(owner, counts.shape[0] - 1).astype(jnp.int32)
    return RaggedIndices(owner, index - (ends - counts)[owner], index < ends[-1])


def compact(
    values: Int[Array, "n"], is_chosen: Bool[Array, "n"], padding: int
) -> tuple[Int[Array, "n"], Int[Array, ""]]:
    """Move the chosen values together, in order, and count them.

    values 5 7 2 9, chosen F T F T, padding 0 -> 7 9 0 0, 2
    """
    place = jnp.where(is_chosen, jnp.cumsum(is_chosen, dtype=jnp.int32) - 1, values.shape[0])
    moved = jnp.full_like(values, padding).at[place].set(values, mode="drop")
    return moved, jnp.sum(is_chosen, dtype=jnp.int32)


def apply_if[T](condition: Any, body: Callable[[T], T], carry: T) -> T:
    """Return `body(carry)` if `condition` else `carry`, as a loop of one trip or none.

    A `lax.cond` with the page arrays among its operands copies them on a GPU. A loop carries them
    in place.
    """
    out = jax.lax.while_loop(
        lambda c: c[0],
        lambda c: (jnp.zeros_like(c[0]), body(c[1])),
        (jnp.asarray(condition), carry),
    )
    return out[1]


def keep_default_device[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that makes arrays where this thread would, whichever thread calls it.

    `jax.default_device` is known to its own thread alone.
    """
    device = jax.config.jax_default_device

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.default_device(device):
            return function(*args, **kwargs)

    return call
