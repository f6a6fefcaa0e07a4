"""The requests of an engine by where they are, and the rows that their outputs have.

    live, queued    beyond the device's rows, in order
    live, in rows   the device works on them, or they wait there
    done            ended; their last updates are not taken yet

Each change is one assignment that counts, after others that mean nothing without it, and may be
made twice: whoever is interrupted in the middle leaves the change done or not done. A request is
live from the moment at which it is in `live`, and has ended when its mailbox says so.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from paged_jax.engine.mailbox import file, take
from paged_jax.engine.report import Update
from paged_jax.engine.requests import Output, Request


@dataclass(eq=False)
class Registry:
    """Requests by id, and outputs by row.

    The orders are linked lists: a dict whose first entries were deleted is slow to begin with.

    Attributes:
        live: those that somebody waits for, in order of arrival.
        queue: those of `live` that have no rows.
        done: ended, with updates that were not taken.
        with_updates: ids of requests with updates that were not taken.
        rows: the output that each row makes, also of abandoned requests.
        abandoned: ids that nobody reads any more, not looked at yet. To append to it is safe
            from any thread and at any moment.
    """

    live: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    queue: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    done: dict[str, Request] = field(default_factory=dict)
    with_updates: dict[str, None] = field(default_factory=dict)
    rows: dict[int, Output] = field(default_factory=dict)
    abandoned: deque[str] = field(default_factory=deque)


# ---------------------------------------------------------------- in


def enqueue(registry: Registry, request: Request) -> None:
    """Put a request at the end of the queue."""
    registry.queue.pop(request.request_id, None)  # an interrupted one of the same id
    registry.queue[request.request_id] = request
    registry.live[request.request_id] = request


def is_in_use(registry: Registry, request_id: str) -> bool:
    """Return whether an id is that of a request which is live, or has updates left."""
    return request_id in registry.live or request_id in registry.done


def next_for_rows(registry: Registry, num_rows: int) -> dict[int, Output]:
    """Choose rows for the outputs at the head of the queue. Only dead entries are changed.

    A request has all its rows at once. Rows are empty where no output has them.

        rows 0 2 taken of 4, queue: a with 1 output, b with 2 -> {1: a's}; b waits for a second row
    """
    empty = iter([row for row in range(num_rows) if row not in registry.rows])
    left, chosen = num_rows - len(registry.rows), {}
    for request_id, request in list(_take_while_some(registry, left)):
        if registry.live.get(request_id) is not request:
            registry.queue.pop(request_id, None)  # an interrupted `enqueue`
        elif request.is_aborted or request.has_ended:
            end(registry, request, "abort")  # an interrupted abort, or collect
        elif request.num_outputs > left:
            break
        else:
            left -= request.num_outputs
            chosen |= {next(empty): Output(request, i) for i in range(request.num_outputs)}
    return chosen


def _take_while_some(registry: Registry, count: int) -> Iterable[tuple[str, Request]]:
    """Yield queued requests as long as there may be a row for them."""
    for request_id, request in registry.queue.items():
        if count <= 0:
            return
        if not request.is_aborted:
            count -= request.num_outputs
        yield request_id, request


def occupy(registry: Registry, chosen: dict[int, Output]) -> None:
    """Let outputs have the rows that were chosen for them."""
    registry.rows.update(chosen)
    for output in chosen.values():
        registry.queue.pop(output.request.request_id, None)


# ---------------------------------------------------------------- out


def file_updates(registry: Registry, request: Request, updates: list[Update]) -> None:
    """File updates of a request, which ends with the last of its outputs."""
    if not request.is_abandoned and updates:
        registry.with_updates[request.request_id] = None
    request.mailbox = file(request.mailbox, updates)
    if request.has_ended:
        _finish(registry, request)


def vacate(registry: Registry, row: int) -> None:
    """Take a row from its output, which has ended."""
    request = registry.rows[row].request
    if request.has_ended:
        _finish(registry, request)
    registry.rows.pop(row, None)


def end(registry: Registry, request: Request, reason: str) -> None:
    """End all outputs of a request that has no rows."""
    rest = [i for i, ended in enumerate(request.mailbox.has_ended) if not ended]
    updates = [Update(request.request_id, [], [], reason, index=index) for index in rest]
    file_updates(registry, request, updates)


def _finish(registry: Registry, request: Request) -> None:
    """Move a request that has ended from live to done, unless nobody waits for it."""
    request_id = request.request_id
    if registry.live.get(request_id) is request:
        registry.done[request_id] = request
        registry.live.pop(request_id, None)
    if registry.queue.get(request_id) is request:
        registry.queue.pop(request_id, None)


def take_updates(registry: Registry, request_id: str) -> list[Update]:
    """Return the pending updates of an id in use. The last ones make it free."""
    request = registry.live.get(request_id) or registry.done[request_id]
    mailbox, updates = take(request.mailbox)
    request.mailbox = mailbox
    registry.with_updates.pop(request_id, None)
    if request.has_ended:
        _finish(registry, request)
        forget(registry, request_id)
    return updates


def forget(registry: Registry, request_id: str) -> None:
    """Let the id of a request that is done be free."""
    registry.with_updates.pop(request_id, None)
    registry.done.pop(request_id, None)


def sweep(registry: Registry) -> None:
    """Take out the requests that were abandoned. Their rows are aborted with the next dispatch."""
    while registry.abandoned:
        request_id = registry.abandoned[0]
        request = registry.live.get(request_id)
        if request is not None:
            request.is_abandoned = True
            registry.queue.pop(request_id, None)
        registry.live.pop(request_id, None)
        forget(registry, request_id)
        registry.abandoned.popleft()


def aborted_rows(registry: Registry) -> list[int]:
    """Return the rows whose outputs nobody wants any more."""
    return [
        row
        for row, output in registry.rows.items()
        if output.request.is_aborted or output.request.is_abandoned
    ]


def requeue(registry: Registry) -> None:
    """Put all live requests back into the queue, in order of arrival. They start again."""
    sweep(registry)
    registry.rows = {}
    for request in list(registry.live.values()):
        if request.is_aborted or request.has_ended:
            end(registry, request, "abort")
    registry.queue = registry.live.copy()
