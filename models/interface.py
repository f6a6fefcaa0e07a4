"""What the engine asks of a decoder, and what it passes to one."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from paged_jax.kv_group import KVGroup


@runtime_checkable
class TokenBatch(Protocol):
    """One step's T tokens, flattened in order of their S sequences at most; G KV-cache groups.

    Attributes:
        positions: position of each token in its sequence.
        slots: block * block_size + offset; out of range where no K and V are to be written.
        kv_lens: tokens of each sequence in the cache once this step's are written.
        cu_q_lens: sequence s owns tokens cu_q_lens[s] to cu_q_lens[s + 1].
        num_seqs: sequences from here on are padding.
    """

    positions: Int[Array, "T"]
    slots: Int[Array, "G T"]
    block_tables: Int[Array, "G S M"]
    kv_lens: Int[Array, "S"]
    cu_q_lens: Int[Array, "S+1"]
    num_seqs: Int[Array, ""]


type Pages = tuple[Float[Array, "N block_size kv_heads head_dim"], ...]


@runtime_checkable
class Decoder(Protocol):
    """A causal language model over paged K and V.

    Attributes:
        dtype: of the K and V that it writes, unless the pages are of another.
        kv_groups: kind and number of layers of each KV-cache group, see `paged_jax.kv_group`.
    """

    vocab_size: int
    max_model_len: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]

    def __call__(
        self, tokens: Int[Array, "T"], batch: TokenBatch, k_pages: Pages, v_pages: Pages
    ) -> tuple[Float[Array, "T d"], Pages, Pages]:
        """Return hidden states after the final norm, and the pages with this step's K, V."""
        ...

    def logits(self, hidden: Float[Array, "S d"]) -> Float[Array, "S V"]:
        """Return float32 logits."""
        ...
