"""The online softmax of the XLA forms: a softmax-weighted sum of values, a chunk of keys at a time.

Shapes: `*rows` query rows and heads, L keys of a chunk, D = head_dim, W = D + 2.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .scoring import LOWEST, Scoring


class Softmax(NamedTuple):
    """The sums over the keys so far.

    Attributes:
        top: largest score.
        total: sum of exp(score - top).
        acc: sum of exp(score - top) * value.
    """

    top: Float[Array, "*rows 1"]
    total: Float[Array, "*rows 1"]
    acc: Float[Array, "*rows D"]


def start_softmax(queries: Float[Array, "*rows D"]) -> Softmax:
    """Return the sums over no key.

    They are made from an operand, not from constants: a loop's carry then has its sharding.
    """
    acc = jnp.zeros_like(queries, dtype=sum_dtype(queries))
    return Softmax(jnp.full_like(acc[..., :1], LOWEST), jnp.zeros_like(acc[..., :1]), acc)


def add_scores(
    softmax: Softmax,
    scores: Float[Array, "*rows L"],
    visible: Bool[Array, "..."],
    scoring: Scoring,
    exp: Callable = jnp.exp,
) -> tuple[Softmax, Float[Array, "*rows L"]]:
    """Add the scores of a chunk of keys; return the weights by which to sum its values too.

    A row that has seen no key yet adds weights of 1. Its `top` is still LOWEST, so they decay to 0
    once it sees a key; `finish_softmax` drops them if it never does.

    Example: top 0, total 1, acc [4]; scores [log 2, log 3] -> top log 3, weights [2 / 3, 1],
    total 1 / 3 + 2 / 3 + 1 = 2, acc [4 / 3].
    """
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
    scores = jnp.where(visible, scores, LOWEST)
    top = jnp.maximum(softmax.top, scores.max(-1, keepdims=True))
    weights, decay = exp(scores - top), jnp.exp(softmax.top - top)
    total = softmax.total * decay + weights.sum(-1, keepdims=True)
    return Softmax(top, total, softmax.acc * decay), weights


def add_values(softmax: Softmax, values: Float[Array, "*rows D"]) -> Softmax:
    """Add the values of a chunk, summed by the weights of `add_scores`."""
    return softmax._replace(acc=softmax.acc + values)


def pack_softmax(softmax: Softmax) -> Float[Array, "*rows W"]:
    """Pack sums into one array: acc, total, top. `acc` has two columns more, which are replaced.

    Not with a concatenate: XLA's CPU backend compiles each layer's anew, and a select once.
    """
    width = softmax.acc.shape[-1]
    column = jnp.arange(width, dtype=jnp.int32) - (width - 2)
    total_or_top = jnp.where(column == 0, softmax.total, softmax.top)
    return jnp.where(column < 0, softmax.acc, total_or_top)


def unpack_softmax(packed: Float[Array, "*rows W"]) -> Softmax:
    """Return the sums that `pack_softmax` has packed, with two columns more in `acc`.

    They stay: to cut them off here and to pad there took a prefill step 1.15 times as long.
    """
    return Softmax(packed[..., -1:], packed[..., -2:-1], packed)


def pad_values(values: Float[Array, "*rows D"]) -> Float[Array, "*rows D+2"]:
    """Add the two columns that `pack_softmax` replaces."""
    return jnp.pad(values, ((0, 0),) * (values.ndim - 1) + ((0, 2),))


def finish_softmax(
    softmax: Softmax, sinks: Float[Array, "H"] | None, is_owned: Bool[Array, "T"], dtype
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Return (out, lse) of sums [T, H, ...].

    They are 0 and -inf where no key was seen or the row has no owner.
    """
    top, total, acc = softmax.top[..., 0], softmax.total[..., 0], softmax.acc
    has_key = ~(top <= LOWEST) & is_owned[:, None]  # true for NaN
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(top.dtype), top.shape)
        raised = jnp.maximum(top, sinks)
        decay = jnp.exp(top - raised)
        total = total * decay + jnp.exp(sinks - raised)
        top, acc = raised, acc * decay[..., None]
    total = jnp.where(has_key, total, 1)
    out = jnp.where(has_key[..., None], acc / total[..., None], 0)
    return out.astype(dtype), jnp.where(has_key, top + jnp.log(total), -jnp.inf)


def sum_dtype(x) -> jnp.dtype:
    """Return the dtype of sums of numbers like x: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def dot(spec: str, a, b):
    """Return an einsum with sums in `sum_dtype`.

    HIGHEST keeps float32 from becoming TF32 on a GPU; it means nothing for bfloat16.
    """
    highest = lax.Precision.HIGHEST
    return jnp.einsum(spec, a, b, precision=highest, preferred_element_type=sum_dtype(a))
