"""What the host learns of a dispatch, and the update of each output in it."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from paged_jax.engine.counters import Counters
from paged_jax.engine.step import EngineState

STEPS_PER_DISPATCH = 32


class Report(struct.PyTreeNode):
    """A dispatch as the host sees it; R rows, the newest K tokens of each."""

    status: Int[Array, "R"]
    finish_reason: Int[Array, "R"]
    num_tokens: Int[Array, "R"]
    tokens: Int[Array, "R K"]
    logprobs: Float[Array, "R K"]
    num_cached: Int[Array, "R"]
    num_running: Int[Array, ""]
    num_waiting: Int[Array, ""]
    steps: Int[Array, ""]
    counters: Counters


@dataclass(frozen=True)
class Update:
    """The tokens of one output since its last update, and at the end why it ended.

    The outputs of a beam search come whole, when all have ended, the best first.

    Attributes:
        finish_reason: "stop", "length", "abort", or "invalid": the logits held NaN or inf, or left
            no token to choose.
        stop_reason: the stop token id; None for end-of-text.
        index: which of the request's outputs.
        num_cached_tokens: tokens of its prompt that were found in the cache.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    stop_reason: int | None = None
    index: int = 0
    num_cached_tokens: int = 0


def make_report(state: EngineState, steps: Int[Array, ""]) -> Report:
    """Return the report of a dispatch that made `steps` steps."""
    seqs = state.seqs
    offsets = jnp.arange(STEPS_PER_DISPATCH, dtype=jnp.int32)
    newest = jnp.maximum(seqs.num_tokens[:, None] - STEPS_PER_DISPATCH + offsets[None], 0)
    return Report(
        status=seqs.status,
        finish_reason=seqs.finish_reason,
        num_tokens=seqs.num_tokens,
        num_cached=seqs.num_cached,
        tokens=jnp.take_along_axis(seqs.tokens, newest, axis=1),
        logprobs=jnp.take_along_axis(seqs.logprobs, newest, axis=1),
        num_running=seqs.num_running,
        num_waiting=seqs.waiting.count,
        steps=steps,
        counters=state.counters,
    )


def join(first: Update, then: Update) -> Update:
    """Return two updates of one output as one."""
    return Update(
        first.request_id,
        first.token_ids + then.token_ids,
        first.logprobs + then.logprobs,
        then.finish_reason,
        then.stop_reason,
        then.index,
        then.num_cached_tokens,
    )
