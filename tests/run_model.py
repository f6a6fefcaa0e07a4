"""Runs a decoder over one sequence through the paged kernels, as an engine would."""

from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models import Llama

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
SIZE = 40  # tokens of every step, padding included: one program for all steps of a model
MAX_BLOCKS, BLOCK_SIZE = 16, 4


class Batch(NamedTuple):
    """A `TokenBatch`."""

    positions: jax.Array | np.ndarray
    slots: jax.Array | np.ndarray
    block_tables: jax.Array | np.ndarray
    kv_lens: jax.Array | np.ndarray
    cu_q_lens: jax.Array | np.ndarray
    num_seqs: jax.Array | np.ndarray


def random_model(config, seed=0):
    """Return a model with normal parameters, scales around 1, made without compiling anything."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)
    filled = []
    for path, leaf in nnx.to_flat_state(params):
        mean = 1.0 if path[-1] == "scale" else 0.0
        spread = leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 0.3
        values = rng.normal(mean, spread, leaf.shape).astype(leaf.dtype)
        filled.append((path, leaf.replace(jnp.asarray(values))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@cache
def compiled(graphdef):
    """Return one step as a compiled function, the same one for equal models."""

    # Compiling takes the time of these tests, so LLVM is told to take less of it.
    options = {"xla_llvm_disable_expensive_passes": True}
    return jax.jit(partial(step, graphdef), compiler_options=options)


def step(graphdef, params, tokens, batch, k_pages, v_pages):
    """Return a step's logits and the pages."""
    model = nnx.merge(graphdef, params)
    hidden, k_pages, v_pages = model(tokens, batch, k_pages, v_pages)
    return model.logits(hidden), k_pages, v_pages


class Sequence:
    """The cache of one sequence of up to 64 tokens.

    Its blocks are scattered, each group has another block table, and what is not written is NaN.
    Many models that are run once are run faster operation by operation: not `is_compiled`.
    """

    def __init__(self, model, *, dtype="float32", is_compiled=True):
        self.graphdef, self.params = nnx.split(model)
        self.step = compiled(self.graphdef) if is_compiled else partial(step, self.graphdef)
        self.length = 0
        num_groups = len(model.kv_groups)
        self.num_blocks = 1 + num_groups * MAX_BLOCKS
        order = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks))
        self.tables = order.reshape(num_groups, MAX_BLOCKS).astype(np.int32)
        shape = (self.num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        num_arrays = max(group.num_layers for group in model.kv_groups)
        pages = jnp.asarray(np.full(shape, np.nan, jnp.dtype(dtype)))
        self.k_pages = self.v_pages = (pages,) * num_arrays

    def push(self, tokens):
        """Return the logits [len(tokens), V]; padding up to SIZE belongs to no sequence."""
        count = len(tokens)
        padding = SIZE - count
        positions = np.arange(self.length, self.length + count)
        slots = self.tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        nowhere = np.full((len(self.tables), padding), self.num_blocks * BLOCK_SIZE)
        self.length += count
        batch = Batch(
            positions=np.pad(positions, (0, padding)).astype(np.int32),
            slots=np.concatenate([slots, nowhere], axis=1).astype(np.int32),
            block_tables=np.pad(self.tables[:, None], ((0, 0), (0, 1), (0, 0))),
            kv_lens=np.array([self.length, 0], np.int32),
            cu_q_lens=np.array([0, count, count], np.int32),
            num_seqs=np.array(1, np.int32),
        )
        padded = np.pad(np.asarray(tokens), (0, padding)).astype(np.int32)
        arrays = jax.tree.map(jnp.asarray, (padded, batch))
        logits, self.k_pages, self.v_pages = self.step(
            self.params, *arrays, self.k_pages, self.v_pages
        )
        return np.asarray(logits)[:count]


def logits_of(model, tokens, *, chunks=None, dtype="float32", is_compiled=True):
    """Return the logits [len(tokens), V], computed at once or in chunks of the given sizes."""
    sequence = Sequence(model, dtype=dtype, is_compiled=is_compiled)
    pieces = np.split(np.asarray(tokens), np.cumsum(chunks)[:-1] if chunks else [])
    return np.concatenate([sequence.push(piece) for piece in pieces])


def greedy(model, prompt, count):
    """Return `count` token ids after a prompt of up to SIZE."""
    sequence = Sequence(model)
    logits, ids = sequence.push(prompt)[-1], []
    for _ in range(count):
        ids.append(int(logits.argmax()))
        logits = sequence.push(ids[-1:])[-1]
    return ids
