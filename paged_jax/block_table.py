"""Which physical blocks hold a sequence row's tokens, for each KV-cache group.

blocks[group, row]   0  0  7  2  9 | 0  0 ...      logical order; the null block stands where a window has passed
                                    ^num_blocks    and behind the end
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from paged_jax.arrays import ceil_div


class BlockTables(struct.PyTreeNode):
    """Tables of R sequence rows in G groups, M blocks a row at most."""

    blocks: Int[Array, "G R M"]
    num_blocks: Int[Array, "G R"]  # table entries in use, leading nulls included
    num_tokens: Int[Array, "R"]  # tokens that the row was given slots for

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_tokens.shape[0]


def init_tables(num_groups: int, num_rows: int, max_blocks: int) -> BlockTables:
    """Empty tables."""
    return BlockTables(
        blocks=jnp.zeros((num_groups, num_rows, max_blocks), jnp.int32),
        num_blocks=jnp.zeros((num_groups, num_rows), jnp.int32),
        num_tokens=jnp.zeros(num_rows, jnp.int32),
    )


def missing_blocks(
    tables: BlockTables, rows: Int[Array, "k"], num_tokens: Int[Array, "k"], block_size: int
) -> Int[Array, "G k"]:
    """Blocks that each row lacks in each group to hold `num_tokens`."""
    return jnp.maximum(ceil_div(num_tokens, block_size) - tables.num_blocks[:, rows], 0)


def find_slots(
    blocks: Int[Array, "G S M"],
    owners: Int[Array, "T"],
    positions: Int[Array, "T"],
    valid,
    *,
    block_size: int,
    num_slots: int,
) -> Int[Array, "G T"]:
    """Slot of each token; `num_slots`, out of range, where not `valid`.

    `owners` says which of the S tables a token belongs to.
    """
    found = blocks[:, owners, positions // block_size] * block_size + positions % block_size
    return jnp.where(valid, found, num_slots)


def first_live_block(computed, window: int | None, block_size: int):
    """Leading blocks that no query at position `computed` or later can see, in a group of that window.

    The query at position p sees p - window + 1 to p.
    """
    return jnp.zeros_like(computed) if window is None else jnp.maximum(computed - window + 1, 0) // block_size
