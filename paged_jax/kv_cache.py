"""The pages: where K and V of every block are stored.

Groups of equal page shape draw on one pool and share the arrays by position in the group: with layers full, window, full,
window there are two arrays of each kind, and a block holds either two full layers or two window layers.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float


class KVCache(struct.PyTreeNode):
    """One pair of page arrays for each layer position."""

    k_pages: tuple[Float[Array, "N block_size kv_heads head_dim"], ...]
    v_pages: tuple[Float[Array, "N block_size kv_heads head_dim"], ...]


def init_pages(num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype) -> KVCache:
    """Zeroed pages; what they hold before a write never matters."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    pages = [tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2)]
    return KVCache(*pages)
