"""The host's side of the engine: requests in, tokens out, between dispatches of the jitted loop.

    add_request -> queue -> empty rows      dispatch k + 1 is on its way to the device
    take(id) <- mailbox <- report of k      while the report of k is read

A dispatch runs many steps. It returns the new state, which is donated from one dispatch to the
next, and a small report: status, counts and the newest tokens of each row. The report's arrays are
its own, so reading them stalls nothing. Updates are filed by request: whoever collects a dispatch,
each reader finds its own.

Whoever is interrupted (Ctrl-C, no memory on the device) finds the engine as it was before one of
the call's dispatches or after it. Only where the donated state was lost on the way, or may have
been, is the engine closed: `reset` opens it again. Threads may share an engine: a lock lets one at
a time in.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.cache import prefix_directory
from paged_jax.checks import check_int
from paged_jax.config import EngineConfig, token_widths
from paged_jax.engine import registry
from paged_jax.engine.counters import Counters
from paged_jax.engine.custody import Custody
from paged_jax.engine.dispatch import (
    Dispatch,
    Programs,
    check_like,
    compile_programs,
    read_updates,
    rows_with,
    run_args,
)
from paged_jax.engine.exclusive import exclusive
from paged_jax.engine.intake import Intake
from paged_jax.engine.report import STEPS_PER_DISPATCH, Report, Update
from paged_jax.engine.requests import Output, Request, to_beams, to_rows
from paged_jax.engine.roots import Roots, find_root, with_new_roots
from paged_jax.engine.runner import Runner
from paged_jax.engine.start import start
from paged_jax.engine.step import EngineState, init_state
from paged_jax.errors import ConfigError, InvalidRequestError, NoProgressError
from paged_jax.sampling.parameters import BeamSearchParams
from paged_jax.scheduling import sequences
from paged_jax.scheduling.sequences import FINISHED, WAITING


class Engine(Intake):
    """Continuous batching over a decoder.

    Add requests at any time, call `step()` or `run(max_steps)` until none is unfinished, and
    `take(request_id)` their updates.

    `state` is the device's side, a pytree. Saved, it can be inspected, or continued with
    `paged_jax.engine.step.run`. An engine cannot serve the rows of a state that is put in from
    outside: the requests of those rows are known to their own host alone.

    Args:
        graphdef, params: of a decoder, from `nnx.split(model)`.
        load: returns the params, where `params` are their shapes. It is called in another thread
            while the program for the steps is compiled in this one.
        widths: token counts that a step is compiled for, see `config.token_widths`.
        later_widths: of a second program, compiled in another process while the first one serves.
            It takes over once it is ready (`engine.later`).
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
        later_widths: tuple[int, ...] | None = None,
        load: Callable[[], Any] | None = None,
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
        self.widths = token_widths(config, widths)
        self._programs: Programs = compile_programs(graphdef, self.widths)
        later = None if later_widths is None else token_widths(config, later_widths, "later_widths")
        self.params, state, first = start(
            load, config, model, graphdef, params, self.widths, self._programs.run
        )
        self._runner = Runner(first, graphdef, later)
        super().__init__(state, model, seed)
        self.counters: Counters | None = None  # as of the last report
        self._graphdef = graphdef
        self._flying: deque[Dispatch] = deque()  # on their way, not collected yet
        self._roots = Roots()
        self._custody = Custody()

    # ---------------------------------------------------------------- params and cached contents

    @exclusive
    def update_params(self, params: Any) -> None:
        """Go on with other params of the same shapes. No content that the old ones computed is hit.

        Running requests go on with what they have computed. Raises ConfigError, and changes
        nothing, for other shapes or dtypes.
        """
        self._custody.check()
        check_like(params, self.params)
        new_roots = with_new_roots(self._roots)
        of_rows = np.full(self.config.num_rows, -1, np.int32)
        for row, output in self._requests.rows.items():
            of_rows[row] = find_root(new_roots, output.request.cache_salt)

        roots = jax.device_put(of_rows)

        def keep(state: EngineState) -> None:
            self.params, self._roots, self.state = params, new_roots, state

        self._donate("update_params", lambda: self._programs.set_roots(self.state, roots), keep)

    @exclusive
    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. False, and nothing is changed, while blocks are in use."""
        self._custody.check()
        self._settle()
        cache = self.state.cache  # not donated: what is made beside it is kept in one assignment
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

    @exclusive
    def run(self, max_steps: int) -> list[str]:
        """Run up to `max_steps` decoding steps and return the ids of the requests with updates.

        Raises NoProgressError when requests wait, none runs and none can be admitted.
        """
        max_steps = check_int("max_steps", max_steps, 1, None, error=InvalidRequestError)
        self._custody.check()
        self._collect_all()
        while max_steps > 0 and self._has_unfinished():
            self._dispatch(max_steps)
            self._collect()
            max_steps -= STEPS_PER_DISPATCH
        self._settle()
        return list(self._requests.with_updates)

    @exclusive
    def advance(self, max_steps: int = STEPS_PER_DISPATCH) -> None:
        """Start a dispatch, and file the updates of the one before it while the device works."""
        self._dispatch(check_int("max_steps", max_steps, 1, None, error=InvalidRequestError))
        while len(self._flying) > 1:
            self._collect()

    @exclusive
    def dispatch(self, max_steps: int = STEPS_PER_DISPATCH) -> None:
        """Fill empty rows from the queue and start up to `max_steps` steps (32 at most).

        Returns without waiting for them.
        """
        self._dispatch(check_int("max_steps", max_steps, 0, None, error=InvalidRequestError))

    def _dispatch(self, max_steps: int) -> None:
        registry.sweep(self._requests)
        self._fill_rows()
        self._start(min(max_steps, STEPS_PER_DISPATCH))

    @exclusive
    def collect(self) -> None:
        """Wait for the oldest dispatch and file its updates, if there is one.

        Whoever is interrupted may collect it again: what was filed is not filed twice.
        """
        self._collect()

    def _collect(self) -> None:
        self._custody.check()
        if not self._flying:
            return
        dispatch, requests = self._flying[0], self._requests
        try:
            report: Report = jax.device_get(dispatch.report)
        except Exception:
            # What the device could not compute, the state hangs on, too.
            self._custody.lost_in = "collect"
            raise
        self.counters = report.counters
        # A row that has ended since then, and perhaps makes another output, is left out.
        current = {r: o for r, o in dispatch.outputs.items() if requests.rows.get(r) is o}
        filed: dict[Request, list[Update]] = {}
        for request, update in read_updates(report, current, self.state.seqs):
            filed.setdefault(request, []).append(update)
        for request, updates in filed.items():
            registry.file_updates(requests, request, updates)
        for row in rows_with(FINISHED, report, current):
            registry.vacate(requests, row)
        self._flying.popleft()
        if report.num_running == 0 and report.steps < dispatch.max_steps:
            registry.sweep(requests)
            _check_progress(rows_with(WAITING, report, current), registry.aborted_rows(requests))

    @exclusive
    def collect_all(self) -> None:
        """Wait for every dispatch that is on its way."""
        self._collect_all()

    def _collect_all(self) -> None:
        while self._flying:
            self._collect()

    def finish_compiling(self) -> str | None:
        """Wait for the program of `later_widths`, if it was begun: the first dispatch begins it.

        Returns why there is none, or None where it serves from now on.
        """
        return self._runner.wait()

    def is_flying(self) -> bool:
        """Return whether a dispatch is on its way."""
        return bool(self._flying)

    # ---------------------------------------------------------------- when the state is lost

    def is_closed(self) -> bool:
        """Return whether the state was lost in a call that was interrupted: `reset` is needed."""
        return self._custody.lost_in is not None

    @exclusive
    def reset(self) -> None:
        """Start again with new pages and the same params.

        All requests are kept: those that had begun are computed again, in order of arrival, and
        give those tokens that were not filed yet. In float32, under the params that they began
        with, these continue those that were filed. Cached contents are gone; counters go on.
        """
        self._reset()

    def _reset(self) -> None:
        self._custody.lost_in = "reset"
        config = self.config
        for array in jax.tree.leaves(self.state):
            array.delete()  # room for the new ones
        self._flying.clear()
        registry.requeue(self._requests)
        state = init_state(config, nnx.merge(self._graphdef, self.params))
        if self.counters is not None:
            state = state.replace(counters=jax.tree.map(jnp.asarray, self.counters))
        self.state = state
        self._custody.lost_in = None

    @exclusive
    def reopen(self) -> None:
        """Reset the engine if it is closed."""
        if self.is_closed():
            self._reset()

    def _donate[T](self, call: str, program: Callable[[], T], keep: Callable[[T], None]) -> None:
        self._custody.donate(call, self.state, program, keep)

    def _start(self, max_steps: int) -> None:
        outputs = dict(self._requests.rows)
        aborted = registry.aborted_rows(self._requests)
        steps, is_aborted = jax.device_put(run_args(self.config, max_steps, aborted))

        def keep(result: tuple[EngineState, Report]) -> None:
            self.state, report = result
            self._flying.append(Dispatch(report, outputs, max_steps))

        def program() -> tuple[EngineState, Report]:
            args = self.params, self.state, steps, is_aborted
            return self._runner.run(self._programs.run, *args)

        self._donate("dispatch", program, keep)
        self._runner.prepare(self.params, self.state, steps, is_aborted)

    def _fill_rows(self) -> None:
        """Give empty rows to the requests at the head of the queue."""
        new = registry.next_for_rows(self._requests, self.config.num_rows)
        if not new:
            return
        self._make_room_for_beams(new)
        roots = {row: find_root(self._roots, o.request.cache_salt) for row, o in new.items()}
        rows, beams = jax.device_put((to_rows(new, self.config, roots), to_beams(new, self.config)))

        def keep(seqs: sequences.Sequences) -> None:
            self.state = self.state.replace(seqs=seqs)
            registry.occupy(self._requests, new)

        self._donate("dispatch", lambda: self._programs.add(self.state.seqs, rows, beams), keep)

    def _make_room_for_beams(self, new: dict[int, Output]) -> None:
        params = [output.request.params for output in new.values()]
        widths = [each.beam_width for each in params if isinstance(each, BeamSearchParams)]
        if widths:
            seqs = sequences.make_room_for_beams(self.state.seqs, max(widths))
            if jax.tree.structure(seqs) != jax.tree.structure(self.state.seqs):
                self._runner.forget()
            self.state = self.state.replace(seqs=seqs)

    def _settle(self) -> None:
        """Let abandoned requests give their blocks back where no live one runs the engine."""
        registry.sweep(self._requests)
        if registry.aborted_rows(self._requests) and not self._has_unfinished():
            self._start(0)
            self._collect_all()


def _check_progress(waiting: list[int], unwanted: list[int]) -> None:
    """Raise NoProgressError where rows wait although none runs, other than unwanted ones."""
    if rows := set(waiting) - set(unwanted):
        raise NoProgressError(
            f"{len(rows)} requests wait, none runs, and the first needs more blocks than are free: "
            "are rows or blocks of engine.state held by someone else?"
        )
