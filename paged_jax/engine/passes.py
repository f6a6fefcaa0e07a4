"""A step's tokens through the decoder, in passes of compiled widths.

A step has any number of tokens, and a decoder is compiled for a few: the widths. Nearly always one
pass of the narrowest width that holds them is best. A wide one that would be more than a quarter
padding is cut into narrower ones, for wide products cost what their rows cost. Narrow products cost
what reading the weights costs, and that is once a pass.

    widths 1 2 4 ... 256    300 tokens -> 256, 64      9 tokens -> 16      520 tokens -> 256, 256, 8
    widths 64 512           300 tokens -> 512

Tokens go in order, so that what a pass reads is written: by an earlier one, or by itself.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paged_jax.arrays import apply_if
from paged_jax.cache.pages import KVCache
from paged_jax.scheduling.batch import Batch, cut_slice, first_slice

NARROW = 64  # a width of up to so many tokens is never cut: its time is that of reading the weights


def can_cut(widths: tuple[int, ...], budget: int) -> bool:
    """Return whether a step of up to `budget` tokens may take several passes."""
    return budget > widths[-1] or any(
        width > NARROW and sum(widths[:i]) > max(widths[:i], default=0)
        for i, width in enumerate(widths)
    )


def takes_pass(left: Any, width: int, narrower: tuple[int, ...]) -> Any:
    """Return whether `left` tokens, an int or an array, begin with a pass of that width.

    The widths are asked in descending order, each until it says no. It must not where the narrower
    ones together hold too little.
    """
    if not narrower:
        return left > 0
    is_needed = (left > sum(narrower)) | (left >= width)
    is_full = (width <= NARROW) | (4 * left >= 3 * width)
    return is_needed | ((left > narrower[-1]) & is_full)


def decode(
    model: Any, batch: Batch, kv: KVCache, widths: tuple[int, ...]
) -> tuple[Float[Array, "S d"], KVCache]:
    """Run the decoder over the batch.

    Returns the hidden state of each sequence's last token, and the pages with this step's K and V.
    """
    is_cut = can_cut(widths, batch.tokens.shape[0])
    narrowest = first_slice(batch, widths[0])
    shapes = jax.eval_shape(lambda: model(narrowest.tokens, narrowest, kv.k_pages, kv.v_pages))
    shape = (batch.rows.shape[0], shapes[0].shape[1])
    hidden = jnp.full_like(batch.tokens, 0, shape=shape, dtype=shapes[0].dtype)
    carry = (hidden, kv, batch.num_tokens)
    for i, width in reversed(list(enumerate(widths))):

        def one_pass(carry, width=width):
            hidden, kv, left = carry
            if is_cut:
                seen = cut_slice(batch, batch.num_tokens - left, width)
            else:
                seen = first_slice(batch, width)
            with jax.named_scope("decoder"):
                new, k_pages, v_pages = model(seen.tokens, seen, kv.k_pages, kv.v_pages)
            place = jnp.arange(seen.kv_lens.shape[0], dtype=jnp.int32)
            place = jnp.where(seen.is_ended, seen.first_place + place, hidden.shape[0])
            hidden = hidden.at[place].set(new[seen.last_tokens], mode="drop")
            return hidden, KVCache(k_pages, v_pages), jnp.maximum(left - width, 0)

        with jax.named_scope(f"width_{width}"):
            again = partial(takes_pass, width=width, narrower=widths[:i])
            carry = jax.lax.while_loop(lambda c, again=again: again(c[2]), one_pass, carry)
    return carry[0], carry[1]


def head(
    model: Any, hidden: Float[Array, "S d"], count: Int[Array, ""], widths: tuple[int, ...]
) -> Float[Array, "S V"]:
    """Return the logits of the first `count` hidden states, and anything behind them."""
    num_places = hidden.shape[0]
    narrow = [width for width in widths if width < num_places]
    if not narrow:
        return model.logits(hidden)
    shape = jax.eval_shape(model.logits, hidden)
    logits = jnp.full_like(hidden, 0, shape=shape.shape, dtype=shape.dtype)
    below = jnp.zeros_like(count)
    for width in [*narrow, num_places]:
        fits: Bool[Array, ""] = (count > below) & (count <= width)

        def project(logits, width=width):
            return logits.at[:width].set(model.logits(hidden[:width]))

        logits = apply_if(fits, project, logits)
        below = jnp.full_like(count, width)
    return logits
