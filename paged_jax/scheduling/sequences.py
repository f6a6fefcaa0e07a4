"""The sequence rows: tokens, counts, status and sampling parameters of every request on the device.

    running   3 0 5 | R R      places in order of admission; the first num_running are in use
    waiting   7 2 9            see `waiting`

A row waits or runs; R, which is no row, marks an empty place.
"""

from dataclasses import replace

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from paged_jax.config import EngineConfig
from paged_jax.sampling.rows import SamplingRows, init_sampling_rows
from paged_jax.scheduling import waiting as waiting_order
from paged_jax.scheduling.beams import Beams, forget_groups, init_beams, widen_beams
from paged_jax.scheduling.waiting import Waiting, init_waiting

EMPTY, WAITING, RUNNING, FINISHED = range(4)
NOT_FINISHED, STOP, LENGTH, ABORT, INVALID = range(5)
FINISH_REASONS = (None, "stop", "length", "abort", "invalid")


class Sequences(struct.PyTreeNode):
    """R sequence rows of up to L tokens, S of them running at most.

    Attributes:
        tokens: prompt and output.
        logprobs: log-probability of each output token; prompt positions mean nothing.
        num_tokens: prompt and output.
        num_computed: tokens of which K and V are in the cache.
        num_hit: leading tokens found in the cache when the row was last admitted. Never written.
        num_cached: the same of its first admission, -1 before.
        root: what its content depends on in the prefix directory, below 0: salt and weight version.
        parent: the row that computes this one's prompt, R for none.
        max_len: number of tokens at which the row is finished.
        beams: None without beam search.
        refused_row: the head of the waiting order that last did not fit, R for none.
        refused_free: how many blocks were free then.
    """

    tokens: Int[Array, "R L"]
    logprobs: Float[Array, "R L"]
    num_prompt_tokens: Int[Array, "R"]
    num_tokens: Int[Array, "R"]
    num_computed: Int[Array, "R"]
    num_hit: Int[Array, "R"]
    num_cached: Int[Array, "R"]
    root: Int[Array, "R"]
    parent: Int[Array, "R"]
    max_len: Int[Array, "R"]
    status: Int[Array, "R"]
    finish_reason: Int[Array, "R"]
    sampling: SamplingRows
    beams: Beams | None
    running: Int[Array, "S"]
    num_running: Int[Array, ""]
    waiting: Waiting
    refused_row: Int[Array, ""]
    refused_free: Int[Array, ""]
    config: EngineConfig = struct.field(pytree_node=False)

    @property
    def num_rows(self) -> int:
        """R."""
        return self.config.num_rows

    @property
    def max_running(self) -> int:
        """S."""
        return self.config.max_num_seqs


def init_sequences(config: EngineConfig) -> Sequences:
    """Return empty rows."""
    num_rows, max_len = config.num_rows, config.max_model_len

    # Each array is made anew: one buffer in two places could not be donated.
    def ints():
        return jnp.zeros(num_rows, jnp.int32)

    return Sequences(
        tokens=jnp.zeros((num_rows, max_len), jnp.int32),
        logprobs=jnp.zeros((num_rows, max_len), jnp.float32),
        num_prompt_tokens=ints(),
        num_tokens=ints(),
        num_computed=ints(),
        num_hit=ints(),
        num_cached=ints(),
        root=ints(),
        parent=jnp.full(num_rows, num_rows, jnp.int32),
        max_len=ints(),
        status=ints(),
        finish_reason=ints(),
        sampling=init_sampling_rows(num_rows, config.max_stop_ids),
        beams=init_beams(config) if config.max_beam_width else None,
        running=jnp.full(config.max_num_seqs, num_rows, jnp.int32),
        num_running=jnp.int32(0),
        waiting=init_waiting(num_rows),
        refused_row=jnp.int32(num_rows),
        refused_free=jnp.int32(0),
        config=config,
    )


class NewSequences(struct.PyTreeNode):
    """Requests on their way into rows: `rows[i]` gets the i-th; a row out of range is padding.

    The host makes them of NumPy arrays.

    Attributes:
        parent: a row in front of it, with the same prompt; R for none.
    """

    rows: Int[Array, "k"]
    tokens: Int[Array, "k L"]
    num_prompt_tokens: Int[Array, "k"]
    max_len: Int[Array, "k"]
    root: Int[Array, "k"]
    parent: Int[Array, "k"]
    sampling: SamplingRows


