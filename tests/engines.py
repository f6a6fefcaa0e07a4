"""Engines for tests: what is equal in shape is compiled once."""

from functools import cache

from flax import nnx

from paged_jax import Engine, EngineConfig
from paged_jax.engine.dispatch import compile_programs

programs = cache(compile_programs)


def make_engine(model, num_blocks, max_model_len, *, widths=None, seed=0, **sizes):
    """An engine; of several of equal sizes only the first is compiled."""
    graphdef, params = model if isinstance(model, tuple) else nnx.split(model)
    config = EngineConfig(num_blocks, max_model_len, **sizes)
    engine = Engine(graphdef, params, config, widths=widths, seed=seed)
    engine._programs = programs(graphdef, engine.widths)
    return engine


def news(engine, max_steps=32):
    """Run, and take all news there is."""
    return [update for request_id in engine.run(max_steps) for update in engine.take(request_id)]
