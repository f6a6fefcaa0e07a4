"""Engines for tests: what is equal in shape is compiled once."""

from functools import cache

import jax
from flax import nnx

from paged_jax import Engine, EngineConfig
from paged_jax.engine.dispatch import Programs, compile_programs

# A fifth less time for what these tests spend theirs on. Tokens are compared with those of plain
# models and of transformers all the same.
QUICK = {"xla_backend_optimization_level": 0}


@cache
def programs(graphdef, widths):
    """The programs of an engine, compiled in less time."""
    made = compile_programs(graphdef, widths)
    donated = Programs(run=1, add=0, set_roots=0)
    jits = [
        jax.jit(program.__wrapped__, donate_argnums=number, compiler_options=QUICK)
        for program, number in zip(made, donated, strict=True)
    ]
    return Programs(*jits)


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
