"""A step's tokens through the decoder, in passes of compiled widths.

A step has any number of tokens, and a decoder is compiled for a few: the widths. Nearly always one
pass of the narrowest width that holds them is best. A wide one that would be more than a quarter
padding is cut into narrower ones, for wide products cost what their rows cost. Narrow products cost
what reading the weights costs, and that is once a pass.

    widths 1 2 4 ... 256    300 tokens -> 256, 64      9 tokens -> 16      520 tokens -> 256, 256, 8
    widths 64 512           300 tokens -> 512

Tokens go in order, so that what a pass reads is written: by an earlier one, or by itself.

On a GPU the widths up to the number of rows are for steps of one pass; other steps are cut into
passes of the widths above it. Which widths there are: `default_sizes.choose_widths` and
`config.token_widths`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paged_jax.arrays import apply_if
from paged_jax.cache.pages import KVCache
from paged_jax.kernels.target_device import target_device_kind
from paged_jax.scheduling.batch import Batch, Slice, cut_slice, first_slice

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
    narrowest = first_slice(batch, widths[0])
    shapes = jax.eval_shape(lambda: model(narrowest.tokens, narrowest, kv.k_pages, kv.v_pages))
    shape = (batch.rows.shape[0], shapes[0].shape[1])
    hidden = jnp.full_like(batch.tokens, 0, shape=shape, dtype=shapes[0].dtype)
    is_on_gpu = target_device_kind() is not None
    return (decode_by_switch if is_on_gpu else decode_in_loops)(model, batch, hidden, kv, widths)


def decode_in_loops(
    model: Any, batch: Batch, hidden: Float[Array, "S d"], kv: KVCache, widths: tuple[int, ...]
) -> tuple[Float[Array, "S d"], KVCache]:
    """Run the passes, each width in a loop of its own: a CPU's conditionals copy the pages.

    With n widths a step reads n + 1 predicates, or more.
    """
    cut = cut_slice if can_cut(widths, batch.tokens.shape[0]) else None
    carry = (hidden, kv, batch.num_tokens)
    for i, width in reversed(list(enumerate(widths))):

        def one_pass(carry, width=width):
            hidden, kv, left = carry
            seen = cut(batch, batch.num_tokens - left, width) if cut else first_slice(batch, width)
            hidden, kv = _run_pass(model, seen, hidden, kv)
            return hidden, kv, jnp.maximum(left - width, 0)

        with jax.named_scope(f"width_{width}"):
            again = partial(takes_pass, width=width, narrower=widths[:i])
            carry = jax.lax.while_loop(lambda c, again=again: again(c[2]), one_pass, carry)
    return carry[0], carry[1]


def decode_by_switch(
    model: Any, batch: Batch, hidden: Float[Array, "S d"], kv: KVCache, widths: tuple[int, ...]
) -> tuple[Float[Array, "S d"], KVCache]:
    """Run the passes with one read of the host for a step that one token a row makes.

    A GPU waits for the host at each predicate, and one switch chooses of any number of widths. All
    its branches write the pages, so none copies them. A step of more tokens than rows may take
    several passes, in a loop that is the switch's last branch.
    """
    few, many = split_widths(widths, batch.rows.shape[0], batch.tokens.shape[0])

    def one_pass(cut, width, carry):
        with jax.named_scope(f"width_{width}"):
            return _run_pass(model, cut(width), *carry)

    first: Any = partial(first_slice, batch)
    branches: list[Any] = [partial(one_pass, first, width) for width in few]
    if many:
        branches.append(partial(_run_many, one_pass, batch, many))
    number = jnp.sum(batch.num_tokens > jnp.array(few, jnp.int32), dtype=jnp.int32)
    with jax.named_scope("passes"):
        return jax.lax.switch(jnp.minimum(number, len(branches) - 1), branches, (hidden, kv))


def split_widths(
    widths: tuple[int, ...], num_rows: int, budget: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the widths of which one pass holds its step, and those of which several may be run.

    Example, 64 rows, budget 512, widths 1, 8, 64, 128, 256, 512: (1, 8, 64), (128, 256, 512).
    Widths 64, 512: both, none.
    """
    count = min(sum(width <= num_rows for width in widths), len(widths) - 1)
    few, many = widths[:count], widths[count:]
    return (few, many) if can_cut(many, budget) else (widths, ())


def _run_many(one_pass, batch: Batch, widths: tuple[int, ...], carry):
    """Run passes of these widths until all tokens are computed."""

    def run_next(carry):
        *carry, left = carry
        start = batch.num_tokens - left
        takes = [takes_pass(left, width, widths[:i]) for i, width in enumerate(widths)]
        number = jnp.max(jnp.where(jnp.stack(takes), jnp.arange(len(widths), dtype=jnp.int32), 0))
        cut = partial(cut_slice, batch, start)
        branches = [partial(one_pass, cut, width) for width in widths]
        hidden, kv = jax.lax.switch(number, branches, tuple(carry))
        return hidden, kv, jnp.maximum(left - jnp.array(widths, jnp.int32)[number], 0)

    return jax.lax.while_loop(lambda c: c[2] > 0, run_next, (*carry, batch.num_tokens))[:2]


def _run_pass(
    model: Any, seen: Slice, hidden: Float[Array, "S d"], kv: KVCache
) -> tuple[Float[Array, "S d"], KVCache]:
    """Run the decoder over a slice, and keep the hidden states of the sequences that end in it."""
    with jax.named_scope("decoder"):
        new, k_pages, v_pages = model(seen.tokens, seen, kv.k_pages, kv.v_pages)
    place = jnp.arange(seen.kv_lens.shape[0], dtype=jnp.int32)
    place = jnp.where(seen.is_ended, seen.first_place + place, hidden.shape[0])
    hidden = hidden.at[place].set(new[seen.last_tokens], mode="drop")
    return hidden, KVCache(k_pages, v_pages)


def head(
    model: Any, hidden: Float[Array, "S d"], count: Int[Array, ""], widths: tuple[int, ...]
) -> Float[Array, "S V"]:
    """Return the logits of the first `count` hidden states, and anything behind them.

    A GPU reads all weights for one row or for all, and would wait for the host to know how many.
    """
    num_places = hidden.shape[0]
    narrow = [width for width in widths if width < num_places]
    if not narrow or target_device_kind() is not None:
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
