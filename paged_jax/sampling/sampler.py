"""From logits to one token a row: greedy, or temperature, min_p, top_k and top_p.

The randomness is the request's own. No row pays for what it does not ask: a step of greedy rows
takes the maximum and nothing else.

The filters are exact without a sort of the vocabulary. Each needs the largest threshold t at which
{x >= t} weighs enough (top_k: count; top_p: mass). The first `CANDIDATES` values in order nearly
always hold it. Where they do not (a flat distribution with a wide nucleus, a large k), a bisection
over the bits of a float32 finds it. Tokens equal to the threshold all stay.

Measured on two CPU cores at 64 x 49152: a full sort 457 ms, `lax.top_k` of 64 11 ms, of 256 20 ms,
32 bisection passes 122 ms. The head of 128 by columns takes 9 ms, `lax.top_k` 19. Four or eight
thresholds a pass are slower than two halves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paged_jax.arrays import ceil_div, count_to_last
from paged_jax.sampling.rows import SamplingRows
from paged_jax.sampling.streams import uniforms

CANDIDATES = 128
HEAD_DEPTH = (
    16  # tokens of a column, when the vocabulary is laid out in columns to find its largest
)
ROWS_AT_A_TIME = 8  # sampled together on a CPU
DRAW_BLOCK = 256  # tokens of a block, when one is drawn in two stages: a block, then a token in it


def sample(
    logits: Float[Array, "S V"],
    rows: SamplingRows,
    lengths: Int[Array, "S"],
    is_wanted: Bool[Array, "S"],
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Sample the next token of each row that is wanted.

    Also returns its log-probability under the raw logits (before any filter), which is not finite
    where the row has nothing to choose: logits with NaN or inf, or all of them masked. `lengths`
    counts the tokens that each row has: the position of the new one. Other rows get a token that
    means nothing.

    A row's token depends on its logits, parameters, seed and position alone. On a CPU a few rows
    are sampled at a time, so that what is computed of them stays in its cache and rows behind the
    last one wanted cost nothing. Elsewhere all are sampled at once: a loop would wait for the host.
    """
    args = (logits, rows, lengths, is_wanted)
    if logits.shape[0] <= ROWS_AT_A_TIME:
        return _sample_all(*args)
    return jax.lax.platform_dependent(*args, cpu=_sample_by_parts, default=_sample_all)


