"""What the engine asks of a decoder, and what it hands to one."""

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, Int


class KVGroup(NamedTuple):
    """Layers that share one block table: `window` is None for full attention, else the sliding window in tokens."""

    window: int | None
    num_layers: int


class TokenBatch(Protocol):
    """One step's T tokens, flattened in order of their sequences; S sequences at most, G KV-cache groups."""

    positions: Int[Array, "T"]  # position of each token in its sequence
    slots: Int[Array, "G T"]  # block * block_size + offset; out of range where no K/V is to be written
    block_tables: Int[Array, "G S M"]
    kv_lens: Int[Array, "S"]  # tokens of each sequence in the cache once this step's are written
    cu_q_lens: Int[Array, "S+1"]  # sequence s owns tokens cu_q_lens[s] to cu_q_lens[s + 1]
    num_seqs: Int[Array, ""]


type Pages = tuple[Float[Array, "N block_size kv_heads head_dim"], ...]


class Decoder(Protocol):
    """A causal language model over paged K and V."""

    vocab_size: int
    max_model_len: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of the K and V that it writes, unless the pages are of another
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]

    def __call__(
        self, tokens: Int[Array, "T"], batch: TokenBatch, k_pages: Pages, v_pages: Pages
    ) -> tuple[Float[Array, "T d"], Pages, Pages]:
        """Hidden states after the final norm, and the pages with this step's K and V written."""
        ...

    def logits(self, hidden: Float[Array, "S d"]) -> Float[Array, "S V"]:
        """Float32 logits."""
        ...
