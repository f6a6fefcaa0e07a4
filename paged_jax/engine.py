"""The host's side of the engine: requests in, tokens out, between dispatches of the jitted loop.

    add_request -> queue -> empty rows         dispatch k + 1 is on its way to the device
    updates     <- report of dispatch k        while the report of k is read

A dispatch runs many steps and returns the new state, which is donated from one dispatch to the next, and a small report:
status, counts and the newest tokens of each row. The report's arrays are its own, so reading them stalls nothing.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax import prefix_directory, sequences, step
from paged_jax.beam_search import add_beams
from paged_jax.beams import init_beams, widen_beams
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError, InvalidRequestError, NoProgressError
from paged_jax.report import STEPS_PER_DISPATCH, Report, Update, join, make_report
from paged_jax.requests import Output, Params, Request, make_request, to_beams, to_rows
from paged_jax.sampling_params import BeamSearchParams, SamplingParams, check_int


@dataclass(frozen=True)
class Dispatch:
    """A dispatch on its way: its report, and whose rows were whose."""

    report: Report
    outputs: dict[int, Output]
    max_steps: int


def _run(graphdef, config: EngineConfig, sizes, params, state: step.EngineState, max_steps):
    model = nnx.merge(graphdef, params)
    state, steps = step.run(model, config, sizes, state, max_steps)
    return state, make_report(state, steps)


class Engine:
    """Continuous batching over a decoder: add requests at any time, call `step()` or `run(max_steps)` until none is left.

    `state` is the device's side, a pytree. Saved, it can be inspected, or gone on from with `paged_jax.step.run`; an engine does
    not serve the rows of a state that is put in from outside, for whose rows are whose is known on the host alone. Raises
    ConfigError where the config asks for more than the decoder can do.
    """

    def __init__(self, graphdef, params, config: EngineConfig, *, seed: int = 0):
        if not isinstance(graphdef, nnx.GraphDef) or not isinstance(config, EngineConfig):
            raise ConfigError(
                f"graphdef, config: a {type(graphdef).__name__} and a {type(config).__name__}; "
                "`Engine(*nnx.split(model), EngineConfig(...))` is needed"
            )
        if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
            raise ConfigError(f"seed={seed!r:.40}: an int of at least 0 is needed")
        model = nnx.merge(graphdef, params)
        if config.max_model_len > model.max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: the model was made for {model.max_model_len} at most"
            )
        self.config, self.params, self._graphdef = config, params, graphdef
        self.sizes = step.cache_config(config, model)
        self.vocab_size: int = model.vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(model.eos_token_ids)
        self.state = step.init_state(config, self.sizes)
        self.counters: step.Counters | None = None  # as of the last report
        self._jit_run = self._make_run()
        self._jit_add = jax.jit(_add, donate_argnums=0)
        self._jit_abort = jax.jit(sequences.abort, donate_argnums=0)
        self._jit_reroot = jax.jit(_reroot, donate_argnums=0)
        self._seeds = np.random.default_rng(seed)
        self._queue: collections.deque[Request] = collections.deque()  # beyond the device's rows
        self._held: list[Update] = []  # collected, but not yet delivered
        self._rows: dict[int, Output] = {}
        self._empty = list(range(config.rows))
        self._live: dict[str, Request] = {}
        self._count = 0
        # Salts, exactly, and the content they begin under these params. A number is used once; where they start is drawn, so
        # that what another engine has cached, in a state that was saved, is not taken for this one's.
        self._roots: dict[str | None, int] = {}
        self._next_root = -int(np.random.default_rng().integers(1, 2**30))

    def _make_run(self):
        return jax.jit(partial(_run, self._graphdef, self.config, self.sizes), donate_argnums=1)

    def add_request(
        self,
        prompt: Sequence[int],
        sampling_params: Params | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt of token ids; returns its id.

        With a `cache_salt` it shares cached blocks only with requests of the same salt. The first beam search, and one wider
        than any before, makes the engine compile once more.

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
        request = self.check_request(prompt, sampling_params, request_id=request_id, cache_salt=cache_salt)
        if isinstance(request.params, BeamSearchParams):
            self._make_room_for_beams(request.params.beam_width)
        elif request.params.seed is None:
            request.seed = int(self._seeds.integers(2**32))
        self._live[request_id] = request
        self._queue.append(request)
        return request_id

    def check_request(
        self,
        prompt: Sequence[int],
        sampling_params: Params | None = None,
        *,
        request_id: str = "",
        cache_salt: str | None = None,
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
            cache_salt=cache_salt,
        )

    def _make_room_for_beams(self, width: int) -> None:
        if width <= self.config.max_beam_width:
            return
        width = min(1 << (width - 1).bit_length(), self.config.max_num_seqs)
        self.config = replace(self.config, max_beam_width=width)
        config, seqs = self.config, self.state.seqs
        if seqs.beams is None:
            beams = init_beams(config.rows, width, config.max_stop_ids, config.max_model_len)
        else:
            beams = widen_beams(seqs.beams, width)
        self.state = self.state.replace(seqs=seqs.replace(beams=beams))
        self._jit_run = self._make_run()

    def _is_known(self, request_id: str) -> bool:
        return request_id in self._live or any(update.request_id == request_id for update in self._held)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state; its last update, with reason "abort", comes with the next. False if it is not known."""
        request = self._live.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            return False
        if request in self._queue:
            self._queue.remove(request)
            del self._live[request_id]
            self._held += [Update(request_id, [], [], "abort", index=index) for index in range(request.num_outputs)]
            return True
        rows = np.full(self.config.rows, self.config.rows, np.int32)
        own = [row for row, output in self._rows.items() if output.request is request]
        rows[: len(own)] = own
        self.state = self.state.replace(seqs=self._jit_abort(self.state.seqs, rows))
        return True

    def update_params(self, params) -> None:
        """Go on with other params of the same shapes. Nothing that the old ones computed is found in the cache any more.

        Running requests go on with what they have computed. Raises ConfigError, and changes nothing, for other shapes or dtypes.
        """
        _check_like(params, self.params)
        self.params, self._roots = params, {}
        roots = np.full(self.config.rows, -1, np.int32)
        for row, output in self._rows.items():
            roots[row] = self._root(output.request)
        self.state = self._jit_reroot(self.state, roots)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. False, and nothing is changed, while blocks are in use."""
        cache = self.state.cache
        if int(cache.pool.num_free) < cache.pool.num_blocks - 1:
            return False
        if cache.directory is not None:
            directory = prefix_directory.reset(cache.directory)
            self.state = self.state.replace(cache=cache.replace(directory=directory))
        return True

    def _root(self, request: Request) -> int:
        if request.cache_salt not in self._roots:
            self._roots[request.cache_salt] = self._next_root
            self._next_root -= 1
        return self._roots[request.cache_salt]

    def num_outputs(self, request_id: str) -> int:
        """Outputs of an unfinished request, each of which is owed an end. Raises InvalidRequestError for other ids."""
        if not isinstance(request_id, str) or request_id not in self._live:
            raise InvalidRequestError(f"request_id={request_id!r}: is no unfinished request's")
        return self._live[request_id].num_outputs

    def has_unfinished(self) -> bool:
        """Whether a request is still owed an update."""
        return bool(self._live or self._held)

    def step(self) -> list[Update]:
        """One decoding step. Returns the news of each request that has some."""
        return self.run(1)

    def run(self, max_steps: int) -> list[Update]:
        """Up to `max_steps` decoding steps. Returns the news of each request that has some, one update for each output.

        Raises NoProgressError when requests wait, none runs and none can be admitted.
        """
        max_steps = check_int("max_steps", max_steps, 1)
        merged: dict[tuple[str, int], Update] = {}
        try:
            while max_steps > 0 and self.has_unfinished():
                for update in self.collect(self.dispatch(max_steps)):
                    key = (update.request_id, update.index)
                    merged[key] = join(merged[key], update) if key in merged else update
                max_steps -= STEPS_PER_DISPATCH
        except BaseException:
            self._held = [*merged.values(), *self._held]
            raise
        return list(merged.values())

    def dispatch(self, max_steps: int = STEPS_PER_DISPATCH) -> Dispatch:
        """Fill empty rows from the queue and start up to `max_steps` steps (32 at most), without waiting for them."""
        max_steps = min(max_steps, STEPS_PER_DISPATCH)
        new: dict[int, Output] = {}
        while self._queue and self._queue[0].num_outputs <= len(self._empty):
            request = self._queue.popleft()
            for index in range(request.num_outputs):
                new[self._empty.pop(0)] = Output(request, index)
        if new:
            roots = {row: self._root(output.request) for row, output in new.items()}
            rows, beams = to_rows(new, self.config, roots), to_beams(new, self.config)
            self._rows.update(new)
            self.state = self.state.replace(seqs=self._jit_add(self.state.seqs, rows, beams))
        self.state, report = self._jit_run(self.params, self.state, np.int32(max_steps))
        return Dispatch(report, dict(self._rows), max_steps)

    def collect(self, dispatch: Dispatch) -> list[Update]:
        """Wait for a dispatch and return its news. Dispatches must be collected in the order in which they were made."""
        report: Report = jax.device_get(dispatch.report)
        if self.counters is None or report.counters.steps >= self.counters.steps:
            self.counters = report.counters
        updates, self._held = self._held, []
        for row, output in dispatch.outputs.items():
            if self._rows.get(row) is output:
                update = self._read(report, row, output)
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

    def _read(self, report: Report, row: int, output: Output) -> Update | None:
        request = output.request
        new = int(report.num_tokens[row]) - output.num_seen
        finished = report.status[row] == sequences.FINISHED
        if not finished and isinstance(request.params, BeamSearchParams):  # what is live may still be dropped
            return None
        if new < 0:  # a later report was read first, by someone else's iterator: nothing here is news
            if not finished:
                return None
            new = 0  # a beam that was aborted
        output.num_seen += new
        if new == 0 and not finished:
            return None
        tokens, logprobs = report.tokens[row], report.logprobs[row]
        # More than a report has: a beam search, or an earlier report was never collected, because its reader was interrupted.
        if new > STEPS_PER_DISPATCH:
            seqs, length = self.state.seqs, int(report.num_tokens[row])
            tokens, logprobs = (np.asarray(x[row])[:length] for x in (seqs.tokens, seqs.logprobs))
        tokens, logprobs = (x[len(x) - new :].tolist() for x in (tokens, logprobs))
        news = partial(Update, request.request_id, tokens, logprobs, index=output.index)
        news = partial(news, num_cached_tokens=max(int(report.num_cached[row]), 0))
        if not finished:
            return news()
        del self._rows[row]
        self._empty.append(row)
        request.num_ended += 1
        if request.num_ended == request.num_outputs:
            del self._live[request.request_id]
        reason = sequences.FINISH_REASONS[report.finish_reason[row]]
        stopped = reason == "stop" and tokens[-1] not in request.eos_ids
        return news(finish_reason=reason, stop_reason=tokens[-1] if stopped else None)


def _add(seqs, rows, beams):
    seqs = sequences.add(seqs, rows)
    return seqs if beams is None else add_beams(seqs, beams)


def _reroot(state: step.EngineState, roots) -> step.EngineState:
    """Rows start from new roots; those that run register no more, for their blocks are of both kinds."""
    cache, seqs = state.cache, state.seqs.replace(root=roots)
    if cache.directory is not None:
        cache = cache.replace(directory=prefix_directory.stop_rows(cache.directory, slice(None)))
    return state.replace(cache=cache, seqs=seqs)


def _check_like(params, old) -> None:
    """Raise ConfigError naming the first param that differs in place, shape or dtype."""
    new, was = (dict(jax.tree.leaves_with_path(tree)) for tree in (params, old))
    for path in [*was, *new]:
        name = jax.tree_util.keystr(path)
        if path not in new or path not in was:
            raise ConfigError(f"params{name}: {'is missing' if path in was else 'is not of this model'}")
        shapes = [f"{jnp.result_type(x)}{list(np.shape(x))}" for x in (new[path], was[path])]
        if shapes[0] != shapes[1]:
            raise ConfigError(f"params{name}: {shapes[0]}; the model has {shapes[1]}")
