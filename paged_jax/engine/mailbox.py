"""Updates of each request until they are taken: any number of readers, each of its own requests.

file "a", output 0: tokens 5 6      file "a", output 0: token 7, "length"
take "a" -> [output 0: tokens 5 6 7, "length"]      take "a" -> []
"""

from paged_jax.engine.report import Update, join

type Mailboxes = dict[str, dict[int, Update]]  # by request id, then by output


def file(mail: Mailboxes, update: Update) -> None:
    """Add an update of one output to its request's mailbox."""
    box = mail.setdefault(update.request_id, {})
    before = box.get(update.index)
    box[update.index] = update if before is None else join(before, update)


def take(mail: Mailboxes, request_id: str) -> list[Update]:
    """Empty a request's mailbox: one update for each output that has some."""
    return list(mail.pop(request_id, {}).values())