def add(seqs: Sequences, new: NewSequences) -> Sequences:
    """Put requests into rows (empty or finished) and at the end of the waiting order."""
    rows = new.rows

    def put(old, value):
        return old.at[rows].set(value, mode="drop")

    # Rows that would share what such a row held before must not look there any more.
    is_taken = jnp.zeros(seqs.num_rows + 1, bool).at[rows].set(True, mode="drop")
    is_taken = is_taken.at[-1].set(False)
    parent = jnp.where(is_taken[seqs.parent], seqs.num_rows, seqs.parent)
    old, given = seqs.sampling, new.sampling
    sampling = SamplingRows(
        parameters={k: put(x, given.parameters[k]) for k, x in old.parameters.items()},
        seed=put(old.seed, given.seed),
        min_len=put(old.min_len, given.min_len),
        stop_ids=put(old.stop_ids, given.stop_ids),
    )
    return seqs.replace(
        tokens=put(seqs.tokens, new.tokens),
        num_prompt_tokens=put(seqs.num_prompt_tokens, new.num_prompt_tokens),
        num_tokens=put(seqs.num_tokens, new.num_prompt_tokens),
        num_computed=put(seqs.num_computed, 0),
        num_hit=put(seqs.num_hit, 0),
        num_cached=put(seqs.num_cached, -1),
        root=put(seqs.root, new.root),
        parent=put(parent, new.parent),
        max_len=put(seqs.max_len, new.max_len),
        status=put(seqs.status, WAITING),
        finish_reason=put(seqs.finish_reason, NOT_FINISHED),
        sampling=sampling,
        beams=None if seqs.beams is None else forget_groups(seqs.beams, rows),
        waiting=waiting_order.push_back(seqs.waiting, rows),
        refused_row=jnp.full_like(seqs.refused_row, seqs.num_rows),
    )


def make_room_for_beams(seqs: Sequences, beam_width: int) -> Sequences:
    """Let the rows hold beam groups of that width, or of the next power of two."""
    config = seqs.config
    if beam_width <= config.max_beam_width:
        return seqs
    max_width = min(1 << (beam_width - 1).bit_length(), config.max_num_seqs)
    config = replace(config, max_beam_width=max_width)
    beams = init_beams(config) if seqs.beams is None else widen_beams(seqs.beams, max_width)
    return seqs.replace(beams=beams, config=config)


def append(
    seqs: Sequences,
    rows: Int[Array, "k"],
    tokens: Int[Array, "k"],
    logprobs: Float[Array, "k"],
    is_given: Bool[Array, "k"],
) -> Sequences:
    """Append one token to each row that is given one, and finish the rows that it ends.

    A stop id ends a row (unless the row must be longer first), also as the last token that the row
    may have. Otherwise its length does. A token whose log-probability is not finite was not chosen
    from anything: it is dropped, and the row is invalid.
    """
    is_valid = jnp.isfinite(logprobs)
    target = jnp.where(is_given & is_valid, rows, seqs.num_rows)
    length = seqs.num_tokens[rows]
    is_stop = jnp.any(tokens[:, None] == seqs.sampling.stop_ids[rows], axis=1)
    is_stop &= length >= seqs.sampling.min_len[rows]
    is_full = length + 1 >= seqs.max_len[rows]
    ended = jnp.where(is_given & (is_stop | is_full | ~is_valid), rows, seqs.num_rows)
    reason = jnp.where(is_valid, jnp.where(is_stop, STOP, LENGTH), INVALID)
    return seqs.replace(
        tokens=seqs.tokens.at[target, length].set(tokens, mode="drop"),
        logprobs=seqs.logprobs.at[target, length].set(logprobs, mode="drop"),
        num_tokens=seqs.num_tokens.at[target].add(1, mode="drop"),
        status=seqs.status.at[ended].set(FINISHED, mode="drop"),
        finish_reason=seqs.finish_reason.at[ended].set(reason, mode="drop"),
    )


def abort(seqs: Sequences, is_aborted: Bool[Array, "R"]) -> Sequences:
    """Finish running or waiting rows where they stand; others are skipped.

    Blocks go back when the next step begins.
    """
    status = seqs.status
    is_ended = is_aborted & ((status == WAITING) | (status == RUNNING))
    status = jnp.where(is_ended, FINISHED, status)
    return seqs.replace(
        status=status,
        finish_reason=jnp.where(is_ended, ABORT, seqs.finish_reason),
        waiting=waiting_order.keep(seqs.waiting, status == WAITING),
        refused_row=jnp.where(jnp.any(is_ended), seqs.num_rows, seqs.refused_row),
    )


def running_rows(seqs: Sequences) -> tuple[Int[Array, "S"], Bool[Array, "S"]]:
    """Return the rows in the running places, and which places are in use."""
    return seqs.running, jnp.arange(seqs.max_running, dtype=jnp.int32) < seqs.num_running


def finished_places(seqs: Sequences) -> Bool[Array, "S"]:
    """Return which running places hold a row that has finished."""
    rows, is_active = running_rows(seqs)
    return is_active & (seqs.status[rows] == FINISHED)


def has_unfinished(seqs: Sequences) -> Bool[Array, ""]:
    """Return whether a row waits or runs."""
    rows, is_active = running_rows(seqs)
    return (seqs.waiting.count > 0) | jnp.any(is_active & (seqs.status[rows] != FINISHED))
