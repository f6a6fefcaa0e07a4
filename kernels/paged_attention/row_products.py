"""The two products of decoding rows on a CPU, queries with keys and weights with values.

There are three forms, which agree on everything but the layout:

- By KV head: keys and values are gathered as [G, KV, L, D], and each KV head is a product itself.
- The same for all: the rows see the same blocks, those of a shared prefix. They are gathered once,
  and the queries of all rows are one product a KV head. 32 rows at 560 tokens of context, of which
  512 are shared, took 0.5 of the time.
- Of all heads: the heads' queries form a block diagonal in [H, KV * D], and keys and values stay as
  they lie in the pages. This multiplies (KV - 1) / KV zeros and is one product a row.

On two cores, 9 query heads, 3 KV heads, head_dim 64, one row: of all heads took 0.7 of the time at
1000 tokens of context, because XLA's thread pool is woken for the other form. At 64 rows in groups
of 8 it took 1.2 times as long, and one row of 32 query heads, 8 KV heads, head_dim 128 twice.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from .online_softmax import dot

MOST_HEADS_AT_ONCE = 4  # KV heads


class ByHead(NamedTuple):
    """The form by KV head."""

    kv_heads: int

    def lay_out(self, queries: Float[Array, "n G H D"]) -> Float[Array, "n G KV R D"]:
        """Return the queries as `score` takes them, for each group of rows."""
        return queries.reshape(*queries.shape[:2], self.kv_heads, -1, queries.shape[3])

    def arrange(self, pages: Float[Array, "G blocks B KV D"]) -> Float[Array, "G KV L D"]:
        """Return pages as `score` and `weigh` take them."""
        return by_head(pages)

    def spread(self, visible: Bool[Array, "G L"]) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """Return which keys are seen: against scores and against values."""
        return visible[:, None, None], visible[:, None, :, None]

    def score(self, queries, keys) -> Float[Array, "G KV R L"]:
        """Return the scores."""
        # XLA packs its right operand anew at each call: here the few queries, not the keys.
        scores = lax.optimization_barrier(dot("gkld,gkrd->gklr", keys, queries))
        return scores.swapaxes(2, 3)

    def weigh(self, weights, values) -> Float[Array, "G KV R D"]:
        """Return the weighted sums of values."""
        return dot("gkrl,gkld->gkrd", weights, values)


class SameForAll(NamedTuple):
    """The form by KV head for rows that all read the same blocks, which are read once.

    The methods of `ByHead` but `lay_out`, which is the same. Sums are rounded in another order.
    """

    kv_heads: int

    def arrange(self, pages: Float[Array, "G blocks B KV D"]) -> Float[Array, "KV L D"]:
        """Return the pages of the first row."""
        return by_head(pages[0])

    def spread(self, visible: Bool[Array, "G L"]) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """Return which keys are seen: by each row, against scores, and by any, against values."""
        return visible[:, None, None], visible.any(0)[:, None]

    def score(self, queries, keys) -> Float[Array, "G KV R L"]:
        """Return the scores."""
        return dot("gkrd,kld->gkrl", queries, keys)

    def weigh(self, weights, values) -> Float[Array, "G KV R D"]:
        """Return the weighted sums of values."""
        return dot("gkrl,kld->gkrd", weights, values)


class OfAllHeads(NamedTuple):
    """The form of all heads, with the methods of `ByHead`."""

    kv_heads: int

    def lay_out(self, queries: Float[Array, "n G H D"]) -> Float[Array, "n G H X"]:
        """Return the queries as a block diagonal."""
        queries = jnp.where(self._is_own(queries.shape[2]), queries[:, :, :, None], 0)
        return queries.reshape(*queries.shape[:3], -1)

    def arrange(self, pages: Float[Array, "G blocks B KV D"]) -> Float[Array, "G L X"]:
        """Return pages with the KV heads side by side."""
        return pages.reshape(pages.shape[0], -1, pages.shape[3] * pages.shape[4])

    def spread(self, visible: Bool[Array, "G L"]):
        """Return which keys are seen: against scores and against values."""
        return visible[:, None], visible[:, :, None]

    def score(self, queries, keys) -> Float[Array, "G H L"]:
        """Return the scores."""
        return dot("ghx,glx->ghl", queries, keys)

    def weigh(self, weights, values) -> Float[Array, "G H D"]:
        """Return the weighted sums of values, of which each head keeps its own."""
        sums = dot("ghl,glx->ghx", weights, values)
        sums = sums.reshape(*sums.shape[:2], self.kv_heads, -1)
        return jnp.where(self._is_own(sums.shape[1]), sums, 0).sum(2)

    def _is_own(self, num_heads: int):
        """Return which KV head each query head has: [H, KV, 1]."""
        of_head = np.arange(num_heads)[:, None] // (num_heads // self.kv_heads)
        return (of_head == np.arange(self.kv_heads))[:, :, None]


def choose_products(kv_heads: int, num_rows: int) -> ByHead | OfAllHeads:
    """Return the form for groups of `num_rows` rows."""
    is_one_product = num_rows == 1 and kv_heads <= MOST_HEADS_AT_ONCE
    return OfAllHeads(kv_heads) if is_one_product else ByHead(kv_heads)


def by_head(pages: Float[Array, "*tiles blocks B KV D"]) -> Float[Array, "*tiles KV L D"]:
    """Put KV heads before tokens."""
    *tiles, blocks, block_size, kv_heads, head_dim = pages.shape
    pages = jnp.moveaxis(pages, -2, -4)
    return pages.reshape(*tiles, kv_heads, blocks * block_size, head_dim)
