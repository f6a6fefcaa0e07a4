"""The sequence rows: tokens, counts, status and sampling parameters of every request on the device, running or waiting.

running   3 0 5 | R R      places in order of admission; the first num_running are in use, R marks an empty place
waiting   . 7 2 9 . .      a ring of rows; the next to be admitted stands at its head
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from paged_jax.beams import Beams, init_beams
from paged_jax.sampling import SamplingRows

EMPTY, WAITING, RUNNING, FINISHED = range(4)
NOT_FINISHED, STOP, LENGTH, ABORT, INVALID = range(5)
FINISH_REASONS = (None, "stop", "length", "abort", "invalid")


class Sequences(struct.PyTreeNode):
    """R sequence rows of up to L tokens, S of them running at most."""

    tokens: Int[Array, "R L"]  # prompt and output
    logprobs: Float[Array, "R L"]  # log-probability of each output token; prompt positions mean nothing
    num_prompt_tokens: Int[Array, "R"]
    num_tokens: Int[Array, "R"]  # prompt and output
    num_computed: Int[Array, "R"]  # tokens whose K and V are in the cache
    num_hit: Int[Array, "R"]  # leading tokens found in the cache when the row was last admitted: never written
    num_cached: Int[Array, "R"]  # the same of its first admission, -1 before
    root: Int[Array, "R"]  # what its content hangs on in the prefix directory, below 0: salt and weight version
    parent: Int[Array, "R"]  # the row that computes this one's prompt, R for none
    max_len: Int[Array, "R"]  # number of tokens at which the row is finished
    status: Int[Array, "R"]
    finish_reason: Int[Array, "R"]
    sampling: SamplingRows
    beams: Beams | None  # None: no beam search
    running: Int[Array, "S"]
    num_running: Int[Array, ""]
    waiting: Int[Array, "R"]
    waiting_head: Int[Array, ""]
    num_waiting: Int[Array, ""]
    refused_row: Int[Array, ""]  # the head of the waiting order that last did not fit, R for none
    refused_free: Int[Array, ""]  # and how many blocks were free then

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_tokens.shape[0]

    @property
    def max_running(self) -> int:
        """S."""
        return self.running.shape[0]


def init_sequences(
    num_rows: int, max_len: int, max_running: int, max_stop_ids: int, max_beam_width: int = 0
) -> Sequences:
    """All rows empty; with beam search where `max_beam_width` is above 0."""

    # Each array is made anew: one buffer in two places could not be donated.
    def ints():
        return jnp.zeros(num_rows, jnp.int32)

    def floats():
        return jnp.zeros(num_rows, jnp.float32)

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
        sampling=SamplingRows(
            temperature=floats(),
            top_k=ints(),
            top_p=floats(),
            min_p=floats(),
            seed=jnp.zeros(num_rows, jnp.uint32),
            min_len=ints(),
            stop_ids=jnp.full((num_rows, max_stop_ids), -1, jnp.int32),
        ),
        beams=init_beams(num_rows, max_beam_width, max_stop_ids, max_len) if max_beam_width else None,
        running=jnp.full(max_running, num_rows, jnp.int32),
        num_running=jnp.int32(0),
        waiting=ints(),
        waiting_head=jnp.int32(0),
        num_waiting=jnp.int32(0),
        refused_row=jnp.int32(num_rows),
        refused_free=jnp.int32(0),
    )


class NewSequences(struct.PyTreeNode):
    """Requests on their way into rows: `rows[i]` gets the i-th; a row out of range is padding."""

    rows: Int[Array, "k"]
    tokens: Int[Array, "k L"]
    num_prompt_tokens: Int[Array, "k"]
    max_len: Int[Array, "k"]
    root: Int[Array, "k"]
    parent: Int[Array, "k"]  # a row in front of it, whose prompt it shares; R for none
    sampling: SamplingRows


def add(seqs: Sequences, new: NewSequences) -> Sequences:
    """Put requests into rows, which must be empty or finished, and at the end of the waiting order."""
    rows = new.rows

    def put(old, value):
        return old.at[rows].set(value, mode="drop")

    valid = rows < seqs.num_rows
    rank = jnp.cumsum(valid, dtype=jnp.int32) - 1
    place = (seqs.waiting_head + seqs.num_waiting + rank) % seqs.num_rows
    # Rows that would share what such a row held before must no longer look there.
    taken = jnp.zeros(seqs.num_rows + 1, bool).at[rows].set(True, mode="drop").at[-1].set(False)
    parent = jnp.where(taken[seqs.parent], seqs.num_rows, seqs.parent)
    beams = seqs.beams
    if beams is not None:
        beams = beams.replace(leader=put(beams.leader, seqs.num_rows), ready=put(beams.ready, False))
    sampling = {name: put(getattr(seqs.sampling, name), value) for name, value in vars(new.sampling).items()}
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
        sampling=seqs.sampling.replace(**sampling),
        beams=beams,
        waiting=seqs.waiting.at[jnp.where(valid, place, seqs.num_rows)].set(rows, mode="drop"),
        num_waiting=seqs.num_waiting + jnp.sum(valid, dtype=jnp.int32),
        refused_row=jnp.full_like(seqs.refused_row, seqs.num_rows),
    )


def append(
    seqs: Sequences, rows: Int[Array, "S"], tokens: Int[Array, "S"], logprobs: Float[Array, "S"], given
) -> Sequences:
    """Append one token to each row that is `given` one, and mark those finished that it ends.

    A stop id ends a row (unless the row must be longer first), also as the last token that it may have; else its length does.
    """
    target = jnp.where(given, rows, seqs.num_rows)
    length = seqs.num_tokens[rows]
    sampling = seqs.sampling
    stopped = jnp.any(tokens[:, None] == sampling.stop_ids[rows], axis=1) & (length >= sampling.min_len[rows])
    full = length + 1 >= seqs.max_len[rows]
    ended = jnp.where(stopped | full, target, seqs.num_rows)
    return seqs.replace(
        tokens=seqs.tokens.at[target, length].set(tokens, mode="drop"),
        logprobs=seqs.logprobs.at[target, length].set(logprobs, mode="drop"),
        num_tokens=seqs.num_tokens.at[target].add(1, mode="drop"),
        status=seqs.status.at[ended].set(FINISHED, mode="drop"),
        finish_reason=seqs.finish_reason.at[ended].set(jnp.where(stopped, STOP, LENGTH), mode="drop"),
    )


def abort(seqs: Sequences, rows: Int[Array, "k"]) -> Sequences:
    """Finish running or waiting rows where they stand; others are passed over. Blocks go back when the next step begins."""
    rows = jnp.where(rows < seqs.num_rows, rows, seqs.num_rows)
    status = seqs.status.at[rows].get(mode="fill", fill_value=EMPTY)
    target = jnp.where((status == WAITING) | (status == RUNNING), rows, seqs.num_rows)
    seqs = seqs.replace(
        status=seqs.status.at[target].set(FINISHED, mode="drop"),
        finish_reason=seqs.finish_reason.at[target].set(ABORT, mode="drop"),
    )
    # Close the gaps in the waiting order.
    offsets = jnp.arange(seqs.num_rows, dtype=jnp.int32)
    order = seqs.waiting[(seqs.waiting_head + offsets) % seqs.num_rows]
    stays = (offsets < seqs.num_waiting) & (seqs.status[order] == WAITING)
    place = jnp.where(stays, jnp.cumsum(stays, dtype=jnp.int32) - 1, seqs.num_rows)
    return seqs.replace(
        waiting=seqs.waiting.at[place].set(order, mode="drop"),
        waiting_head=jnp.zeros_like(seqs.waiting_head),
        num_waiting=jnp.sum(stays, dtype=jnp.int32),
        refused_row=jnp.full_like(seqs.refused_row, seqs.num_rows),
    )


def running_rows(seqs: Sequences) -> tuple[Int[Array, "S"], Bool[Array, "S"]]:
    """The rows in the running places, and which places are in use."""
    return seqs.running, jnp.arange(seqs.max_running, dtype=jnp.int32) < seqs.num_running
