"""One step's tokens, flattened.

running places      0       1    2          take 3, 1, 2
tokens              a b c   d    e f  - -   owners 0 0 0 1 2 2, padding behind
cu_q_lens           0       3    4     6

The decoder computes them in passes of compiled widths (`engine.passes`), each over a `Slice`.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from paged_jax.arrays import compact, ragged_indices
from paged_jax.cache.block_table import find_slots
from paged_jax.cache.paged_cache import PagedCache
from paged_jax.scheduling.sequences import Sequences, running_rows


class Batch(struct.PyTreeNode):
    """T tokens of S sequences at most, G KV-cache groups.

    Attributes:
        owners: sequence of each token.
        kv_lens: tokens of each sequence in the cache once this step's are written.
        rows: row of each sequence, R behind them.
        take: tokens of each sequence in the batch.
        is_sampled: whether the sequence's last token is in the batch: it gets a new one.
    """

    tokens: Int[Array, "T"]
    owners: Int[Array, "T"]
    positions: Int[Array, "T"]
    slots: Int[Array, "G T"]
    block_tables: Int[Array, "G S M"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, ""]
    rows: Int[Array, "S"]
    take: Int[Array, "S"]
    is_sampled: Bool[Array, "S"]

    @property
    def num_tokens(self) -> Int[Array, ""]:
        """Return how many of the T tokens are real."""
        return self.cu_q_lens[-1]


class Slice(struct.PyTreeNode):
    """W tokens of a batch, of s sequences at most: a `paged_jax.models.TokenBatch` and more.

    Attributes:
        first_place: place in the batch of its first sequence.
        last_tokens: index of each sequence's last token among the W.
        is_ended: whether a sequence's last token of the batch is in the slice.
    """

    tokens: Int[Array, "W"]
    positions: Int[Array, "W"]
    slots: Int[Array, "G W"]
    block_tables: Int[Array, "G s M"]
    kv_lens: Int[Array, "s"]
    cu_q_lens: Int[Array, "s+1"]
    num_seqs: Int[Array, ""]
    first_place: Int[Array, ""]
    last_tokens: Int[Array, "s"]
    is_ended: Bool[Array, "s"]


def build_batch(cache: PagedCache, seqs: Sequences, take: Int[Array, "S"], length: int) -> Batch:
    """Gather the tokens that each running place takes, `length` at most."""
    config = cache.config
    rows, is_active = running_rows(seqs)
    rows = jnp.where(is_active & (take > 0), rows, seqs.num_rows)
    num_seqs = seqs.num_running
    if seqs.beams is not None:  # a dormant beam has a place, but no token
        is_taking = take > 0
        rows, num_seqs = compact(rows, is_taking, seqs.num_rows)
        take, _ = compact(take, is_taking, 0)
    computed = jnp.where(take > 0, seqs.num_computed[rows], 0)
    cu_q_lens = jnp.concatenate([jnp.zeros_like(take[:1]), jnp.cumsum(take, dtype=jnp.int32)])
    owners, rank, is_valid = ragged_indices(take, length)
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
        owners=owners,
        positions=positions,
        slots=slots,
        block_tables=blocks,
        kv_lens=computed + take,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        rows=rows,
        take=take,
        is_sampled=(take > 0) & (computed + take == seqs.num_tokens[rows]),
    )


def first_slice(batch: Batch, width: int) -> Slice:
    """Return the first `width` tokens, of a batch that has no more."""
    places = min(width, batch.rows.shape[0])
    return Slice(
        tokens=batch.tokens[:width],
        positions=batch.positions[:width],
        slots=batch.slots[:, :width],
        block_tables=batch.block_tables[:, :places],
        kv_lens=batch.kv_lens[:places],
        cu_q_lens=batch.cu_q_lens[: places + 1],
        num_seqs=jnp.minimum(batch.num_seqs, places),
        first_place=jnp.zeros_like(batch.num_seqs),
        last_tokens=jnp.maximum(batch.cu_q_lens[1 : places + 1] - 1, 0),
        is_ended=batch.take[:places] > 0,
    )


def cut_slice(batch: Batch, start: Int[Array, ""], width: int) -> Slice:
    """Return `width` tokens from `start` on, padding behind the last real one.

    Tokens before `start` are in the cache by then. Of a sequence that goes on behind the slice,
    `kv_lens` counts what stands before the slice's end.

        cu_q_lens 0 3 4 6, start 2, width 3: tokens c d e, cu_q_lens 0 1 2 3, sequence 2 ends later
    """
    places = min(width, batch.rows.shape[0])
    at = start + jnp.arange(width, dtype=jnp.int32)
    first = batch.owners[start]
    place = first + jnp.arange(places, dtype=jnp.int32)

    def tokens(x, behind):
        return x.at[..., at].get(mode="fill", fill_value=behind)

    def places_of(x, behind):
        return x.at[place].get(mode="fill", fill_value=behind)

    is_owned, end = place < batch.rows.shape[0], batch.num_tokens
    ends = jnp.where(is_owned, places_of(batch.cu_q_lens[1:], 0), end) - start
    begins = batch.cu_q_lens[first] - start
    cu_q_lens = jnp.clip(jnp.concatenate([begins[None], ends]), 0, width)
    inside = jnp.minimum(place, batch.rows.shape[0] - 1)
    return Slice(
        tokens=tokens(batch.tokens, 0),
        positions=tokens(batch.positions, 0),
        slots=tokens(batch.slots, jnp.iinfo(jnp.int32).max),
        block_tables=batch.block_tables[:, inside],
        kv_lens=jnp.where(is_owned, batch.kv_lens[inside] - jnp.maximum(ends - width, 0), 0),
        cu_q_lens=cu_q_lens,
        num_seqs=jnp.clip(batch.num_seqs - first, 0, places),
        first_place=first,
        last_tokens=jnp.maximum(cu_q_lens[1:] - 1, 0),
        is_ended=is_owned & (batch.take[inside] > 0) & (ends <= width),
    )
