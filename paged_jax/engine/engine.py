"""The host's side of the engine: requests in, tokens out, between dispatches of the jitted loop.

    add_request -> queue -> empty rows      dispatch k + 1 is on its way to the device
    take(id) <- mailbox <- report of k      while the report of k is read

A dispatch runs many steps. It returns the new state, which is donated from one dispatch to the
next, and a small report: status, counts and the newest tokens of each row. The report's arrays are
its own, so reading them stalls nothing. Updates are filed by request: whoever collects a dispatch,
each reader finds its own.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from paged_jax.cache import prefix_directory
from paged_jax.checks import check_int
from paged_jax.config import EngineConfig, token_widths
from paged_jax.engine.counters import Counters
from paged_jax.engine.dispatch import (
    Dispatch,
    Programs,
    check_like,
    compile_programs,
    read_updates,
)
from paged_jax.engine.mailbox import Mailboxes, file, take
from paged_jax.engine.report import STEPS_PER_DISPATCH, Report, Update
from paged_jax.engine.requests import Output, Request, make_request, to_beams, to_rows
from paged_jax.engine.roots import Roots, find_root, leave_roots
from paged_jax.engine.step import EngineState, init_state
from paged_jax.errors import ConfigError, InvalidRequestError, NoProgressError
from paged_jax.sampling.parameters import BeamSearchParams, Params, SamplingParams
from paged_jax.scheduling import sequences

type Prompt = Sequence[int] | np.ndarray | jax.Array


class Engine:
    """Continuous batching over a decoder.

    Add requests at any time, call `step()` or `run(max_steps)` until none is unfinished, and
    `take(request_id)` their updates.

    `state` is the device's side, a pytree. Saved, it can be inspected, or continued with
    `paged_jax.engine.step.run`. An engine cannot serve the rows of a state that is put in from
    outside: the requests of those rows are known to their own host alone.

    Args:
        graphdef, params: of a decoder, from `nnx.split(model)`.
        widths: token counts that a step is compiled for, see `config.token_widths`.
        seed: of the random streams of requests that have no seed.

    Raises ConfigError where the config asks for more than the decoder can do.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: Any,
        config: EngineConfig,
        *,
        widths: tuple[int, ...] | None = None,
        seed: int = 0,
    ):
        if not isinstance(graphdef, nnx.GraphDef) or not isinstance(config, EngineConfig):
            raise ConfigError(
                f"graphdef, config: a {type(graphdef).__name__} and a {type(config).__name__}; "
                "`Engine(*nnx.split(model), EngineConfig(...))` is needed"
            )
        seed = check_int("seed", seed, 0, None, error=ConfigError)
        model = nnx.merge(graphdef, params)
        if config.max_model_len > model.max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: the model was made for "
                f"{model.max_model_len} at most"
            )
        self.params = params
        self.widths = token_widths(config, widths)
        self.vocab_size: int = model.vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(model.eos_token_ids)
        self.state: EngineState = init_state(config, model)
        self.counters: Counters | None = None  # as of the last report
        self._programs: Programs = compile_programs(graphdef, self.widths)
        self._seeds = np.random.default_rng(seed)
        self._queue: dict[str, Request] = {}  # beyond the device's rows, in order
        self._flying: deque[Dispatch] = deque()  # on their way, not collected yet
        self._mail: Mailboxes = {}
        self._outputs: dict[int, Output] = {}  # by row
        self._empty_rows = list(range(config.num_rows))
        self._live: dict[str, Request] = {}
        self._num_added = 0
        self._roots = Roots()

    @property
    def config(self) -> EngineConfig:
        """The engine's sizes."""
        return self.state.config

    # ---------------------------------------------------------------- requests

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt of token ids and return its id.

        With a `cache_salt` it shares cached blocks only with requests of the same salt. The first
        beam search, and one wider than any before, makes the engine compile once more.

        Raises InvalidRequestError for a prompt or parameters that cannot be served, or an id that
        is in use. An id is free again when the last update of its request has been taken.
        """
        while request_id is None:
            name, self._num_added = f"request-{self._num_added}", self._num_added + 1
            request_id = None if self._is_in_use(name) else name
        if not isinstance(request_id, str):
            raise InvalidRequestError(
                f"request_id={request_id!r}: a str is needed, got {type(request_id).__name__}"
            )
        if self._is_in_use(request_id):
            raise InvalidRequestError(
                f"request_id={request_id!r}: is in use; ids must differ among unfinished requests"
            )
        request = self.check_request(
            prompt, sampling_params, request_id=request_id, cache_salt=cache_salt
        )
        if isinstance(request.params, BeamSearchParams):
            seqs = sequences.make_room_for_beams(self.state.seqs, request.params.beam_width)
            self.state = self.state.replace(seqs=seqs)
        elif request.params.seed is None:
            request.seed = int(self._seeds.integers(2**32))
        self._live[request_id] = request
        self._queue[request_id] = request
        return request_id

    def check_request(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str = "",
        cache_salt: str | None = None,
    ) -> Request:
        """Return what `add_request` would queue. Raises where that would, and changes nothing."""
        return make_request(
            request_id,
            prompt,
            SamplingParams() if sampling_params is None else sampling_params,
            config=self.config,
            cache_config=self.state.cache.config,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            cache_salt=cache_salt,
        )

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state; False if there is no such unfinished request.

        Its last updates have the reason "abort". Those of a running request come with the next
        dispatch.
        """
        request = self._live.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            return False
        if self._queue.pop(request_id, None) is not None:
            del self._live[request_id]
            for index in range(request.num_outputs):
                file(self._mail, Update(request_id, [], [], "abort", index=index))
            return True
        rows = np.full(self.config.num_rows, self.config.num_rows, np.int32)
        own = [row for row, output in self._outputs.items() if output.request is request]
        rows[: len(own)] = own
        self.state = self.state.replace(seqs=self._programs.abort(self.state.seqs, rows))
        return True

    def take(self, request_id: str) -> list[Update]:
        """Return a request's updates since the last call, one for each output that has some.

        Raises InvalidRequestError for an id that is not in use.
        """
        if not isinstance(request_id, str) or not self._is_in_use(request_id):
            raise InvalidRequestError(
                f"request_id={request_id!r}: is not in use; a request's last updates are taken once"
            )
        return take(self._mail, request_id)

    def num_outputs(self, request_id: str) -> int:
        """Return how many outputs an unfinished request has.

        Raises InvalidRequestError for any other id.
        """
        if not isinstance(request_id, str) or request_id not in self._live:
            raise InvalidRequestError(f"request_id={request_id!r}: is no unfinished request's")
        return self._live[request_id].num_outputs

    def is_finished(self, request_id: str) -> bool:
        """Return whether all outputs of a request have ended. Updates may still be there."""
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id={request_id!r:.80}: a str is needed")
        return request_id not in self._live

    def has_unfinished(self) -> bool:
        """Return whether any request has outputs that have not ended."""
        return bool(self._live)

    def drop(self, request_id: str) -> None:
        """Forget the updates of a request that has ended; others are not touched."""
        if self.is_finished(request_id):
            take(self._mail, request_id)

    def _is_in_use(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self._mail

    # ---------------------------------------------------------------- params and cached contents

    def update_params(self, params: Any) -> None:
        """Go on with other params of the same shapes. No content that the old ones computed is hit.

        Running requests go on with what they have computed. Raises ConfigError, and changes
        nothing, for other shapes or dtypes.
        """
        check_like(params, self.params)
        self.params = params
        leave_roots(self._roots)
        roots = np.full(self.config.num_rows, -1, np.int32)
        for row, output in self._outputs.items():
            roots[row] = find_root(self._roots, output.request.cache_salt)
        self.state = self._programs.set_roots(self.state, roots)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. False, and nothing is changed, while blocks are in use."""
        cache = self.state.cache
        if int(cache.pool.num_free) < cache.pool.num_blocks - 1:
            return False
        if cache.directory is not None:
            directory = prefix_directory.reset(cache.directory)
            self.state = self.state.replace(cache=cache.replace(directory=directory))
        return True

    # ---------------------------------------------------------------- dispatches

    def step(self) -> list[str]:
        """Run one decoding step; see `run`."""
        return self.run(1)

    def run(self, max_steps: int) -> list[str]:
        """Run up to `max_steps` decoding steps and return the ids of the requests with updates.

        Raises NoProgressError when requests wait, none runs and none can be admitted.
        """
        max_steps = check_int("max_steps", max_steps, 1, None, error=InvalidRequestError)
        self.collect_all()
        while max_steps > 0 and self.has_unfinished():
            self.dispatch(max_steps)
            self.collect()
            max_steps -= STEPS_PER_DISPATCH
        return list(self._mail)

    def advance(self, max_steps: int = STEPS_PER_DISPATCH) -> None:
        """Start a dispatch, and file the updates of the one before it while the device works."""
        self.dispatch(check_int("max_steps", max_steps, 1, None, error=InvalidRequestError))
        while len(self._flying) > 1:
            self.collect()

    def dispatch(self, max_steps: int = STEPS_PER_DISPATCH) -> None:
        """Fill empty rows from the queue and start up to `max_steps` steps (32 at most).

        Returns without waiting for them.
        """
        max_steps = check_int("max_steps", max_steps, 0, None, error=InvalidRequestError)
        max_steps = min(max_steps, STEPS_PER_DISPATCH)
        self._fill_rows()
        self.state, report = self._programs.run(self.params, self.state, np.int32(max_steps))
        self._flying.append(Dispatch(report, dict(self._outputs), max_steps))

    def collect(self) -> None:
        """Wait for the oldest dispatch and file its updates, if there is one."""
        if not self._flying:
            return
        dispatch = self._flying[0]
        report: Report = jax.device_get(dispatch.report)
        self._flying.popleft()  # only now: whoever is interrupted above finds it still there
        self.counters = report.counters
        # A row that has ended since then, and perhaps makes another output, is left out.
        current = {
            row: output
            for row, output in dispatch.outputs.items()
            if self._outputs.get(row) is output
        }
        for row, update in read_updates(report, current, self.state.seqs):
            file(self._mail, update)
            if update.finish_reason is not None:
                self._end_output(row)
        is_stuck = report.num_waiting > 0 and report.num_running == 0
        if is_stuck and report.steps < dispatch.max_steps:
            raise NoProgressError(
                f"{report.num_waiting} requests wait, none runs, and the first needs more blocks "
                "than are free: are rows or blocks of engine.state held by someone else?"
            )

    def collect_all(self) -> None:
        """Wait for every dispatch that is on its way."""
        while self._flying:
            self.collect()

    def is_flying(self) -> bool:
        """Return whether a dispatch is on its way."""
        return bool(self._flying)

    def _fill_rows(self) -> None:
        """Give empty rows to the requests at the head of the queue."""
        new: dict[int, Output] = {}
        while self._queue:
            request = next(iter(self._queue.values()))
            if request.num_outputs > len(self._empty_rows):
                break
            del self._queue[request.request_id]
            for index in range(request.num_outputs):
                new[self._empty_rows.pop(0)] = Output(request, index)
        if not new:
            return
        roots = {row: find_root(self._roots, o.request.cache_salt) for row, o in new.items()}
        rows, beams = to_rows(new, self.config, roots), to_beams(new, self.config)
        self._outputs.update(new)
        self.state = self.state.replace(seqs=self._programs.add(self.state.seqs, rows, beams))

    def _end_output(self, row: int) -> None:
        request = self._outputs.pop(row).request
        self._empty_rows.append(row)
        request.num_ended += 1
        if request.num_ended == request.num_outputs:
            del self._live[request.request_id]
