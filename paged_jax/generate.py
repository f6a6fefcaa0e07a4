"""A whole batch of prompts in one jitted call, pure: it can sit inside someone else's `jit`.

Every sample is a sequence row from the start, all in the waiting order; the loop admits them as places and blocks come free.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from paged_jax import prefix_directory, sequences, step
from paged_jax.block_table import init_tables
from paged_jax.cache_manager import PagedCache
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.errors import ConfigError, InvalidRequestError
from paged_jax.requests import blocks_at_most
from paged_jax.sampling import SamplingRows
from paged_jax.sampling_params import GREEDY_BELOW, HOTTEST, check_int
from paged_jax.sequences import INVALID, NewSequences

MAX_RUNNING = 64  # sequences running at once, where the caller does not say
MAX_TOKENS_A_STEP = 512


class Generated(struct.PyTreeNode):
    """What `generate` returns, for B prompts with n samples each.

    Attributes:
        tokens: the output, 0 behind its end.
        lengths: output tokens of each sample.
        logprobs: log-probability of each output token under the raw logits, 0 behind the end.
        finish_reason: `sequences.STOP`, `LENGTH`, `INVALID` (a prompt of length 0 or more than P, or a token id outside the
            vocabulary) or `NOT_FINISHED` (the pool that was handed in had too few free blocks).
        stats: counters of the run.
        cache: the cache that was handed in, to be handed on; None if none was.
    """

    tokens: Int[Array, "B n max_new"]
    lengths: Int[Array, "B n"]
    logprobs: Float[Array, "B n max_new"]
    finish_reason: Int[Array, "B n"]
    stats: step.Counters
    cache: PagedCache | None


def generate(
    graphdef,
    params,
    prompts: Int[Array, "B P"],
    prompt_lens: Int[Array, "B"],
    key: Array,
    *,
    max_new_tokens: int | Sequence[int] | np.ndarray,
    num_samples: int = 1,
    temperature: float | Float[Array, "B"] = 1.0,
    top_k: int | Int[Array, "B"] = 0,
    top_p: float | Float[Array, "B"] = 1.0,
    min_p: float | Float[Array, "B"] = 0.0,
    eos_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    block_size: int = 16,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    cache: PagedCache | None = None,
) -> Generated:
    """Continue each prompt, `num_samples` times, inside one jitted program.

    Args:
        graphdef, params: of a decoder, from `nnx.split(model)`. Params may be traced and sharded; no gradient flows into them.
        prompts: token ids, row i valid up to `prompt_lens[i]`.
        key: of the samples' random streams. A sample's tokens depend on its own stream, not on its neighbours.
        max_new_tokens: output tokens at most, one number or one a prompt. Not traced: the greatest is a shape.
        temperature, top_k, top_p, min_p: one value or one a prompt, may be traced; temperature 0 is greedy.
        eos_ids, stop_ids: token ids that end a sample; they stay in its output.
        num_blocks: blocks of the pool; None makes it large enough that nothing is ever preempted.
        max_num_seqs: samples running at once; the others wait inside the program.
        max_num_batched_tokens: token budget of a step.
        cache: a cache from `init_cache(CacheConfig.for_decoder(...))` or of an earlier call, instead of a new one; it is used
            up (donated), and its successor is in the result.

    Raises ConfigError where the static sizes cannot work and InvalidRequestError for a parameter out of range, where they are
    concrete. A bad prompt ends its own row alone.
    """
    if not isinstance(graphdef, nnx.GraphDef) or isinstance(params, nnx.Module | nnx.GraphDef):
        raise ConfigError(
            f"graphdef, params: a {type(graphdef).__name__} and a {type(params).__name__}; pass `graphdef, params = "
            "nnx.split(model)`, in that order"
        )
    prompts, prompt_lens = _as_ids("prompts", prompts), _as_ids("prompt_lens", prompt_lens)
    _check_key(key)
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer) or 0 in prompts.shape:
        raise ConfigError(f"prompts: shape {prompts.shape} of {prompts.dtype}; int token ids [B, P] are needed")
    batch = prompts.shape[0]
    if prompt_lens.shape != (batch,) or not jnp.issubdtype(prompt_lens.dtype, jnp.integer):
        raise ConfigError(f"prompt_lens: shape {prompt_lens.shape} of {prompt_lens.dtype}; int32 [{batch}] is needed")
    # A narrow dtype could not be compared with the vocabulary.
    prompts, prompt_lens = prompts.astype(jnp.int32), prompt_lens.astype(jnp.int32)
    num_samples = check_int("num_samples", num_samples, 1)
    limits = _limits(max_new_tokens, batch)
    for name, ids in (("eos_ids", eos_ids), ("stop_ids", stop_ids)):
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | np.ndarray):
            raise InvalidRequestError(f"{name}={ids!r:.80}: a sequence of token ids is needed")
    stops = tuple(check_int("eos_ids, stop_ids", token, 0) for token in (*eos_ids, *stop_ids))

    rows = batch * num_samples
    running = min(rows, MAX_RUNNING) if max_num_seqs is None else min(check_int("max_num_seqs", max_num_seqs, 1), rows)
    budget = max_num_batched_tokens
    if budget is None:
        budget = max(running, min(MAX_TOKENS_A_STEP, running * prompts.shape[1]))
    if cache is not None and not isinstance(cache, PagedCache):
        raise ConfigError(f"cache={cache!r:.80}: a PagedCache of `init_cache` is needed")
    if cache is not None:
        num_blocks, block_size = cache.pool.num_blocks, _block_size(cache)
    config = EngineConfig(
        num_blocks=2 if num_blocks is None else num_blocks,  # the default needs the model: see `_generate`
        max_model_len=prompts.shape[1] + int(limits.max()),
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        num_rows=rows,
        block_size=block_size,
        max_stop_ids=max(len(stops), 1),
    )
    filters = {
        "temperature": _per_prompt(
            "temperature", temperature, batch, f"from 0 to {HOTTEST:g}", lambda x: (0 <= x) & (x <= HOTTEST)
        ),
        "top_k": _per_prompt("top_k", top_k, batch, "0 or above", lambda x: x >= 0, whole=True),
        "top_p": _per_prompt("top_p", top_p, batch, "in (0, 1]", lambda x: (0 < x) & (x <= 1)),
        "min_p": _per_prompt("min_p", min_p, batch, "in [0, 1]", lambda x: (0 <= x) & (x <= 1)),
    }
    return _generate(
        graphdef,
        config,
        num_blocks is None,
        stops,
        num_samples,
        cache,
        params,
        prompts,
        prompt_lens,
        key,
        limits,
        filters,
    )


def _as_ids(name: str, values) -> Array:
    """An array; what does not fit 32 bits becomes the greatest or least id there is, of no vocabulary, instead of wrapping."""
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ConfigError(f"{name}={values!r:.80}: rows of one length are needed, padded where shorter") from error
        if not np.issubdtype(values.dtype, np.number):
            raise ConfigError(f"{name}={values!r:.80}: int token ids and lengths are needed, not {values.dtype}")
        if values.dtype in (np.int64, np.uint64, np.uint32):
            values = np.clip(values, -(2**31) if values.dtype == np.int64 else 0, 2**31 - 1).astype(np.int32)
    return jnp.asarray(values)


def _check_key(key) -> None:
    is_key = isinstance(key, jax.Array | np.ndarray) and (
        key.ndim == 0 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.dtype == jnp.uint32 and key.ndim == 1
    )
    if not is_key:
        raise InvalidRequestError(f"key={key!r:.80}: a key of jax.random is needed, `jax.random.key(0)`")


def _limits(max_new_tokens, batch: int) -> np.ndarray:
    if isinstance(max_new_tokens, Tracer):
        raise ConfigError("max_new_tokens: is traced; its greatest is a shape, so pass an int, a list or a numpy array")
    limits = np.asarray(max_new_tokens)
    if not np.issubdtype(limits.dtype, np.integer) or limits.shape not in ((), (batch,)):
        raise InvalidRequestError(
            f"max_new_tokens={max_new_tokens!r:.80}: an int, or one for each of {batch} prompts, is needed"
        )
    if limits.min() < 1 or limits.max() > 2**30:
        raise InvalidRequestError(f"max_new_tokens={max_new_tokens!r:.80}: must be from 1 to {2**30}")
    return np.broadcast_to(limits, (batch,)).astype(np.int32)


def _per_prompt(name: str, value, batch: int, accepted: str, accepts, *, whole: bool = False) -> Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{name}={value!r:.80}: numbers are needed") from error
    if not (jnp.issubdtype(array.dtype, jnp.integer) or (not whole and jnp.issubdtype(array.dtype, jnp.floating))):
        raise InvalidRequestError(f"{name}: {array.dtype}; {'ints are' if whole else 'real numbers are'} needed")
    if array.shape not in ((), (batch,)):
        raise InvalidRequestError(
            f"{name}: shape {array.shape}; one value, or one for each of {batch} prompts, is needed"
        )
    if not isinstance(array, Tracer) and not np.all(accepts(np.asarray(array))):
        raise InvalidRequestError(f"{name}={value!r:.80}: must be {accepted}")
    return jnp.broadcast_to(array, (batch,))


def _block_size(cache: PagedCache) -> int:
    if not cache.kv.k_pages:
        raise ConfigError("cache: has no pages; make it with `init_cache(CacheConfig.for_decoder(model, ...))`")
    return cache.kv.k_pages[0].shape[1]


def _check_sizes(config: EngineConfig, sizes: CacheConfig, model, stops: tuple[int, ...], cache) -> None:
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_new_tokens: with prompts {config.max_model_len} tokens; the model was made for {model.max_model_len} at most"
        )
    need = blocks_at_most(sizes, config.max_model_len, config.max_num_batched_tokens)
    if need > config.num_blocks - 1:
        raise ConfigError(
            f"num_blocks={config.num_blocks}: a row of {config.max_model_len} tokens (the prompts' width and max_new_tokens) "
            f"needs up to {need} blocks of {config.block_size} besides the null block"
        )
    for token in stops:
        if token >= model.vocab_size:
            raise InvalidRequestError(f"eos_ids, stop_ids: {token} is outside the vocabulary of {model.vocab_size}")
    shape = (sizes.num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_dim)
    if cache is not None and (
        len(cache.kv.k_pages) != sizes.num_layers
        or any(p.shape != shape or p.dtype != sizes.dtype for p in (*cache.kv.k_pages, *cache.kv.v_pages))
    ):
        raise ConfigError(
            f"cache: {len(cache.kv.k_pages)} pages of {cache.kv.k_pages[0].shape} {cache.kv.k_pages[0].dtype}; the model needs "
            f"{sizes.num_layers} of {shape} {sizes.dtype}"
        )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=5)
def _generate(
    graphdef, config: EngineConfig, roomy: bool, stops, num_samples: int, cache, params, *arrays
) -> Generated:
    run = partial(_run, graphdef, config, roomy, stops, num_samples)
    mesh = _explicit_mesh(params)
    if mesh is None:
        return run(cache, params, *arrays)
    # The bookkeeping gathers and scatters by data, which an explicit mesh would ask to annotate one by one. Inside, the
    # compiler decides; outside, a cache keeps the sharding that it came with and everything else is whole on each device.
    kept = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, cache)
    whole: Any = jax.sharding.PartitionSpec()
    result = Generated(tokens=whole, lengths=whole, logprobs=whole, finish_reason=whole, stats=whole, cache=kept)
    with jax.sharding.use_abstract_mesh(mesh):
        in_mesh: Any = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=result)
        return in_mesh(cache, params, *arrays)


def _explicit_mesh(params):
    """The mesh with explicit axes that params are sharded over, or None."""
    for leaf in jax.tree.leaves(params):
        mesh = jax.typeof(leaf).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def _run(
    graphdef,
    config: EngineConfig,
    roomy: bool,
    stops: tuple[int, ...],
    num_samples: int,
    cache,
    params,
    prompts,
    prompt_lens,
    key,
    limits,
    filters,
) -> Generated:
    model = nnx.merge(graphdef, jax.tree.map(jax.lax.stop_gradient, params))
    if roomy:  # every running row at its longest
        most = config.max_num_seqs * config.max_blocks_per_row * len(model.kv_groups)
        config = replace(config, num_blocks=1 + most)
    sizes = step.cache_config(config, model)
    _check_sizes(config, sizes, model, stops, cache)
    if cache is None:
        state = step.init_state(config, sizes)
    else:
        # Rows that the caller holds stay in the caller's tables; this run's rows have tables of their own.
        tables = init_tables(sizes.num_groups, sizes.max_rows, sizes.max_blocks_per_row)
        state = step.init_state(config, sizes, cache.replace(tables=tables, directory=None))
    new, valid = _rows(config, model.vocab_size, stops, num_samples, prompts, prompt_lens, key, limits, filters)
    state = state.replace(seqs=sequences.add(state.seqs, new))
    state, _ = step.run(model, config, sizes, state, jnp.int32(2**31 - 1))

    seqs, shape = state.seqs, (prompts.shape[0], num_samples)
    max_new = config.max_model_len - prompts.shape[1]
    lengths = jnp.where(valid, seqs.num_tokens - seqs.num_prompt_tokens, 0)
    offsets = jnp.arange(max_new, dtype=jnp.int32)
    place = jnp.minimum(seqs.num_prompt_tokens[:, None] + offsets, config.max_model_len - 1)
    inside = offsets < lengths[:, None]
    tokens, logprobs = (
        jnp.where(inside, jnp.take_along_axis(x, place, axis=1), 0).reshape(*shape, max_new)
        for x in (seqs.tokens, seqs.logprobs)
    )
    return Generated(
        tokens=tokens,
        lengths=lengths.reshape(shape),
        logprobs=logprobs,
        finish_reason=jnp.where(valid, seqs.finish_reason, INVALID).reshape(shape),
        stats=state.counters,
        cache=None if cache is None else _hand_on(state.cache, cache),
    )


def _hand_on(after: PagedCache, before: PagedCache) -> PagedCache:
    """The caller's rows as they were; what the directory knew may have been overwritten, so it knows nothing any more."""
    directory = None if before.directory is None else prefix_directory.reset(before.directory)
    return after.replace(tables=before.tables, directory=directory)


