"""Runs a decoder over one sequence through the paged kernels, as an engine would."""

from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
SIZE = 40  # tokens of every step here, padding included: compiling is what these tests spend their time on


class Batch(NamedTuple):
    """A `TokenBatch`."""

    positions: jax.Array
    slots: jax.Array
    block_tables: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array


@cache
def compiled(graphdef):
    # Compiling takes the time of these tests, so LLVM is told to take less of it.
    @partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
    def step(params, tokens, batch, k_pages, v_pages):
        model = nnx.merge(graphdef, params)
        hidden, k_pages, v_pages = model(tokens, batch, k_pages, v_pages)
        return model.logits(hidden), k_pages, v_pages

    return step


class Sequence:
    """One sequence's cache: scattered blocks, another block table for each group, and NaN where nothing was written."""

    def __init__(self, model, *, max_len, block_size=4, dtype=jnp.float32):
        self.graphdef, self.params = nnx.split(model)
        self.block_size, self.length = block_size, 0
        per_table = -(-max_len // block_size)
        groups = len(model.kv_groups)
        self.num_blocks = 1 + groups * per_table
        order = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks))
        self.tables = order.reshape(groups, per_table).astype(np.int32)
        shape = (self.num_blocks, block_size, model.num_kv_heads, model.head_dim)
        arrays = max(group.num_layers for group in model.kv_groups)
        self.k_pages = self.v_pages = tuple(jnp.full(shape, jnp.nan, dtype) for _ in range(arrays))

    def push(self, tokens, *, size=None):
        """Logits [len(tokens), V]; up to `size` follow tokens that belong to no sequence."""
        count = len(tokens)
        padding = (size or count) - count
        positions = np.arange(self.length, self.length + count)
        slots = self.tables[:, positions // self.block_size] * self.block_size + positions % self.block_size
        nowhere = np.full((len(self.tables), padding), self.num_blocks * self.block_size)
        self.length += count
        batch = Batch(
            positions=jnp.asarray(np.pad(positions, (0, padding)), jnp.int32),
            slots=jnp.asarray(np.concatenate([slots, nowhere], axis=1), jnp.int32),
            block_tables=jnp.asarray(np.pad(self.tables[:, None], ((0, 0), (0, 1), (0, 0)))),
            kv_lens=jnp.array([self.length, 0], jnp.int32),
            cu_q_lens=jnp.array([0, count, count], jnp.int32),
            num_seqs=jnp.array(1, jnp.int32),
        )
        padded = jnp.asarray(np.pad(np.asarray(tokens), (0, padding)), jnp.int32)
        step = compiled(self.graphdef)
        logits, self.k_pages, self.v_pages = step(self.params, padded, batch, self.k_pages, self.v_pages)
        return np.asarray(logits)[:count]


def logits_of(model, tokens, *, chunks=None, **options):
    """Logits [len(tokens), V], the tokens taken at once or in chunks of the given sizes."""
    sequence = Sequence(model, max_len=64, **options)
    pieces = np.split(np.asarray(tokens), np.cumsum(chunks)[:-1] if chunks else [])
    return np.concatenate([sequence.push(piece, size=SIZE) for piece in pieces])


def greedy(model, prompt, count):
    """Token ids and their log-probabilities."""
    sequence = Sequence(model, max_len=max(64, len(prompt) + count))
    for start in range(0, len(prompt), SIZE):
        logits = sequence.push(prompt[start : start + SIZE], size=SIZE)[-1]
    ids, logprobs = [], []
    for _ in range(count):
        ids.append(int(logits.argmax()))
        logprobs.append(float(jax.nn.log_softmax(logits)[ids[-1]]))
        logits = sequence.push(ids[-1:], size=SIZE)[-1]
    return ids, logprobs
