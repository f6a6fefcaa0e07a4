"""What the host has of a request's outputs, and the updates that its reader has not taken yet.

A mailbox is a value, replaced whole: whoever is interrupted leaves the one before or the one after.

    output 0 has 2 tokens    file: tokens 7 8, "length"    pending {0: 7 8 "length"}
    take -> [tokens 7 8 "length"], nothing pending

Tokens are counted, so that a report that is read twice, or rows that start again after
`Engine.reset`, give each token once.
"""

from collections.abc import Iterable
from typing import NamedTuple

from paged_jax.engine.report import Update, join


class Mailbox(NamedTuple):
    """The outputs of one request.

    Attributes:
        num_seen: tokens of each output that are filed, prompt included.
        has_ended: which outputs have their last update.
        pending: updates that are not taken, by output.
    """

    num_seen: tuple[int, ...]
    has_ended: tuple[bool, ...]
    pending: dict[int, Update]


def empty_mailbox(num_outputs: int, num_prompt_tokens: int) -> Mailbox:
    """Return the mailbox of a request that has no output yet."""
    return Mailbox((num_prompt_tokens,) * num_outputs, (False,) * num_outputs, {})


def file(mailbox: Mailbox, updates: Iterable[Update]) -> Mailbox:
    """Add updates; those of one output are joined."""
    num_seen, has_ended = list(mailbox.num_seen), list(mailbox.has_ended)
    pending = dict(mailbox.pending)
    for update in updates:
        index = update.index
        num_seen[index] += len(update.token_ids)
        has_ended[index] |= update.finish_reason is not None
        before = pending.get(index)
        pending[index] = update if before is None else join(before, update)
    return Mailbox(tuple(num_seen), tuple(has_ended), pending)


def take(mailbox: Mailbox) -> tuple[Mailbox, list[Update]]:
    """Return the mailbox without pending updates, and those."""
    return mailbox._replace(pending={}), list(mailbox.pending.values())
