"""From logits to one token a row: greedy, or temperature, min_p, top_k and top_p, with randomness that is the request's own.

No row pays for what it does not ask: a step whose rows are all greedy takes the maximum and nothing else. The filters are
exact without a sort of the vocabulary. Each asks for the largest threshold t at which {x >= t} weighs enough (top_k: count;
top_p: mass), and the first `CANDIDATES` values in order nearly always hold it; where they do not (a flat distribution with a
wide nucleus, a large k), a bisection over the bits of a float32 finds it. Tokens equal to the threshold all stay.

Measured on two CPU cores at 64 x 49152: a full sort 457 ms, `lax.top_k` of 64 11 ms, of 256 20 ms, 32 bisection passes 122 ms;
the head of 128 by columns 9 ms where `lax.top_k` takes 19. Four or eight thresholds a pass are slower than two halves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt

CANDIDATES = 128
HEAD_DEPTH = 16  # the vocabulary is laid out in columns of this many tokens to find its largest
DRAW_BLOCK = 256  # the vocabulary is drawn from in two stages: a block of this many tokens, then a token in it


class SamplingRows(struct.PyTreeNode):
    """Sampling parameters of each row."""

    temperature: Float[Array, "R"]  # 0: greedy, and the filters are off
    top_k: Int[Array, "R"]  # 0: off
    top_p: Float[Array, "R"]  # 1: off
    min_p: Float[Array, "R"]  # 0: off
    seed: UInt[Array, "R"]
    min_len: Int[Array, "R"]  # length, prompt included, before which no stop id may come
    stop_ids: Int[Array, "R K"]  # end-of-text and stop token ids, -1 behind them


def sample(
    logits: Float[Array, "S V"], rows: SamplingRows, lengths: Int[Array, "S"], wanted
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """The next token of each row that is `wanted`, and its log-probability under the raw logits (before any filter).

    `lengths` counts the tokens that each row has: the position of the new one. Rows not wanted get a token that means
    nothing. A row's token depends on its logits, parameters, seed and position alone, its log-probability also, to the last
    bit or so, on the number of rows.
    """
    early = wanted & (lengths < rows.min_len)
    special = wanted & ((rows.temperature > 0) | early)
    tokens = jax.lax.cond(
        jnp.any(special), lambda: _sample_any(logits, rows, lengths, early), lambda: _first_maximum(logits)
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, axis=1)


def _first_maximum(logits: Array) -> Array:
    """argmax, as two reductions that a CPU vectorises; a row of NaN gives the last token, never one outside."""
    vocab = jnp.arange(logits.shape[1], dtype=jnp.int32)
    best = jnp.max(logits, axis=1, keepdims=True)
    return jnp.min(jnp.where(logits == best, vocab, logits.shape[1] - 1), axis=1)


def _sample_any(logits: Array, rows: SamplingRows, lengths: Array, early: Array) -> Array:
    # A stop id that is not yet allowed is masked; -1 pads and must not wrap to the last token.
    masked = jnp.where(early[:, None] & (rows.stop_ids >= 0), rows.stop_ids, logits.shape[1])
    logits = logits.at[jnp.arange(logits.shape[0])[:, None], masked].set(-jnp.inf, mode="drop")
    greedy = _first_maximum(logits)
    warm = rows.temperature > 0
    # The maximum first: a quotient could pass float32. The barrier: thresholds are compared with these very values, which XLA
    # must not compute again, in another order, where they are used.
    scaled = (logits - jnp.max(logits, axis=1, keepdims=True)) / jnp.where(warm, rows.temperature, 1)[:, None]
    scaled = jax.lax.optimization_barrier(scaled)
    filtered = warm & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    threshold = jax.lax.cond(
        jnp.any(filtered),
        lambda: filter_threshold(scaled, rows, warm),
        lambda: jnp.full_like(rows.temperature, -jnp.inf),
    )
    kept = jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0)
    keys = jax.vmap(lambda seed, length: jax.random.fold_in(jax.random.key(seed), length))(rows.seed, lengths)
    return jnp.where(warm, _draw(kept, jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)), greedy)


def filter_threshold(scaled: Float[Array, "S V"], rows: SamplingRows, active) -> Float[Array, "S"]:
    """The smallest scaled logit (its row's maximum is 0) that min_p, then top_k, then top_p leave; -inf leaves all.

    top_p counts the mass that min_p and top_k left.
    """
    vocab = scaled.shape[1]
    best = _head(scaled, min(CANDIDATES, vocab))

    def narrow(is_p, threshold):
        """Leave what top_k leaves, then what top_p leaves: a loop, so that the search is compiled once."""

        def weigh(x):
            return jnp.where(is_p, jnp.where(x >= threshold[:, None], jnp.exp(x), 0), 1)

        use_k, use_p = (rows.top_k > 0) & (rows.top_k < vocab), rows.top_p < 1
        use = active & jnp.where(is_p, use_p, use_k)
        goal = jnp.where(is_p, rows.top_p * jnp.sum(weigh(scaled), axis=1), rows.top_k)
        found = _largest_threshold(scaled, best, weigh, goal, use)
        return jnp.maximum(threshold, jnp.where(use, found, -jnp.inf))

    threshold = jnp.where(rows.min_p > 0, jnp.log(rows.min_p), -jnp.inf)
    return jax.lax.fori_loop(0, 2, lambda i, threshold: narrow(i == 1, threshold), threshold)


def _head(x: Float[Array, "S V"], count: int) -> Float[Array, "S count"]:
    """The `count` largest values of each row, in order. All stand in the `count` columns whose maxima are the largest."""
    rows, vocab = x.shape
    columns = jnp.pad(x, ((0, 0), (0, -vocab % HEAD_DEPTH)), constant_values=-jnp.inf).reshape(rows, HEAD_DEPTH, -1)
    if columns.shape[2] > count:
        _, best = jax.lax.top_k(jnp.max(columns, axis=1), count)
        columns = jnp.take_along_axis(columns, best[:, None], axis=2)
    return jax.lax.top_k(columns.reshape(rows, -1), count)[0]


def _largest_threshold(x: Array, best: Array, weigh: Callable, goal: Array, active: Array) -> Array:
    """For each active row the largest t such that the elements >= t weigh `goal` together; `best` is the head of x in order."""
    enough = jnp.cumsum(weigh(best), axis=1) >= goal[:, None]
    found = jnp.any(enough, axis=1)
    at = jnp.take_along_axis(best, jnp.argmax(enough, axis=1)[:, None], axis=1)[:, 0]

    # Bisection over the floats in order. Rows found above start with an empty interval; with none open it takes no trip.
    low = jnp.where(active & ~found, _order(jnp.full_like(at, -jnp.inf)), _order(at))
    high = jnp.where(active & ~found, _order(best[:, -1]), _order(at))

    def halve(interval):
        low, high = interval
        middle = low + (high - low + 1) // 2
        heavy = jnp.sum(jnp.where(x >= _unorder(middle)[:, None], weigh(x), 0), axis=1) >= goal
        return jnp.where(heavy, middle, low), jnp.where(heavy, high, middle - 1)

    low, _ = jax.lax.while_loop(lambda c: jnp.any(c[0] < c[1]), halve, (low, high))
    return _unorder(low)


def _order(x: Array) -> Array:
    """Integers in the order of float32 values that are 0 or below: what is less compares less, neighbours differ by one."""
    return -jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _unorder(key: Array) -> Array:
    return -jax.lax.bitcast_convert_type(-key, jnp.float32)


def _draw(weights: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, "S"]:
    """One index a row, with probability proportional to its weight: first a block by its sum, then an index in the block."""
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % DRAW_BLOCK))).reshape(rows, -1, DRAW_BLOCK)
    block = _invert(jnp.sum(blocks, axis=2), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * DRAW_BLOCK + _invert(inside, uniforms[:, 1])


def _invert(weights: Array, uniform: Array) -> Array:
    """The first index of positive weight at which the running sum passes `uniform` of the total.

    A running sum in floating point may rise by rounding where a weight is 0, and `uniform` of the total may round up to it.
    """
    sums = jnp.cumsum(weights, axis=1)
    positions = jnp.arange(weights.shape[1], dtype=jnp.int32)
    positive = weights > 0
    passed = positive & (sums > uniform[:, None] * sums[:, -1:])
    first = jnp.min(jnp.where(passed, positions, weights.shape[1]), axis=1)
    return jnp.minimum(first, jnp.max(jnp.where(positive, positions, 0), axis=1))
