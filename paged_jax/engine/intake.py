"""The host's books of requests: who asks, who gives up, who takes what has come.

    add_request "a" -> in the queue    take "a" -> []    ...    take "a" -> tokens 5 6, "length"

What computes the answers is `engine`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from paged_jax.checks import show
from paged_jax.config import EngineConfig
from paged_jax.engine import registry
from paged_jax.engine.exclusive import exclusive, new_lock
from paged_jax.engine.registry import Registry
from paged_jax.engine.report import Update
from paged_jax.engine.requests import Request, make_request
from paged_jax.engine.step import EngineState
from paged_jax.errors import InvalidRequestError
from paged_jax.sampling.parameters import Params, SamplingParams

type Prompt = Sequence[int] | np.ndarray | jax.Array


class Intake:
    """Requests from their arrival to their last update. `Engine` is one that serves them.

    Attributes:
        state: the device's side; its sizes are what requests are checked against.
        vocab_size, eos_token_ids: of the decoder.
    """

    def __init__(self, state: EngineState, model: Any, seed: int):
        self.state = state
        self.vocab_size: int = model.vocab_size
        self.eos_token_ids: tuple[int, ...] = tuple(model.eos_token_ids)
        self._requests = Registry()
        self._seeds = np.random.default_rng(seed)
        self._num_added = 0
        self._lock = new_lock()

    @property
    def config(self) -> EngineConfig:
        """The engine's sizes."""
        return self.state.config

    @exclusive
    def new_id(self) -> str:
        """Return an id that is not in use and is not returned again."""
        return self._new_id()

    def _new_id(self) -> str:
        while True:
            name, self._num_added = f"request-{self._num_added}", self._num_added + 1
            if not registry.is_in_use(self._requests, name):
                return name

    @exclusive
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
        registry.sweep(self._requests)
        if request_id is None:
            request_id = self._new_id()
        if not isinstance(request_id, str):
            raise InvalidRequestError(
                f"request_id={show(request_id)}: a str is needed, got {type(request_id).__name__}"
            )
        if registry.is_in_use(self._requests, request_id):
            raise InvalidRequestError(
                f"request_id={show(request_id)}: is in use; ids must differ among unfinished "
                "requests"
            )
        request = self.check_request(
            prompt, sampling_params, request_id=request_id, cache_salt=cache_salt
        )
        if isinstance(request.params, SamplingParams) and request.params.seed is None:
            request.seed = int(self._seeds.integers(2**32))
        registry.enqueue(self._requests, request)
        return request_id

    def check_request(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        request_id: str = "",
        cache_salt: str | None = None,
    ) -> Request:
        """Return what `add_request` would queue, and change nothing.

        Raises where that would, except for the id.
        """
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

    @exclusive
    def abort(self, request_id: str) -> bool:
        """End a request in whatever state; False if there is no such unfinished request.

        Its last updates have the reason "abort". Those of a running request come with the next
        dispatch.
        """
        registry.sweep(self._requests)
        is_id = isinstance(request_id, str)
        request = self._requests.live.get(request_id) if is_id else None
        if request is None:
            return False
        request.is_aborted = True
        if request_id in self._requests.queue:
            registry.end(self._requests, request, "abort")
        return True

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Abort requests, and forget their updates. Unknown ids are skipped.

        It returns at once and may be called at any moment, by a finalizer too. The blocks come back
        with the next dispatch; `run(1)` makes one where nothing else does. Raises
        InvalidRequestError, and abandons none, for what are no ids.
        """
        ids: Any = [request_ids] if isinstance(request_ids, str) else request_ids
        ids = list(ids) if isinstance(ids, Iterable) else [ids]
        for request_id in ids:
            if not isinstance(request_id, str):
                raise InvalidRequestError(f"request_ids: {show(request_id)}; a str is needed")
        self.abandoner()(ids)

    def abandoner(self) -> Callable[[Iterable[str]], None]:
        """Return a function that abandons requests by their ids, and checks nothing.

        It is of C: called first thing in a `finally`, no interrupt can come between.
        """
        return self._requests.abandoned.extend

    @exclusive
    def take(self, request_id: str) -> list[Update]:
        """Return a request's updates since the last call, one for each output that has some.

        An output's last update has a finish reason. Where several threads run the engine, that is
        how to know that nothing more comes. What an interrupted call has taken is not given again.

        Raises InvalidRequestError for an id that is not in use.
        """
        registry.sweep(self._requests)
        if not isinstance(request_id, str) or not registry.is_in_use(self._requests, request_id):
            raise InvalidRequestError(
                f"request_id={show(request_id)}: is not in use; a request's last updates are taken "
                "once"
            )
        return registry.take_updates(self._requests, request_id)

    @exclusive
    def is_finished(self, request_id: str) -> bool:
        """Return whether all outputs of a request have ended, or the id is not in use.

        Updates may still be there.
        """
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id={show(request_id)}: a str is needed")
        registry.sweep(self._requests)
        request = self._requests.live.get(request_id)
        return request is None or request.has_ended

    @exclusive
    def has_unfinished(self) -> bool:
        """Return whether any request has outputs that have not ended."""
        return self._has_unfinished()

    def _has_unfinished(self) -> bool:
        registry.sweep(self._requests)
        return any(not request.has_ended for request in self._requests.live.values())
