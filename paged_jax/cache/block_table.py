"""Which physical blocks hold a sequence row's tokens, for each KV-cache group.

    blocks[group, row]   0  0  7  2  9 | 0  0 ...      logical order
                                       ^num_blocks

The null block stands where a window has passed, and behind the end.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import ceil_div


class BlockTables(struct.PyTreeNode):
    """Tables of R sequence rows in G groups, M blocks a row at most.

    Attributes:
        num_blocks: table entries in use, leading nulls included.
        num_tokens: tokens that the row has slots for.
    """

    blocks: Int[Array, "G R M"]
    num_blocks: Int[Array, "G R"]
    num_tokens: Int[Array, "R"]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_tokens.shape[0]


def init_tables(num_groups: int, num_rows: int, max_blocks: int) -> BlockTables:
    """Return empty tables."""
    return BlockTables(
        blocks=jnp.zeros((num_groups, num_rows, max_blocks), jnp.int32),
        num_blocks=jnp.zeros((num_groups, num_rows), jnp.int32),
        num_tokens=jnp.zeros(num_rows, jnp.int32),
    )


def missing_blocks(
    tables: BlockTables, rows: Int[Array, "k"], num_tokens: Int[Array, "k"], block_size: int
) -> Int[Array, "G k"]:
    """Count the blocks that each row lacks in each group to hold `num_tokens`."""
    needed = ceil_div(num_tokens, block_size)
    return jnp.maximum(needed[None] - tables.num_blocks[:, rows], 0)


def find_slots(
    blocks: Int[Array, "G S M"],
    owners: Int[Array, "T"],
    positions: Int[Array, "T"],
    is_written: Bool[Array, "T"],
    *,
    block_size: int,
    num_slots: int,
) -> Int[Array, "G T"]:
    """Return the slot of each token, and `num_slots` (out of range) where none is written.

    `owners` says which of the S tables a token belongs to.

        table [7, 2], block_size 4, position 5 -> 2 * 4 + 1 = 9
    """
    blocks = blocks[:, owners, positions // block_size]
    slots = blocks * block_size + (positions % block_size)[None]
    return jnp.where(is_written[None], slots, num_slots)
