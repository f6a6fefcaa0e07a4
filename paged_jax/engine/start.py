"""The start of an engine from a checkpoint: what takes seconds is done side by side.

this thread    makes the state, then compiles the first program if it was not stored
another one    looks for that program in the cache folder
another one    reads and converts the params
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from paged_jax.arrays import keep_default_device
from paged_jax.checks import show
from paged_jax.config import EngineConfig
from paged_jax.engine import stored_programs
from paged_jax.engine.dispatch import check_like, check_numbers, run_args, shapes_of
from paged_jax.engine.step import EngineState, init_state
from paged_jax.engine.stored_programs import Spec
from paged_jax.errors import ConfigError


class Started(NamedTuple):
    """What an engine needs for its first dispatch.

    Attributes:
        first: the program; None where it is compiled at the first dispatch.
    """

    params: Any
    state: EngineState
    first: jax.stages.Compiled | None


def start(
    load: Callable[[], Any] | None,
    config: EngineConfig,
    model: Any,
    graphdef: nnx.GraphDef,
    params: Any,
    widths: tuple[int, ...],
    run: Any,
) -> Started:
    """Load the params, which have the shapes of `params`, make an idle state and compile `run`.

    `model` is the decoder that graphdef and params make. Without `load`, `params` are the params,
    and nothing is compiled ahead. Calls of `run` find the program, too, unless it had been stored.

    Raises ConfigError where `load` is no function or the params are not those of the model.
    """
    if load is None:
        check_numbers(params)
        return Started(params, init_state(config, model), None)
    if not callable(load):
        raise ConfigError(f"load={show(load)}: a function that returns the params is needed")
    state_shapes = jax.eval_shape(lambda: init_state(config, model))
    args = (params, state_shapes, *run_args(config, 0, []))
    spec = Spec(graphdef, widths, shapes_of(args), stored_programs.settings())
    with ThreadPoolExecutor(2) as threads:
        loaded = threads.submit(keep_default_device(partial(_load_checked, load, params)))
        place = stored_programs.find_place(spec)
        stored = threads.submit(stored_programs.load, place)
        state = init_state(config, model)
        program = stored.result()
        if loaded.done():
            loaded.result()  # raises before something is compiled in vain
        if program is None:
            program = stored_programs.compile_and_save(spec, run, place)
        return Started(loaded.result(), state, program)


def _load_checked(load: Callable[[], Any], shapes: Any) -> Any:
    """Return what `load` does, which must have those shapes."""
    params = load()
    check_like(params, shapes)
    return params
