"""The host's side of the engine: requests in, tokens out, between dispatches of the jitted loop.

    add_request -> queue -> empty rows         dispatch k + 1 is on its way to the device
    updates     <- report of dispatch k        while the report of k is read

A dispatch runs many steps and returns the new state, which is donated from one dispatch to the next, and a small report:
status, counts and the newest tokens of each row. The report's arrays are its own, so reading them stalls nothing.
"""

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from paged_jax import sequences, step
from paged_jax.config import EngineConfig
from paged_jax.errors import InvalidRequestError, NoProgressError
from paged_jax.requests import Request, make_request, to_rows
from paged_jax.sampling_params import SamplingParams, check_int

STEPS_PER_DISPATCH = 32


class Report(struct.PyTreeNode):
    """What the host is told of a dispatch; R rows, the newest K tokens of each."""

    status: Int[Array, "R"]
    finish_reason: Int[Array, "R"]
    num_tokens: Int[Array, "R"]
    tokens: Int[Array, "R K"]
    logprobs: Float[Array, "R K"]
    num_running: Int[Array, ""]
    num_waiting: Int[Array, ""]
    steps: Int[Array, ""]
    counters: step.Counters


@dataclass(frozen=True)
class Update:
    """News of one request: the tokens since the last news, and at the end why it ended."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | None = None  # the stop token id; None for end-of-text


@dataclass(frozen=True)
class Dispatch:
    """A dispatch on its way: its report, and whose rows were whose."""

    report: Report
    requests: dict[int, Request]
    max_steps: int


def _run(graphdef, config: EngineConfig, sizes, params, state: step.EngineState, max_steps):
    model = nnx.merge(graphdef, params)
    state, steps = step.run(model, config, sizes, state, max_steps)
    seqs = state.seqs
    newest = seqs.num_tokens[:, None] - STEPS_PER_DISPATCH + jnp.arange(STEPS_PER_DISPATCH, dtype=jnp.int32)
    newest = jnp.maximum(newest, 0)
    report = Report(
        status=seqs.status,
        finish_reason=seqs.finish_reason,
        num_tokens=seqs.num_tokens,
        tokens=jnp.take_along_axis(seqs.tokens, newest, axis=1),
        logprobs=jnp.take_along_axis(seqs.logprobs, newest, axis=1),
        num_running=seqs.num_running,
        num_waiting=seqs.num_waiting,
        steps=steps,
        counters=state.counters,
    )
    return state, report


class Engine:
    """Continuous batching over a decoder: add requests at any time, call `step` or `run` until none is left.

    `state` is the device's side, a pytree. `params` may be replaced between dispatches by others of the same shapes.
    """

    def __init__(self, graphdef, params, config: EngineConfig, *, seed: int = 0):
        model = nnx.merge(graphdef, params)
        self.config, self.params = config, params
        self.sizes = step.cache_config(config, model)
        self.vocab_size: int = model.vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(model.eos_token_ids)
        self.state = step.init_state(config, self.sizes)
        self.counters: step.Counters | None = None  # as of the last report
        self._jit_run = jax.jit(partial(_run, graphdef, config, self.sizes), donate_argnums=1)
        self._jit_add = jax.jit(sequences.add, donate_argnums=0)
        self._jit_abort = jax.jit(sequences.abort, donate_argnums=0)
        self._seeds = np.random.default_rng(seed)
        self._queue: collections.deque[Request] = collections.deque()  # beyond the device's rows
        self._held: list[Update] = []  # collected, but not yet delivered
        self._rows: dict[int, Request] = {}
        self._empty = list(range(config.rows))
        self._live: dict[str, Request] = {}
        self._count = 0

    def add_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt of token ids; returns its id.

        Raises InvalidRequestError for a prompt or parameters that cannot be served, or an id that is in use.
        """
        while request_id is None:
            name = f"request-{self._count}"
            request_id, self._count = (None if self._is_known(name) else name), self._count + 1
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id={request_id!r}: a str is needed, got {type(request_id).__name__}")
        if self._is_known(request_id):
            raise InvalidRequestError(
                f"request_id={request_id!r}: is in use; ids must differ among unfinished requests"
            )
        request = self.check_request(prompt, sampling_params, request_id=request_id)
        if request.params.seed is None:
            request.seed = int(self._seeds.integers(2**32))
        self._live[request_id] = request
        self._queue.append(request)
        return request_id

    def check_request(
        self, prompt: Sequence[int], sampling_params: SamplingParams | None = None, *, request_id: str = ""
    ) -> Request:
        """What `add_request` would queue; raises InvalidRequestError where that would, and changes nothing."""
        return make_request(
            request_id,
            prompt,
            SamplingParams() if sampling_params is None else sampling_params,
            config=self.config,
            sizes=self.sizes,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            seed=0,
        )

    def _is_known(self, request_id: str) -> bool:
        return request_id in self._live or any(update.request_id == request_id for update in self._held)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state; its last update, with reason "abort", comes with the next. False if it is not known."""
        request = self._live.get(request_id)
        if request is None:
            return False
        if request in self._queue:
            self._queue.remove(request)
            del self._live[request_id]
            self._held.append(Update(request_id, [], [], "abort"))
            return True
        row = next(row for row, other in self._rows.items() if other is request)
        rows = jnp.full(1, row, jnp.int32)
        self.state = self.state.replace(seqs=self._jit_abort(self.state.seqs, rows))
        return True

    def has_unfinished(self) -> bool:
        """Whether a request is still owed an update."""
        return bool(self._live or self._held)

    def step(self) -> list[Update]:
        """One decoding step. Returns the news of each request that has some."""
        return self.run(1)

    def run(self, max_steps: int) -> list[Update]:
        """Up to `max_steps` decoding steps. Returns the news of each request that has some, one update each.

        Raises NoProgressError when requests wait, none runs and none can be admitted.
        """
        max_steps = check_int("max_steps", max_steps, 1)
        merged: dict[str, Update] = {}
        try:
            while max_steps > 0 and self.has_unfinished():
                for update in self.collect(self.dispatch(max_steps)):
                    before = merged.get(update.request_id)
                    merged[update.request_id] = update if before is None else _join(before, update)
                max_steps -= STEPS_PER_DISPATCH
        except BaseException:
            self._held = [*merged.values(), *self._held]
            raise
        return list(merged.values())

    def dispatch(self, max_steps: int = STEPS_PER_DISPATCH) -> Dispatch:
        """Fill empty rows from the queue and start up to `max_steps` steps (32 at most), without waiting for them."""
        max_steps = min(max_steps, STEPS_PER_DISPATCH)
        count = min(len(self._queue), len(self._empty))
        if count:
            new = dict(zip(self._empty[:count], itertools.islice(self._queue, count), strict=True))
            rows = to_rows(new, self.config)
            for _ in new:
                self._queue.popleft()
            self._empty = self._empty[count:]
            self._rows.update(new)
            self.state = self.state.replace(seqs=self._jit_add(self.state.seqs, rows))
        self.state, report = self._jit_run(self.params, self.state, np.int32(max_steps))
        return Dispatch(report, dict(self._rows), max_steps)

    def collect(self, dispatch: Dispatch) -> list[Update]:
        """Wait for a dispatch and return its news. Dispatches must be collected in the order in which they were made."""
        report: Report = jax.device_get(dispatch.report)
        self.counters = report.counters
        updates, self._held = self._held, []
        for row, request in dispatch.requests.items():
            if self._live.get(request.request_id) is request:
                update = self._read(report, row, request)
                if update is not None:
                    updates.append(update)
        if report.steps < dispatch.max_steps and report.num_waiting > 0 and report.num_running == 0:
            self._held = updates
            raise NoProgressError(
                f"{report.num_waiting} requests wait, none runs, and the first needs more blocks than are free: are rows or "
                "blocks of engine.state held by someone else?"
            )
        return updates

    def hold(self, updates: Sequence[Update]) -> None:
        """Hand back updates of someone else's requests: they come again with the next."""
        self._held.extend(updates)

    def _read(self, report: Report, row: int, request: Request) -> Update | None:
        new = int(report.num_tokens[row]) - request.num_seen
        if new < 0:  # a later report was read first, by someone else's iterator: nothing here is news
            return None
        request.num_seen += new
        finished = report.status[row] == sequences.FINISHED
        if new == 0 and not finished:
            return None
        tokens, logprobs = report.tokens[row], report.logprobs[row]
        if new > STEPS_PER_DISPATCH:  # an earlier report was never collected: its reader was interrupted
            seqs, length = self.state.seqs, int(report.num_tokens[row])
            tokens, logprobs = (np.asarray(x[row])[:length] for x in (seqs.tokens, seqs.logprobs))
        tokens, logprobs = (x[len(x) - new :].tolist() for x in (tokens, logprobs))
        if not finished:
            return Update(request.request_id, tokens, logprobs)
        del self._rows[row], self._live[request.request_id]
        self._empty.append(row)
        reason = sequences.FINISH_REASONS[report.finish_reason[row]]
        stopped = reason == "stop" and tokens[-1] not in request.eos_ids
        return Update(request.request_id, tokens, logprobs, reason, tokens[-1] if stopped else None)


def _join(first: Update, then: Update) -> Update:
    return Update(
        first.request_id,
        first.token_ids + then.token_ids,
        first.logprobs + then.logprobs,
        then.finish_reason,
        then.stop_reason,
    )