def _sample_by_parts(
    logits: Float[Array, "S V"],
    rows: SamplingRows,
    lengths: Int[Array, "S"],
    is_wanted: Bool[Array, "S"],
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Sample `ROWS_AT_A_TIME` rows after another, up to the last one wanted.

    The last part may begin early, and samples some rows again.
    """

    def sample_part(i, sampled):
        part = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, i * ROWS_AT_A_TIME, ROWS_AT_A_TIME),
            (logits, rows, lengths, is_wanted),
        )
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_slice_in_dim(
                whole, new, i * ROWS_AT_A_TIME, 0
            ),
            sampled,
            _sample_all(*part),
        )

    num_parts = ceil_div(count_to_last(is_wanted), ROWS_AT_A_TIME)
    start = (jnp.zeros_like(lengths), jnp.full_like(lengths, 0, dtype=logits.dtype))
    return jax.lax.fori_loop(0, num_parts, sample_part, start)


def _sample_all(
    logits: Float[Array, "S V"],
    rows: SamplingRows,
    lengths: Int[Array, "S"],
    is_wanted: Bool[Array, "S"],
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    is_early = is_wanted & (lengths < rows.min_len)
    is_special = is_wanted & ((rows.parameters["temperature"] > 0) | is_early)
    tokens, is_masked = jax.lax.cond(
        jnp.any(is_special),
        lambda: _sample_any(logits, rows, lengths, is_early),
        lambda: (_first_maximum(logits), jnp.zeros_like(is_early)),
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    chosen = jnp.where(is_masked, -jnp.inf, chosen)
    return tokens, chosen - jax.nn.logsumexp(logits, axis=1)


def _first_maximum(logits: Float[Array, "S V"]) -> Int[Array, "S"]:
    """Return the argmax, by two reductions that a CPU vectorises.

    A row of NaN gives the last token, never one outside.
    """
    vocab = jnp.arange(logits.shape[1], dtype=jnp.int32)
    best = jnp.max(logits, axis=1, keepdims=True)
    return jnp.min(jnp.where(logits == best, vocab, logits.shape[1] - 1), axis=1)


def _sample_any(
    logits: Float[Array, "S V"],
    rows: SamplingRows,
    lengths: Int[Array, "S"],
    is_early: Bool[Array, "S"],
) -> tuple[Int[Array, "S"], Bool[Array, "S"]]:
    """Sample rows of any parameters. Also returns which of them have all tokens masked."""
    # A stop id that is not yet allowed is masked; -1 pads and must not wrap to the last token.
    is_masked = is_early[:, None] & (rows.stop_ids >= 0)
    masked = jnp.where(is_masked, rows.stop_ids, logits.shape[1])
    each = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    logits = logits.at[each, masked].set(-jnp.inf, mode="drop")
    greedy = _first_maximum(logits)
    temperature = rows.parameters["temperature"]
    is_warm = temperature > 0
    # Subtract the maximum first: a quotient could pass float32. The barrier: thresholds are
    # compared with these very values. XLA must not recompute them, in another order, at their use.
    centred = logits - jnp.max(logits, axis=1, keepdims=True)
    scaled = centred / jnp.where(is_warm, temperature, 1)[:, None]
    scaled = jax.lax.optimization_barrier(scaled)
    threshold = jax.lax.cond(
        jnp.any(is_warm & _is_filtered(rows)),
        lambda: filter_threshold(scaled, rows, is_warm),
        lambda: jnp.full_like(temperature, -jnp.inf),
    )
    kept = jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0)
    is_empty = jnp.max(logits, axis=1) == -jnp.inf
    return jnp.where(is_warm, _draw(kept, uniforms(rows.seed, lengths)), greedy), is_empty


def _is_filtered(rows: SamplingRows) -> Bool[Array, "R"]:
    """Return whether a row keeps fewer than all tokens."""
    given = rows.parameters
    return (given["top_k"] > 0) | (given["top_p"] < 1) | (given["min_p"] > 0)


def filter_threshold(
    scaled: Float[Array, "S V"], rows: SamplingRows, is_active: Bool[Array, "S"]
) -> Float[Array, "S"]:
    """Return the smallest scaled logit that min_p, then top_k, then top_p leave; -inf leaves all.

    Each row's maximum is 0. top_p counts the mass that min_p and top_k left.
    """
    vocab = scaled.shape[1]
    top_k, top_p, min_p = (rows.parameters[name] for name in ("top_k", "top_p", "min_p"))
    best = _head(scaled, min(CANDIDATES, vocab))

    def narrow(is_p, threshold):
        """Leave what top_k leaves, then what top_p leaves: one body, so it is compiled once."""

        def weigh(x):
            return jnp.where(is_p, jnp.where(x >= threshold[:, None], jnp.exp(x), 0), 1)

        use_k, use_p = (top_k > 0) & (top_k < vocab), top_p < 1
        is_used = is_active & jnp.where(is_p, use_p, use_k)
        goal = jnp.where(is_p, top_p * jnp.sum(weigh(scaled), axis=1), top_k.astype(jnp.float32))
        found = _largest_threshold(scaled, best, weigh, goal, is_used)
        return jnp.maximum(threshold, jnp.where(is_used, found, -jnp.inf))

    threshold = jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf)
    return jax.lax.fori_loop(0, 2, lambda i, threshold: narrow(i == 1, threshold), threshold)


def _head(x: Float[Array, "S V"], count: int) -> Float[Array, "S count"]:
    """Return the `count` largest values of each row, in order.

    All of them stand in the `count` columns with the largest maxima.
    """
    rows, vocab = x.shape
    columns = jnp.pad(x, ((0, 0), (0, -vocab % HEAD_DEPTH)), constant_values=-jnp.inf)
    columns = columns.reshape(rows, HEAD_DEPTH, -1)
    if columns.shape[2] > count:
        _, best = jax.lax.top_k(jnp.max(columns, axis=1), count)
        columns = jnp.take_along_axis(columns, best[:, None], axis=2)
    return jax.lax.top_k(columns.reshape(rows, -1), count)[0]


def _largest_threshold(
    x: Float[Array, "S V"],
    best: Float[Array, "S count"],
    weigh: Callable,
    goal: Float[Array, "S"],
    is_active: Bool[Array, "S"],
) -> Float[Array, "S"]:
    """Return for each active row the largest t such that the elements >= t weigh `goal` together.

    `best` is the head of x in order.

        x 0 -1 -1 -3, each of weight 1, goal 2 -> -1
    """
    is_enough = jnp.cumsum(weigh(best), axis=1) >= goal[:, None]
    is_found = jnp.any(is_enough, axis=1)
    at = jnp.take_along_axis(best, jax.lax.argmax(is_enough, 1, jnp.int32)[:, None], axis=1)[:, 0]

    # Bisection over the floats in order. Rows found above start with an empty interval; where none
    # is open the loop takes no trip.
    is_open = is_active & ~is_found
    low = jnp.where(is_open, _order(jnp.full_like(at, -jnp.inf)), _order(at))
    high = jnp.where(is_open, _order(best[:, -1]), _order(at))

    def halve(interval):
        low, high = interval
        middle = low + (high - low + 1) // 2
        weight = jnp.sum(jnp.where(x >= _unorder(middle)[:, None], weigh(x), 0), axis=1)
        is_heavy = weight >= goal
        return jnp.where(is_heavy, middle, low), jnp.where(is_heavy, high, middle - 1)

    low, _ = jax.lax.while_loop(lambda c: jnp.any(c[0] < c[1]), halve, (low, high))
    return _unorder(low)


def _order(x: Float[Array, "S"]) -> Int[Array, "S"]:
    """Return integers in the order of float32 values that are 0 or below.

    Neighbouring floats differ by one.
    """
    return -jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _unorder(key: Int[Array, "S"]) -> Float[Array, "S"]:
    """Invert `_order`."""
    return -jax.lax.bitcast_convert_type(-key, jnp.float32)


def _draw(weights: Float[Array, "S V"], uniforms: Float[Array, "S 2"]) -> Int[Array, "S"]:
    """Draw one index a row, with probability proportional to its weight.

    First a block is drawn by its sum, then an index in the block.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % DRAW_BLOCK))).reshape(rows, -1, DRAW_BLOCK)
    block = _invert(jnp.sum(blocks, axis=2), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * DRAW_BLOCK + _invert(inside, uniforms[:, 1])


def _invert(weights: Float[Array, "S n"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """Return the first index of positive weight that takes the running sum past `uniform` of it.

        weights 0 1 0 3, uniform 0.25 -> 3;  uniform 0.2 -> 1

    A running sum in floating point may rise by rounding where a weight is 0, and `uniform` of the
    total may round up to it.
    """
    sums = jnp.cumsum(weights, axis=1)
    positions = jnp.arange(weights.shape[1], dtype=jnp.int32)
    is_positive = weights > 0
    has_passed = is_positive & (sums > uniform[:, None] * sums[:, -1:])
    first = jnp.min(jnp.where(has_passed, positions, weights.shape[1]), axis=1)
    return jnp.minimum(first, jnp.max(jnp.where(is_positive, positions, 0), axis=1))
