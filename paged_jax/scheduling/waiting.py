"""The order in which rows wait: a queue that is entered at both ends, as a ring of R places.

    rows    . 7 2 9 .     head 1, count 3: 7 is next, then 2, then 9

Rows out of range are padding and enter nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import compact


class Waiting(struct.PyTreeNode):
    """The waiting order of up to R rows."""

    rows: Int[Array, "R"]
    head: Int[Array, ""]
    count: Int[Array, ""]

    @property
    def size(self) -> int:
        """R."""
        return self.rows.shape[0]


def init_waiting(num_rows: int) -> Waiting:
    """Return an empty order."""
    return Waiting(jnp.zeros(num_rows, jnp.int32), jnp.int32(0), jnp.int32(0))


def first(waiting: Waiting) -> Int[Array, ""]:
    """Return the row that is next. It means nothing where none waits."""
    return waiting.rows[waiting.head]


def push_back(waiting: Waiting, rows: Int[Array, "k"]) -> Waiting:
    """Append rows in the order given."""
    is_row = rows < waiting.size
    rank = jnp.cumsum(is_row, dtype=jnp.int32) - 1
    place = (waiting.head + waiting.count + rank) % waiting.size
    return waiting.replace(
        rows=waiting.rows.at[jnp.where(is_row, place, waiting.size)].set(rows, mode="drop"),
        count=waiting.count + jnp.sum(is_row, dtype=jnp.int32),
    )


def push_front(waiting: Waiting, row: Int[Array, ""]) -> Waiting:
    """Put a row in front of all others."""
    is_row = row < waiting.size
    head = (waiting.head - is_row.astype(jnp.int32)) % waiting.size
    place = jnp.where(is_row, head, waiting.size)
    return waiting.replace(
        rows=waiting.rows.at[place].set(row, mode="drop"),
        head=head,
        count=waiting.count + is_row.astype(jnp.int32),
    )


def pop_front(waiting: Waiting, is_popped: Bool[Array, ""]) -> Waiting:
    """Take the first row out where `is_popped`."""
    count = is_popped.astype(jnp.int32)
    return waiting.replace(head=(waiting.head + count) % waiting.size, count=waiting.count - count)


def keep(waiting: Waiting, stays: Bool[Array, "R"]) -> Waiting:
    """Keep the rows that stay, by row number, in their order."""
    offsets = jnp.arange(waiting.size, dtype=jnp.int32)
    order = waiting.rows[(waiting.head + offsets) % waiting.size]
    rows, count = compact(order, (offsets < waiting.count) & stays[order], 0)
    return Waiting(rows, jnp.zeros_like(waiting.head), count)


def waiting_rows(waiting: Waiting) -> list[int]:
    """List the waiting rows in order. On the host."""
    waiting = jax.device_get(waiting)
    places = (int(waiting.head) + np.arange(int(waiting.count))) % waiting.size
    return waiting.rows[places].tolist()
