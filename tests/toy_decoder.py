"""A decoder whose next token is a known function of the whole context, read from the pages: a
scheduling fault changes it.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.kv_group import attention_group


class ToyDecoder(nnx.Module):
    """Stores each token's id as its K and minus it as its V; the next token is a weighted sum of
    the visible context mod V.
    """

    def __init__(self, vocab_size=97, windows=(None,), max_model_len=64):
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.num_kv_heads, self.head_dim, self.dtype = 1, 1, "float32"
        self.eos_token_ids = ()
        self.windows = tuple(windows)
        self.kv_groups = tuple(attention_group(window, 1) for window in windows)

    def __call__(self, tokens, batch, k_pages, v_pages):
        k, v = k_pages[0], v_pages[0]
        block_size = k.shape[1]
        ids = tokens.astype(k.dtype)[:, None, None]
        total = 0
        lens = batch.kv_lens
        for g in range(len(self.kv_groups)):
            block, offset = batch.slots[g] // block_size, batch.slots[g] % block_size
            k = k.at[block, offset].set(ids, mode="drop")
            v = v.at[block, offset].set(-ids, mode="drop")
        for g, window in enumerate(self.windows):
            table = batch.block_tables[g]
            seen_k = k[table].reshape(table.shape[0], -1)
            seen_v = v[table].reshape(table.shape[0], -1)
            position = jnp.arange(seen_k.shape[1])
            seen = position < lens[:, None]
            if window is not None:
                seen &= position >= lens[:, None] - window
            weights = (position % 7 + 1) * (g + 1)
            total += jnp.sum(jnp.where(seen, (2 * seen_k + seen_v) * weights, 0), axis=1)
        taking = batch.cu_q_lens[1:] > batch.cu_q_lens[:-1]
        last = jnp.where(taking, batch.cu_q_lens[1:] - 1, tokens.shape[0])
        hidden = (
            jnp.full((tokens.shape[0], 1), jnp.nan)
            .at[last]
            .set((total % self.vocab_size)[:, None], mode="drop")
        )
        return hidden, (k,), (v,)

    def logits(self, hidden):
        return -jnp.abs(jnp.arange(self.vocab_size) - hidden.astype(jnp.float32))

    def next_token(self, context):
        """The plain model of the same."""
        total = 0
        for g, window in enumerate(self.windows):
            first = 0 if window is None else max(len(context) - window, 0)
            total += sum(context[p] * (p % 7 + 1) * (g + 1) for p in range(first, len(context)))
        return total % self.vocab_size

    def continuation(self, prompt, count):
        context = list(prompt)
        for _ in range(count):
            context.append(self.next_token(context))
        return context[len(prompt) :]


def random_prompts(seed, lengths, vocab_size=97):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in lengths]