def _rows(
    config, vocab_size, stops, num_samples, prompts, prompt_lens, key, limits, filters
) -> tuple[NewSequences, Array]:
    """Each prompt `num_samples` times as rows, and which of them are valid."""
    width = prompts.shape[1]
    inside = jnp.arange(width) < prompt_lens[:, None]
    foreign = jnp.any(inside & ((prompts < 0) | (prompts >= vocab_size)), axis=1)
    valid = (prompt_lens > 0) & (prompt_lens <= width) & ~foreign
    prompts = jnp.pad(jnp.where(inside, prompts, 0), ((0, 0), (0, config.max_model_len - width)))

    def repeat(x):
        return jnp.repeat(x, num_samples, axis=0)

    lens, rows = repeat(prompt_lens.astype(jnp.int32)), jnp.arange(config.rows, dtype=jnp.int32)
    temperature = filters["temperature"].astype(jnp.float32)
    padded = stops or (-1,)
    sampling = SamplingRows(
        temperature=repeat(jnp.where(temperature < GREEDY_BELOW, 0, temperature)),
        top_k=repeat(filters["top_k"].astype(jnp.int32)),
        top_p=repeat(filters["top_p"].astype(jnp.float32)),
        min_p=repeat(filters["min_p"].astype(jnp.float32)),
        seed=jax.random.bits(key, (config.rows,), jnp.uint32),
        min_len=jnp.zeros_like(lens),
        stop_ids=jnp.broadcast_to(jnp.asarray(padded, jnp.int32), (config.rows, len(padded))),
    )
    valid = repeat(valid)
    new = NewSequences(
        rows=jnp.where(valid, rows, config.rows),
        tokens=repeat(prompts.astype(jnp.int32)),
        num_prompt_tokens=lens,
        max_len=lens + repeat(jnp.asarray(limits)),
        root=jnp.full_like(lens, -1),
        parent=jnp.where(rows % num_samples == 0, config.rows, rows - rows % num_samples),
        sampling=sampling,
    )
    return new, valid
