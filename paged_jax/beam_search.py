"""Beam search among other requests: a group of rows that share blocks, move together and are ranked together.

A group of width w takes w rows and w running places; its first row, the leader, computes the prompt, the others are dormant
until there are enough beams. When all live beams have been computed, each has left its best continuations here, and the next
step's events choose among them:

    w x vocabulary    ->  the w best that do not stop are the live beams
                          those that stop, and are no worse than the last live beam, are finished; the best w of them are kept

A live beam takes over its parent's row: block table by reference count, tokens by copy. No page moves; the last block is
copied when two beams write into it (`cache_manager.copy_on_write`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from paged_jax import prefix_directory
from paged_jax.arrays import once
from paged_jax.beams import NEVER, NO_SCORE, WHEN_FULL, NewBeams
from paged_jax.cache_manager import PagedCache, exchange_rows
from paged_jax.sequences import FINISHED, LENGTH, RUNNING, STOP, Sequences


def add_beams(seqs: Sequences, new: NewBeams) -> Sequences:
    """Make groups of rows that `sequences.add` has just put in the waiting order, leader first. The others become dormant."""
    beams, rows = seqs.beams, new.rows
    assert beams is not None

    def put(old, value):
        return old.at[rows].set(value, mode="drop")

    leads = new.leader == rows
    dormant = jnp.where(leads, seqs.num_rows, rows)
    return seqs.replace(
        num_tokens=seqs.num_tokens.at[dormant].set(0, mode="drop"),
        beams=beams.replace(
            leader=put(beams.leader, new.leader),
            members=put(beams.members, new.members),
            width=put(beams.width, new.width),
            length_penalty=put(beams.length_penalty, new.length_penalty),
            early_stopping=put(beams.early_stopping, new.early_stopping),
            score=put(beams.score, jnp.where(leads, 0.0, NO_SCORE)),
            done_score=put(beams.done_score, NO_SCORE),
            done_length=put(beams.done_length, 0),
        ),
    )


def is_due(seqs: Sequences) -> Bool[Array, ""]:
    """Whether some row has left continuations that nobody has chosen from yet. Cheap."""
    return jnp.zeros_like(seqs.num_running, bool) if seqs.beams is None else jnp.any(seqs.beams.ready)


def advance(cache: PagedCache, seqs: Sequences) -> tuple[PagedCache, Sequences]:
    """Let each group go on of which all live beams are ready, one group after another."""
    if seqs.beams is None:
        return cache, seqs

    def leaders(seqs):
        """Groups that are ready."""
        beams = seqs.beams
        members = jnp.minimum(beams.members, seqs.num_rows - 1)
        settled = beams.ready[members] | (beams.score[members] == NO_SCORE) | (beams.members >= seqs.num_rows)
        runs = (beams.leader == jnp.arange(seqs.num_rows)) & (seqs.status == RUNNING)
        return runs & jnp.all(settled, axis=1) & jnp.any(beams.ready[members] & (beams.members < seqs.num_rows), axis=1)

    def go_on(carry):
        cache, seqs, ready = carry
        cache, seqs = _advance_group(cache, seqs, jnp.argmax(ready).astype(jnp.int32))
        return cache, seqs, leaders(seqs)

    cache, seqs, _ = jax.lax.while_loop(lambda c: jnp.any(c[2]), go_on, (cache, seqs, leaders(seqs)))
    # What an aborted group left behind is of no use to anyone.
    beams = seqs.beams
    assert beams is not None
    return cache, seqs.replace(beams=beams.replace(ready=beams.ready & (seqs.status == RUNNING)))


def _advance_group(cache: PagedCache, seqs: Sequences, leader: Array) -> tuple[PagedCache, Sequences]:
    beams = seqs.beams
    assert beams is not None
    rows = beams.members[leader]
    at, width = jnp.minimum(rows, seqs.num_rows - 1), rows.shape[0]
    slot = jnp.arange(width, dtype=jnp.int32)
    inside = slot < beams.width[leader]
    base = jnp.where(inside, beams.score[at], NO_SCORE)
    live, choice = jax.lax.top_k((base[:, None] + beams.next_logprobs[at]).ravel(), width)
    parent, rank = choice // width, choice % width
    live = jnp.where(inside, live, NO_SCORE)
    last_live = live[beams.width[leader] - 1]

    prompt, limit = seqs.num_prompt_tokens[leader], seqs.max_len[leader]
    old_length = jnp.max(jnp.where(base > NO_SCORE, seqs.num_tokens[at], 0))
    length = old_length + 1  # of every output that this step makes
    is_last = length >= limit

    def score(total, tokens):
        # Finite for what is one: a great penalty must not make an output look like none.
        value = total / jnp.maximum(tokens, 1).astype(jnp.float32) ** beams.length_penalty[leader]
        return jnp.where(total == NO_SCORE, NO_SCORE, jnp.maximum(value, jnp.finfo(jnp.float32).min))

    # Candidates for the finished outputs: those kept so far, what stops now, and at the end the live beams.
    stops = base[:, None] + beams.stop_logprobs[at]
    stops = jnp.where((stops >= last_live) & (stops > NO_SCORE), stops, NO_SCORE)
    ends = jnp.where(is_last & (live > NO_SCORE), live, NO_SCORE)
    num_stops = stops.shape[1]
    new = score(jnp.concatenate([stops.ravel(), ends]), length - prompt)
    kept = jnp.where(inside, beams.done_score[at], NO_SCORE)
    best, pick = jax.lax.top_k(jnp.concatenate([kept, new]), width)
    best = jnp.where(inside, best, NO_SCORE)
    is_kept, is_stop = pick < width, (pick >= width) & (pick < width + width * num_stops)
    stop, end = jnp.maximum(pick - width, 0), jnp.maximum(pick - width - width * num_stops, 0)
    stop = jnp.minimum(stop, width * num_stops - 1)
    source = jnp.where(is_kept, jnp.minimum(pick, width - 1), jnp.where(is_stop, stop // num_stops, parent[end]))
    next_token, next_logprob = beams.next_tokens[at], beams.next_logprobs[at]
    token = jnp.where(is_stop, seqs.sampling.stop_ids[leader][stop % num_stops], next_token[parent[end], rank[end]])
    logprob = jnp.where(is_stop, beams.stop_logprobs[at].ravel()[stop], next_logprob[parent[end], rank[end]])

    def finished(done, running, value):
        taken = jnp.where(is_kept[:, None], done[at[source]], running[at[source]])
        column = jnp.where(is_kept, taken.shape[1], old_length)
        return taken.at[slot, column].set(value, mode="drop")

    done_tokens = finished(beams.done_tokens, seqs.tokens, token)
    done_logprobs = finished(beams.done_logprobs, seqs.logprobs, logprob)
    done_length = jnp.where(is_kept, beams.done_length[at[source]], length)
    done_reason = jnp.where(is_kept, beams.done_reason[at[source]], jnp.where(is_stop, STOP, LENGTH))

    is_full = jnp.all((best > NO_SCORE) | ~inside)
    worst = jnp.min(jnp.where(inside, best, jnp.inf))
    hoped = score(live[0], length - prompt)
    longest = score(live[0], limit - prompt)
    policy = beams.early_stopping[leader]
    beaten = jnp.where(policy == NEVER, worst >= jnp.maximum(hoped, longest), worst >= hoped)
    ended = is_last | (live[0] == NO_SCORE) | (is_full & ((policy == WHEN_FULL) | beaten))

    # Live beams take over their parents' rows; a group that has ended leaves its outputs in them.
    goes_on = inside & (live > NO_SCORE) & ~ended
    cache = once(~ended, lambda c: exchange_rows(c, rows, parent, goes_on), cache)
    column = jnp.where(goes_on, old_length, seqs.tokens.shape[1])
    live_tokens = seqs.tokens[at[parent]].at[slot, column].set(next_token[parent, rank], mode="drop")
    live_logprobs = seqs.logprobs[at[parent]].at[slot, column].set(next_logprob[parent, rank], mode="drop")
    has_output = ended & (best > NO_SCORE)
    num_tokens = jnp.where(ended, jnp.where(has_output, done_length, prompt), jnp.where(goes_on, length, 0))
    computed = jnp.where(goes_on, seqs.num_computed[at[parent]], 0)
    target = jnp.where(inside, rows, seqs.num_rows)

    def put(old, value):
        return old.at[target].set(value, mode="drop")

    if cache.directory is not None:  # the rows' tokens are no longer those of their blocks
        stopped = prefix_directory.stop_rows(cache.directory, jnp.where(ended, target, seqs.num_rows))
        cache = cache.replace(directory=stopped)
    seqs = seqs.replace(
        tokens=put(seqs.tokens, jnp.where(ended, done_tokens, live_tokens)),
        logprobs=put(seqs.logprobs, jnp.where(ended, done_logprobs, live_logprobs)),
        num_tokens=put(seqs.num_tokens, num_tokens),
        num_computed=put(seqs.num_computed, computed),
        num_hit=put(seqs.num_hit, 0),
        status=put(seqs.status, jnp.where(ended, FINISHED, RUNNING)),
        finish_reason=seqs.finish_reason.at[jnp.where(ended, target, seqs.num_rows)].set(
            jnp.where(has_output, done_reason, LENGTH), mode="drop"
        ),
        beams=beams.replace(
            score=put(beams.score, jnp.where(goes_on, live, NO_SCORE)),
            ready=put(beams.ready, False),
            done_tokens=put(beams.done_tokens, done_tokens),
            done_logprobs=put(beams.done_logprobs, done_logprobs),
            done_length=put(beams.done_length, done_length),
            done_score=put(beams.done_score, best),
            done_reason=put(beams.done_reason, done_reason),
            leader=put(beams.leader, jnp.where(ended, seqs.num_rows, leader)),
        ),
    )
    return cache, seqs
