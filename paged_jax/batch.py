"""One step's tokens, flattened.

running places      0       1    2          take 3, 1, 2
tokens              a b c   d    e f  - -   owners 0 0 0 1 2 2, padding behind
cu_q_lens           0       3    4     6
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import spread
from paged_jax.block_table import BlockTables, find_slots
from paged_jax.config import CacheConfig
from paged_jax.sequences import Sequences, running_rows


class Batch(struct.PyTreeNode):
    """T tokens of S sequences at most, G KV-cache groups; what a decoder is given (models/interface.py) and a little more."""

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    slots: Int[Array, "G T"]
    block_tables: Int[Array, "G S M"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, ""]
    rows: Int[Array, "S"]
    samples: Bool[Array, "S"]  # the sequence's last token is among these: it gets a new one

    @property
    def last_tokens(self) -> Int[Array, "S"]:
        """Where in the T tokens each sequence's last stands."""
        return jnp.maximum(self.cu_q_lens[1:] - 1, 0)


def build_batch(config: CacheConfig, tables: BlockTables, seqs: Sequences, take: Int[Array, "S"], width: int) -> Batch:
    """The tokens that `take` names of each running place, `width` at most.

    A narrow batch holds the first `width` running places: no other has a token in it.
    """
    rows, active = (x[:width] for x in running_rows(seqs))
    take = take[:width]
    computed = jnp.where(active, seqs.num_computed[rows], 0)
    cu_q_lens = jnp.concatenate([jnp.zeros_like(take[:1]), jnp.cumsum(take)])
    owners, rank, valid = spread(take, width)
    positions = jnp.where(valid, computed[owners] + rank, 0)
    blocks = tables.blocks[:, rows]
    # What was found in the cache is there already, in blocks that others may hold.
    written = valid & (positions >= seqs.num_hit[rows[owners]])
    return Batch(
        tokens=jnp.where(valid, seqs.tokens[rows[owners], positions], 0),
        positions=positions,
        slots=find_slots(blocks, owners, positions, written, block_size=config.block_size, num_slots=config.num_slots),
        block_tables=blocks,
        kv_lens=jnp.where(active, computed + take, 0),
        cu_q_lens=cu_q_lens,
        num_seqs=jnp.minimum(seqs.num_running, take.shape[0]),
        rows=rows,
        samples=(take > 0) & (computed + take == seqs.num_tokens[rows]),
    )
