"""Beam search among other requests: a group of rows that share blocks and are ranked together.

A group of width w takes w rows and w running places. Its first row, the leader, computes the
prompt; the others are dormant until there are enough beams. When all live beams have been computed,
each has left its best continuations in `beams`, and the next step's events go on:

    choose    w x vocabulary -> the w best that do not stop are the live beams
    finish    those that stop, and are no worse than the last live beam, are finished outputs; the
              best w of all finished ones are kept
    commit    a live beam takes over its parent's row: block table by reference count, tokens by
              copy; a group that has ended leaves its outputs in its rows

No page moves. The last block is copied when two beams write into it (`copy_on_write`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paged_jax.arrays import apply_if
from paged_jax.cache import prefix_directory
from paged_jax.cache.paged_cache import PagedCache, exchange_rows
from paged_jax.scheduling.beams import NEVER, NO_SCORE, WHEN_FULL, Beams, NewBeams
from paged_jax.scheduling.sequences import (
    FINISHED,
    INVALID,
    LENGTH,
    RUNNING,
    STOP,
    Sequences,
)


def add_beams(seqs: Sequences, new: NewBeams) -> Sequences:
    """Make groups of rows that `sequences.add` has just put in the waiting order, leader first.

    All rows but the leader become dormant.
    """
    beams, rows = seqs.beams, new.rows
    assert beams is not None

    def put(old, value):
        return old.at[rows].set(value, mode="drop")

    is_leader = new.leader == rows
    dormant = jnp.where(is_leader, seqs.num_rows, rows)
    return seqs.replace(
        num_tokens=seqs.num_tokens.at[dormant].set(0, mode="drop"),
        beams=beams.replace(
            leader=put(beams.leader, new.leader),
            members=put(beams.members, new.members),
            width=put(beams.width, new.width),
            length_penalty=put(beams.length_penalty, new.length_penalty),
            early_stopping=put(beams.early_stopping, new.early_stopping),
            score=put(beams.score, jnp.where(is_leader, 0.0, NO_SCORE)),
            done_score=put(beams.done_score, NO_SCORE),
            done_length=put(beams.done_length, 0),
        ),
    )


def is_due(seqs: Sequences) -> Bool[Array, ""]:
    """Return whether some row has left continuations that were not chosen from yet. Cheap."""
    if seqs.beams is None:
        return jnp.zeros_like(seqs.num_running, bool)
    return jnp.any(seqs.beams.is_ready)


def advance(cache: PagedCache, seqs: Sequences) -> tuple[PagedCache, Sequences]:
    """Let each group go on of which all live beams are ready, one group after another."""
    if seqs.beams is None:
        return cache, seqs

    def go_on(carry):
        cache, seqs, is_ready = carry
        cache, seqs = _advance_group(cache, seqs, jnp.argmax(is_ready).astype(jnp.int32))
        return cache, seqs, _ready_leaders(seqs)

    start = (cache, seqs, _ready_leaders(seqs))
    cache, seqs, _ = jax.lax.while_loop(lambda c: jnp.any(c[2]), go_on, start)
    # What an aborted group left behind is of no use.
    beams = seqs.beams
    assert beams is not None
    is_ready = beams.is_ready & (seqs.status == RUNNING)
    return cache, seqs.replace(beams=beams.replace(is_ready=is_ready))


def _ready_leaders(seqs: Sequences) -> Bool[Array, "R"]:
    """Return the leaders of running groups in which every live beam is ready."""
    beams = seqs.beams
    assert beams is not None
    is_inside = beams.members < seqs.num_rows
    members = jnp.minimum(beams.members, seqs.num_rows - 1)
    is_settled = beams.is_ready[members] | (beams.score[members] == NO_SCORE) | ~is_inside
    is_leader = beams.leader == jnp.arange(seqs.num_rows, dtype=jnp.int32)
    is_running = is_leader & (seqs.status == RUNNING)
    any_ready = jnp.any(beams.is_ready[members] & is_inside, axis=1)
    return is_running & jnp.all(is_settled, axis=1) & any_ready


class Group(NamedTuple):
    """One group, its rows gathered; W places, of which the first are inside the group.

    Attributes:
        rows: the rows, out of range outside; `at` is the same inside the arrays.
        base: score of each live beam, -inf of others.
        next_logprobs, stop_logprobs: of the live beams' continuations, -inf of others.
        is_sound: whether all of them are numbers.
        prompt: prompt tokens; `old_length` is the live beams' length, `length` one more.
        limit: length at which the group ends.
    """

    leader: Int[Array, ""]
    rows: Int[Array, "W"]
    at: Int[Array, "W"]
    is_inside: Bool[Array, "W"]
    base: Float[Array, "W"]
    next_logprobs: Float[Array, "W W"]
    stop_logprobs: Float[Array, "W K"]
    is_sound: Bool[Array, ""]
    prompt: Int[Array, ""]
    old_length: Int[Array, ""]
    length: Int[Array, ""]
    limit: Int[Array, ""]
    length_penalty: Float[Array, ""]

    def score(self, total: Array, num_tokens: Array) -> Array:
        """Divide cumulative log-probabilities by a power of the length.

        Finite for what is an output: a great penalty must not make one look like none.
        """
        tokens = jnp.maximum(num_tokens, 1).astype(jnp.float32)
        value = jnp.where(total == 0, 0, total / tokens**self.length_penalty)  # not 0 / 0
        value = jnp.maximum(value, jnp.finfo(jnp.float32).min)
        return jnp.where(total == NO_SCORE, NO_SCORE, value)


class Live(NamedTuple):
    """The W best continuations that do not stop: place i continues place `parent[i]`."""

    score: Float[Array, "W"]
    parent: Int[Array, "W"]
    token: Int[Array, "W"]
    logprob: Float[Array, "W"]


class Done(NamedTuple):
    """The W best finished outputs."""

    score: Float[Array, "W"]
    tokens: Int[Array, "W L"]
    logprobs: Float[Array, "W L"]
    length: Int[Array, "W"]
    reason: Int[Array, "W"]


def _advance_group(
    cache: PagedCache, seqs: Sequences, leader: Int[Array, ""]
) -> tuple[PagedCache, Sequences]:
    """Choose the next live beams of one group, finish those that stop, and move the rows."""
    group = _gather_group(seqs, leader)
    live = _choose_live(seqs, group)
    done = _finish_stopped(seqs, group, live)
    has_ended = _has_ended(seqs, group, live, done)
    return _commit(cache, seqs, group, live, done, has_ended)


def _beams(seqs: Sequences) -> Beams:
    assert seqs.beams is not None
    return seqs.beams


def _gather_group(seqs: Sequences, leader: Int[Array, ""]) -> Group:
    beams = _beams(seqs)
    rows = beams.members[leader]
    at = jnp.minimum(rows, seqs.num_rows - 1)
    is_inside = jnp.arange(rows.shape[0], dtype=jnp.int32) < beams.width[leader]
    base = jnp.where(is_inside, beams.score[at], NO_SCORE)
    is_live = base > NO_SCORE
    old_length = jnp.max(jnp.where(is_live, seqs.num_tokens[at], 0))
    logprobs = [
        jnp.where(is_live[:, None], x[at], NO_SCORE)
        for x in (beams.next_logprobs, beams.stop_logprobs)
    ]
    return Group(
        leader=leader,
        rows=rows,
        at=at,
        is_inside=is_inside,
        base=base,
        next_logprobs=_without_nan(logprobs[0]),
        stop_logprobs=_without_nan(logprobs[1]),
        is_sound=~jnp.any(jnp.isnan(logprobs[0])),
        prompt=seqs.num_prompt_tokens[leader],
        old_length=old_length,
        length=old_length + 1,
        limit=seqs.max_len[leader],
        length_penalty=beams.length_penalty[leader],
    )


def _without_nan(logprobs: Float[Array, "W n"]) -> Float[Array, "W n"]:
    """Return -inf, which is never chosen, for what is no number."""
    return jnp.where(jnp.isnan(logprobs), NO_SCORE, logprobs)


def _choose_live(seqs: Sequences, group: Group) -> Live:
    """Choose the W best of W x W continuations.

    base -1 -2, next_logprobs [[-.1, -5], [-.2, -.3]] -> scores -1.1 -2.2, parents 0 1
    """
    beams, width = _beams(seqs), group.rows.shape[0]
    totals = group.base[:, None] + group.next_logprobs
    score, choice = jax.lax.top_k(totals.ravel(), width)
    parent, rank = choice // width, choice % width
    return Live(
        score=jnp.where(group.is_inside, score, NO_SCORE),
        parent=parent,
        token=beams.next_tokens[group.at][parent, rank],
        logprob=group.next_logprobs[parent, rank],
    )


def _finish_stopped(seqs: Sequences, group: Group, live: Live) -> Done:
    """Rank what was finished before, what stops now and, at the limit, the live beams.

    Candidates in order, for W = 2 and K = 1 stop id: kept 0 1 | stop of 0, stop of 1 | live 0 1.
    The pick 3 is the stop of beam 1.
    """
    beams, g, width = _beams(seqs), group, group.rows.shape[0]
    last_live = live.score[beams.width[g.leader] - 1]
    stops = g.base[:, None] + g.stop_logprobs
    stops = jnp.where((stops >= last_live) & (stops > NO_SCORE), stops, NO_SCORE)
    is_at_limit = (g.length >= g.limit) & (live.score > NO_SCORE)
    ends = jnp.where(is_at_limit, live.score, NO_SCORE)
    new = g.score(jnp.concatenate([stops.ravel(), ends]), g.length - g.prompt)
    kept = jnp.where(g.is_inside, beams.done_score[g.at], NO_SCORE)
    best, pick = jax.lax.top_k(jnp.concatenate([kept, new]), width)

    num_stops = stops.shape[1]
    first_end = width + width * num_stops
    is_kept, is_stop = pick < width, (pick >= width) & (pick < first_end)
    stop = jnp.minimum(jnp.maximum(pick - width, 0), width * num_stops - 1)
    end = jnp.maximum(pick - first_end, 0)
    continued = jnp.where(is_stop, stop // num_stops, live.parent[end])
    source = g.at[jnp.where(is_kept, jnp.minimum(pick, width - 1), continued)]
    stop_token = seqs.sampling.stop_ids[g.leader][stop % num_stops]
    stop_logprob = g.stop_logprobs.ravel()[stop]

    def finished(done, running, value):
        """Copy a kept output, or a beam with its last token appended."""
        taken = jnp.where(is_kept[:, None], done[source], running[source])
        column = jnp.where(is_kept, taken.shape[1], g.old_length)
        return taken.at[jnp.arange(width, dtype=jnp.int32), column].set(value, mode="drop")

    token = jnp.where(is_stop, stop_token, live.token[end])
    logprob = jnp.where(is_stop, stop_logprob, live.logprob[end])
    reason = jnp.where(is_stop, STOP, LENGTH)
    return Done(
        score=jnp.where(g.is_inside, best, NO_SCORE),
        tokens=finished(beams.done_tokens, seqs.tokens, token),
        logprobs=finished(beams.done_logprobs, seqs.logprobs, logprob),
        length=jnp.where(is_kept, beams.done_length[source], g.length),
        reason=jnp.where(is_kept, beams.done_reason[source], reason),
    )


def _has_ended(seqs: Sequences, group: Group, live: Live, done: Done) -> Bool[Array, ""]:
    """Return whether no live beam may or can improve the group's outputs.

    So it is where one has continuations that are no numbers: the group is invalid.
    """
    is_full = jnp.all((done.score > NO_SCORE) | ~group.is_inside)
    worst = jnp.min(jnp.where(group.is_inside, done.score, jnp.inf))
    hoped = group.score(live.score[0], group.length - group.prompt)
    longest = group.score(live.score[0], group.limit - group.prompt)
    policy = _beams(seqs).early_stopping[group.leader]
    is_beaten = jnp.where(policy == NEVER, worst >= jnp.maximum(hoped, longest), worst >= hoped)
    is_last = group.length >= group.limit
    is_over = ~group.is_sound | is_last | (live.score[0] == NO_SCORE)
    return is_over | (is_full & ((policy == WHEN_FULL) | is_beaten))


def _commit(
    cache: PagedCache,
    seqs: Sequences,
    group: Group,
    live: Live,
    done: Done,
    has_ended: Bool[Array, ""],
) -> tuple[PagedCache, Sequences]:
    """Let live beams take over their parents' rows, or leave the outputs in the rows at the end."""
    beams, g, width = _beams(seqs), group, group.rows.shape[0]
    goes_on = g.is_inside & (live.score > NO_SCORE) & ~has_ended
    cache = apply_if(~has_ended, lambda c: exchange_rows(c, g.rows, live.parent, goes_on), cache)
    target = jnp.where(g.is_inside, g.rows, seqs.num_rows)
    ended = jnp.where(has_ended, target, seqs.num_rows)
    if cache.directory is not None:  # the rows' tokens are no longer those of their blocks
        cache = cache.replace(directory=prefix_directory.stop_rows(cache.directory, ended))

    def put(old, value):
        return old.at[target].set(value, mode="drop")

    parents, each = g.at[live.parent], jnp.arange(width, dtype=jnp.int32)
    column = jnp.where(goes_on, g.old_length, seqs.tokens.shape[1])
    live_tokens = seqs.tokens[parents].at[each, column].set(live.token, mode="drop")
    live_logprobs = seqs.logprobs[parents].at[each, column].set(live.logprob, mode="drop")
    has_output = has_ended & (done.score > NO_SCORE)
    end_length = jnp.where(has_output, done.length, g.prompt)
    num_tokens = jnp.where(has_ended, end_length, jnp.where(goes_on, g.length, 0))
    is_valid = g.is_sound & jnp.any(has_output)
    reason = jnp.where(is_valid, jnp.where(has_output, done.reason, LENGTH), INVALID)
    return cache, seqs.replace(
        tokens=put(seqs.tokens, jnp.where(has_ended, done.tokens, live_tokens)),
        logprobs=put(seqs.logprobs, jnp.where(has_ended, done.logprobs, live_logprobs)),
        num_tokens=put(seqs.num_tokens, num_tokens),
        num_computed=put(seqs.num_computed, jnp.where(goes_on, seqs.num_computed[parents], 0)),
        num_hit=put(seqs.num_hit, 0),
        status=put(seqs.status, jnp.where(has_ended, FINISHED, RUNNING)),
        finish_reason=seqs.finish_reason.at[ended].set(reason, mode="drop"),
        beams=beams.replace(
            score=put(beams.score, jnp.where(goes_on, live.score, NO_SCORE)),
            is_ready=put(beams.is_ready, False),
            done_tokens=put(beams.done_tokens, done.tokens),
            done_logprobs=put(beams.done_logprobs, done.logprobs),
            done_length=put(beams.done_length, done.length),
            done_score=put(beams.done_score, done.score),
            done_reason=put(beams.done_reason, done.reason),
            leader=put(beams.leader, jnp.where(has_ended, seqs.num_rows, g.leader)),
        ),
    )
