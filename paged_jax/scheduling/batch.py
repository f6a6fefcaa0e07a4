"""One step's tokens, flattened.

running places      0       1    2          take 3, 1, 2
tokens              a b c   d    e f  - -   owners 0 0 0 1 2 2, padding behind
cu_q_lens           0       3    4     6
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import ragged_indices
from paged_jax.cache.block_table import find_slots
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.scheduling.sequences import Sequences, running_rows


class Batch(struct.PyTreeNode):
    """T tokens of S sequences at most, G KV-cache groups; a `paged_jax.models.TokenBatch` and more.

    Attributes:
        is_sampled: whether the sequence's last token is in the batch: it gets a new one.
    """

    tokens: Int[Array, "T"]
    positions: Int[Array, "T"]
    slots: Int[Array, "G T"]
    block_tables: Int[Array, "G S M"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, ""]
    rows: Int[Array, "S"]
    is_sampled: Bool[Array, "S"]

    @property
    def last_tokens(self) -> Int[Array, "S"]:
        """Index of each sequence's last token among the T."""
        return jnp.maximum(self.cu_q_lens[1:] - 1, 0)


def build_batch(cache: PagedCache, seqs: Sequences, take: Int[Array, "S"], width: int) -> Batch:
    """Gather the tokens that each running place takes, `width` at most.

    A narrow batch holds the first `width` running places: no other has a token in it.
    """
    config = cache.config
    rows, is_active = (x[:width] for x in running_rows(seqs))
    take = take[:width]
    computed = jnp.where(is_active, seqs.num_computed[rows], 0)
    cu_q_lens = jnp.concatenate([jnp.zeros_like(take[:1]), jnp.cumsum(take, dtype=jnp.int32)])
    owners, rank, is_valid = ragged_indices(take, width)
    positions = jnp.where(is_valid, computed[owners] + rank, 0)
    blocks = cache.tables.blocks[:, rows]
    # What was hit is in the cache already, in blocks that others may hold.
    is_written = is_valid & (positions >= seqs.num_hit[rows[owners]])
    slots = find_slots(
        blocks,
        owners,
        positions,
        is_written,
        block_size=config.block_size,
        num_slots=config.num_slots,
    )
    return Batch(
        tokens=jnp.where(is_valid, seqs.tokens[rows[owners], positions], 0),
        positions=positions,
        slots=slots,
        block_tables=blocks,
        kv_lens=jnp.where(is_active, computed + take, 0),
        cu_q_lens=cu_q_lens,
        num_seqs=jnp.minimum(seqs.num_running, take.shape[0]),
        rows=rows,
        is_sampled=(take > 0) & (computed + take == seqs.num_tokens[rows]),
    )
