"""The rows of beam groups, and what a step leaves there: each beam's best continuations."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from paged_jax.config import EngineConfig

WHEN_FULL, WHEN_BEST, NEVER = range(3)  # when a group ends before its length does
NO_SCORE = -jnp.inf


class Beams(struct.PyTreeNode):
    """Beam groups, by sequence row: R rows, groups of W at most, K stop ids, L tokens.

    Attributes:
        leader: the group's first row; R for a row of no group.
        members, width, length_penalty, early_stopping: of the group, at its leader.
        score: cumulative log-probability of a live beam, -inf of a dormant row.
        is_ready: whether the row's continuations are there: its W best tokens that do not stop, and
            its stop ids.
        done_score: of a finished output, -inf for none. A group's outputs are kept by its rows, as
            many as it is wide.
    """

    leader: Int[Array, "R"]
    members: Int[Array, "R W"]
    width: Int[Array, "R"]
    length_penalty: Float[Array, "R"]
    early_stopping: Int[Array, "R"]
    score: Float[Array, "R"]
    is_ready: Bool[Array, "R"]
    next_tokens: Int[Array, "R W"]
    next_logprobs: Float[Array, "R W"]
    stop_logprobs: Float[Array, "R K"]
    done_tokens: Int[Array, "R L"]
    done_logprobs: Float[Array, "R L"]
    done_length: Int[Array, "R"]
    done_score: Float[Array, "R"]
    done_reason: Int[Array, "R"]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.leader.shape[0]


class NewBeams(struct.PyTreeNode):
    """Groups on their way into rows, one entry for each row; a row out of range is padding."""

    rows: Int[Array, "k"]
    leader: Int[Array, "k"]
    members: Int[Array, "k W"]
    width: Int[Array, "k"]
    length_penalty: Float[Array, "k"]
    early_stopping: Int[Array, "k"]


def init_beams(config: EngineConfig) -> Beams:
    """Return rows without groups."""
    num_rows, max_len = config.num_rows, config.max_model_len

    def zeros(*shape, dtype=jnp.int32):
        return jnp.zeros(shape, dtype)

    def floats(*shape, value=0.0):
        return jnp.full(shape, value, jnp.float32)

    return Beams(
        leader=jnp.full(num_rows, num_rows, jnp.int32),
        members=jnp.full((num_rows, config.max_beam_width), num_rows, jnp.int32),
        width=zeros(num_rows),
        length_penalty=floats(num_rows),
        early_stopping=zeros(num_rows),
        score=floats(num_rows, value=NO_SCORE),
        is_ready=zeros(num_rows, dtype=bool),
        next_tokens=zeros(num_rows, config.max_beam_width),
        next_logprobs=floats(num_rows, config.max_beam_width),
        stop_logprobs=floats(num_rows, config.max_stop_ids),
        done_tokens=zeros(num_rows, max_len),
        done_logprobs=floats(num_rows, max_len),
        done_length=zeros(num_rows),
        done_score=floats(num_rows, value=NO_SCORE),
        done_reason=zeros(num_rows),
    )


def forget_groups(beams: Beams, rows: Int[Array, "k"]) -> Beams:
    """Let rows be of no group; rows out of range are padding."""
    return beams.replace(
        leader=beams.leader.at[rows].set(beams.num_rows, mode="drop"),
        is_ready=beams.is_ready.at[rows].set(False, mode="drop"),
    )


def is_member(beams: Beams, rows: Int[Array, "k"]) -> Bool[Array, "k"]:
    """Return which rows are of a group; rows out of range are not."""
    leader = beams.leader.at[rows].get(mode="fill", fill_value=beams.num_rows)
    return leader < beams.num_rows


def collect(
    beams: Beams,
    rows: Int[Array, "k"],
    logits: Float[Array, "k V"],
    stop_ids: Int[Array, "k K"],
    has_logits: Bool[Array, "k"],
) -> Beams:
    """Keep the best continuations of the rows of groups that have logits.

    Log-probabilities are those under the raw logits; NaN where these hold NaN or inf, or nothing
    but -inf.
    """
    is_collected = has_logits & is_member(beams, rows)
    max_width, vocab = beams.next_tokens.shape[1], logits.shape[1]

    def best():
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        logprobs = jnp.where(jnp.isfinite(total), logits - total, jnp.nan)
        stops = jnp.take_along_axis(logprobs, jnp.maximum(stop_ids, 0), axis=1)
        target = jnp.where(stop_ids >= 0, stop_ids, vocab)
        each = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
        rest = logprobs.at[each, target].set(NO_SCORE, mode="drop")
        values, tokens = jax.lax.top_k(rest, min(max_width, vocab))
        short = ((0, 0), (0, max_width - values.shape[1]))
        return (
            jnp.pad(values, short, constant_values=NO_SCORE),
            jnp.pad(tokens.astype(jnp.int32), short),
            jnp.where(stop_ids >= 0, stops, NO_SCORE),
        )

    def old():
        return beams.next_logprobs[rows], beams.next_tokens[rows], beams.stop_logprobs[rows]

    logprobs, tokens, stops = jax.lax.cond(jnp.any(is_collected), best, old)
    target = jnp.where(is_collected, rows, beams.num_rows)
    return beams.replace(
        is_ready=beams.is_ready.at[target].set(True, mode="drop"),
        next_logprobs=beams.next_logprobs.at[target].set(logprobs, mode="drop"),
        next_tokens=beams.next_tokens.at[target].set(tokens, mode="drop"),
        stop_logprobs=beams.stop_logprobs.at[target].set(stops, mode="drop"),
    )


def widen_beams(beams: Beams, max_width: int) -> Beams:
    """Return the same groups with room for wider ones."""
    missing = max_width - beams.members.shape[1]

    def pad(array, value):
        return jnp.pad(array, ((0, 0), (0, missing)), constant_values=value)

    return beams.replace(
        members=pad(beams.members, beams.num_rows),
        next_tokens=pad(beams.next_tokens, 0),
        next_logprobs=pad(beams.next_logprobs, NO_SCORE),
    )
