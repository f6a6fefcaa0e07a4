"""Engines for tests: what is equal in shape is compiled once."""

from functools import cache

import jax
from flax import nnx

from paged_jax import Engine, EngineConfig
from paged_jax.engine.dispatch import Programs, compile_programs
from paged_jax.models import Llama, LlamaConfig

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


def windowed_llama():
    """A tiny decoder of two groups: full attention, and a window of 5."""
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, max_model_len=64)
    heads = dict(num_layers=2, num_heads=2, num_kv_heads=1)
    return Llama(LlamaConfig(**sizes, **heads, windows=(None, 5)), rngs=nnx.Rngs(0))
