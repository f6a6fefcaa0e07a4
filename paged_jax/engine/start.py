"""The start of an engine from a checkpoint: what takes seconds is done side by side.

this thread    makes the state, then compiles the first program if it was not stored
another one    looks for that program in the cache folder
another one    reads and converts the params
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from flax import nnx

from paged_jax.config import EngineConfig
from paged_jax.engine import stored_programs
from paged_jax.engine.dispatch import run_args, shapes_of
from paged_jax.engine.step import EngineState, init_state
from paged_jax.engine.stored_programs import Spec


class Started(NamedTuple):
    """What an engine needs for its first dispatch."""

    params: Any
    state: EngineState
    program: jax.stages.Compiled


def start(
    load: Callable[[], Any],
    config: EngineConfig,
    graphdef: nnx.GraphDef,
    shapes: Any,
    widths: tuple[int, ...],
    run: Any,
) -> Started:
    """Load the params, which have such shapes, and make an idle state and the program of `run`.

    Calls of `run` find the program, too, unless it had been stored.
    """
    model = nnx.merge(graphdef, shapes)
    state_shapes = jax.eval_shape(lambda: init_state(config, model))
    args = (shapes, state_shapes, *run_args(config, 0, []))
    spec = Spec(graphdef, widths, shapes_of(args), stored_programs.settings())
    with ThreadPoolExecutor(2) as threads:
        loaded = threads.submit(load)
        place = stored_programs.find_place(spec)
        stored = threads.submit(stored_programs.load, place)
        state = init_state(config, model)
        program = stored.result()
        if loaded.done():
            loaded.result()  # raises before something is compiled in vain
        if program is None:
            program = stored_programs.compile_and_save(spec, run, place)
        return Started(loaded.result(), state, program)
