"""The programs that the tests compile and look into: `step.run` and `generate` of a small Llama, a
prime number of blocks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import EngineConfig, generate
from paged_jax.engine.step import init_state
from paged_jax.engine.step import run as run_steps
from paged_jax.models import Llama
from paged_jax.models.llama_config import LlamaConfig

NUM_BLOCKS = 131071  # prime, and above every other size
RUNNING, BUDGET = 64, 512
BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 2, 8
PAGE_SIZE = NUM_BLOCKS * BLOCK_SIZE * KV_HEADS * HEAD_DIM  # elements
WINDOWS = {
    "full": (None, None),
    "ladder": (None, None),
    "full and window": (None, 40, None),
    "everything": (None, 40, None),
}
WIDTHS = {"ladder": (1, 8, 64, 128, 256, BUDGET)}  # else the default ones
OPTIONS = {"everything": dict(enable_prefix_caching=True, max_beam_width=4)}  # else none


def make_model(windows: tuple[int | None, ...], dtype: str = "float32", head_dim: int = HEAD_DIM):
    """graphdef and params."""
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=64,
        num_layers=len(windows),
        num_heads=6,
        num_kv_heads=KV_HEADS,
        max_model_len=512,
        head_dim=head_dim,
        windows=windows,
        dtype=dtype,
    )
    return nnx.split(Llama(config, rngs=nnx.Rngs(0)))


def step_program(
    kind: str = "full", dtype: str = "float32", decoder=None, head_dim: int = HEAD_DIM
):
    """A function `(params, state, max_steps)` and its abstract arguments; the state is to be
    donated (argument 1).
    """
    graphdef, params = (
        make_model(WINDOWS[kind], dtype, head_dim) if decoder is None else nnx.split(decoder)
    )
    sizes = dict(max_model_len=320, max_num_seqs=RUNNING, max_num_batched_tokens=BUDGET)
    config = EngineConfig(NUM_BLOCKS, **sizes, **OPTIONS.get(kind, {}))
    state = jax.eval_shape(lambda: init_state(config, nnx.merge(graphdef, params)))

    def run(params, state, max_steps):
        model = nnx.merge(graphdef, params)
        return run_steps(model, state, max_steps, widths=WIDTHS.get(kind))

    return run, (params, state, jax.ShapeDtypeStruct((), jnp.int32))


def generate_program(kind: str = "full", dtype: str = "float32"):
    """A function `(params, prompts, prompt_lens, key)` and its abstract arguments."""
    graphdef, params = make_model(WINDOWS[kind], dtype)
    call = partial(
        generate,
        graphdef,
        max_new_tokens=24,
        num_samples=2,
        temperature=0.0,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=BUDGET,
    )
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return call, (params, ints((6, 13)), ints((6,)), jax.eval_shape(lambda: jax.random.key(0)))
