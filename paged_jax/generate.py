"""A whole batch of prompts in one jitted call, pure: it can sit inside someone else's `jit`.

Every sample is a sequence row from the start, all in the waiting order. The loop admits them as
places and blocks come free. `generate_arguments` checks what is passed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int

from paged_jax.arrays import vary_with
from paged_jax.cache.paged_cache import PagedCache, with_empty_rows, with_rows_of
from paged_jax.config import EngineConfig
from paged_jax.engine.counters import Counters
from paged_jax.engine.step import EngineState, init_state, run
from paged_jax.generate_arguments import Prompts, Sizes, check_arguments, check_fits
from paged_jax.sampling.parameters import PARAMETERS
from paged_jax.sampling.rows import SamplingRows
from paged_jax.sampling.streams import split_seeds
from paged_jax.scheduling import sequences
from paged_jax.scheduling.sequences import INVALID, NewSequences
from paged_jax.unknown_options import answers_unknown_options

type ArrayLike = Array | np.ndarray
type Numbers = float | ArrayLike | Sequence[float]  # one, or one a prompt


class Generated(struct.PyTreeNode):
    """What `generate` returns, for B prompts with n samples each.

    Attributes:
        tokens: the output, 0 behind its end.
        lengths: output tokens of each sample.
        logprobs: log-probability of each output token under the raw logits, 0 behind the end.
        finish_reason: `sequences.STOP`, `LENGTH`, `INVALID` (a prompt of length 0 or more than P,
            or a token id outside the vocabulary) or `NOT_FINISHED` (the pool that was passed had
            too few free blocks).
        stats: counters of the run.
        cache: the successor of the cache that was passed; None if none was.
    """

    tokens: Int[Array, "B n max_new"]
    lengths: Int[Array, "B n"]
    logprobs: Float[Array, "B n max_new"]
    finish_reason: Int[Array, "B n"]
    stats: Counters
    cache: PagedCache | None


@answers_unknown_options
def generate(
    graphdef: nnx.GraphDef,
    params: Any,
    prompts: Int[ArrayLike, "B P"] | Sequence[Sequence[int]],
    prompt_lens: Int[ArrayLike, "B"] | Sequence[int],
    key: ArrayLike,
    *,
    max_new_tokens: int | np.integer | np.ndarray | Sequence[int],
    num_samples: int = 1,
    temperature: Numbers = 1.0,
    top_k: Numbers = 0,
    top_p: Numbers = 1.0,
    min_p: Numbers = 0.0,
    eos_ids: Sequence[int] | np.ndarray = (),
    stop_ids: Sequence[int] | np.ndarray = (),
    block_size: int = 16,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    cache: PagedCache | None = None,
    bucket: bool = False,
) -> Generated:
    """Continue each prompt, `num_samples` times, inside one jitted program.

    Args:
        graphdef, params: of a decoder, from `nnx.split(model)`. Params may be traced and sharded.
            No gradient flows into them.
        prompts, prompt_lens: token ids [B, P], of which row i is valid up to `prompt_lens[i]`.
        key: of the samples' random streams, typed or not, of any implementation. A sample's tokens
            depend on its own stream, not on its neighbours and not on JAX's settings.
        max_new_tokens: output tokens at most, an int or ints [B]. Not traced: the greatest is a
            shape.
        temperature, top_k, top_p, min_p: a number or numbers [B], may be traced; see
            `SamplingParams`.
        eos_ids, stop_ids: token ids that end a sample; they stay in its output.
        num_blocks: blocks of the pool; None makes it large enough that nothing is ever preempted.
        max_num_seqs: samples running at once; the others wait inside the program.
        max_num_batched_tokens: token budget of a step.
        cache: from `init_cache(CacheConfig.for_decoder(...))` or an earlier call, instead of a new
            one. It is used up (donated), and its successor is in the result.
        bucket: compute in shapes of powers of two (B, P and the greatest `max_new_tokens`), so that
            calls of other sizes need no new compilation. The result is the same.

    Raises ConfigError where the static sizes cannot work, and InvalidRequestError for a parameter
    that is not accepted, where it is concrete. A bad prompt ends its own row alone.
    """
    sizes, arrays = check_arguments(
        graphdef,
        params,
        prompts,
        prompt_lens,
        key,
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        parameters=dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        stop_ids=dict(eos_ids=eos_ids, stop_ids=stop_ids),
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        cache=cache,
        bucket=bucket,
    )
    out = _generate(graphdef, sizes, cache, params, arrays)
    return _cut(out, np.shape(prompts)[0], int(np.max(max_new_tokens))) if bucket else out


def _cut(out: Generated, batch: int, max_new: int) -> Generated:
    """Cut what was asked for out of the result of a bucket."""
    return out.replace(
        tokens=out.tokens[:batch, :, :max_new],
        lengths=out.lengths[:batch],
        logprobs=out.logprobs[:batch, :, :max_new],
        finish_reason=out.finish_reason[:batch],
    )


class Outputs(NamedTuple):
    """The fields of `Generated`: arrays, or how each is sharded."""

    tokens: Any
    lengths: Any
    logprobs: Any
    finish_reason: Any
    stats: Any
    cache: Any


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _generate(
    graphdef: Any, sizes: Sizes, cache: PagedCache | None, params: Any, prompts: Prompts
) -> Generated:
    """Run the loop, and hide an explicit mesh that the params are sharded over from it."""
    run_loop = partial(_run, graphdef, sizes)
    mesh = _explicit_mesh(params)
    if mesh is None:
        return Generated(**run_loop(cache, params, prompts)._asdict())
    # The bookkeeping gathers and scatters by data. An explicit mesh would ask to annotate each of
    # those. Inside, the compiler decides; outside, a cache keeps the sharding that it came with and
    # everything else is whole on each device.
    whole: Any = jax.sharding.PartitionSpec()
    kept = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, cache)
    out: Any = Outputs(whole, whole, whole, whole, whole, cache=kept)
    with jax.sharding.use_abstract_mesh(mesh):
        in_mesh: Any = jax.sharding.auto_axes(run_loop, axes=mesh.explicit_axes, out_sharding=out)
        return Generated(**in_mesh(cache, params, prompts)._asdict())


def _explicit_mesh(params: Any) -> Any:
    """Return the mesh with explicit axes that params are sharded over, or None."""
    for leaf in jax.tree.leaves(params):
        mesh = jax.typeof(leaf).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def _run(
    graphdef: Any, sizes: Sizes, cache: PagedCache | None, params: Any, prompts: Prompts
) -> Outputs:
    """Run the whole loop."""
    model = nnx.merge(graphdef, jax.tree.map(jax.lax.stop_gradient, params))
    config = sizes.config
    if sizes.is_roomy:  # every running row at its longest
        rows_blocks = config.max_num_seqs * config.max_blocks_per_row
        config = replace(config, num_blocks=1 + rows_blocks * len(model.kv_groups))
    cache_config = config.cache_config(model)
    check_fits(config, cache_config, model, sizes.stop_ids, cache)
    own = None if cache is None else with_empty_rows(cache, cache_config)
    state = init_state(config, model, own)
    new, is_valid = _rows(config, model.vocab_size, sizes, prompts)
    state = state.replace(seqs=sequences.add(state.seqs, new))
    state = vary_with(state, (state, params))
    state, _ = run(model, state, jnp.int32(2**31 - 1))
    return _collect(state, is_valid, sizes, prompts, cache)


def _rows(
    config: EngineConfig, vocab_size: int, sizes: Sizes, prompts: Prompts
) -> tuple[NewSequences, Bool[Array, "R"]]:
    """Return each prompt `num_samples` times as rows, and which of them are valid."""
    tokens, lens, n = prompts.tokens, prompts.lens, sizes.num_samples
    width = tokens.shape[1]
    is_inside = jnp.arange(width, dtype=jnp.int32)[None] < lens[:, None]
    is_foreign = jnp.any(is_inside & ((tokens < 0) | (tokens >= vocab_size)), axis=1)
    is_valid = (lens > 0) & (lens <= width) & ~is_foreign
    tokens = jnp.where(is_inside, tokens, 0)
    tokens = jnp.pad(tokens, ((0, 0), (0, config.max_model_len - width)))

    def repeat(x):
        return jnp.repeat(x, n, axis=0)

    is_valid, lens = repeat(is_valid), repeat(lens)
    rows = jnp.arange(config.num_rows, dtype=jnp.int32)
    stop_ids = jnp.asarray(sizes.stop_ids or (-1,), jnp.int32)
    sampling = SamplingRows(
        parameters={
            p.name: p.canonical(repeat(prompts.parameters[p.name].astype(p.dtype)))
            for p in PARAMETERS
        },
        seed=split_seeds(prompts.key, config.num_rows),
        min_len=jnp.zeros_like(lens),
        stop_ids=jnp.broadcast_to(stop_ids, (config.num_rows, stop_ids.shape[0])),
    )
    first_sample = rows - rows % n
    new = NewSequences(
        rows=jnp.where(is_valid, rows, config.num_rows),
        tokens=repeat(tokens),
        num_prompt_tokens=lens,
        max_len=lens + repeat(prompts.limits),
        root=jnp.full_like(lens, -1),
        parent=jnp.where(rows == first_sample, config.num_rows, first_sample),
        sampling=sampling,
    )
    return new, is_valid


def _collect(
    state: EngineState,
    is_valid: Bool[Array, "R"],
    sizes: Sizes,
    prompts: Prompts,
    cache: PagedCache | None,
) -> Outputs:
    """Cut the outputs out of the rows."""
    seqs, max_len = state.seqs, state.config.max_model_len
    shape = (prompts.tokens.shape[0], sizes.num_samples)
    max_new = max_len - prompts.tokens.shape[1]
    lengths = jnp.where(is_valid, seqs.num_tokens - seqs.num_prompt_tokens, 0)
    offsets = jnp.arange(max_new, dtype=jnp.int32)
    place = jnp.minimum(seqs.num_prompt_tokens[:, None] + offsets[None], max_len - 1)
    is_output = offsets[None] < lengths[:, None]

    def cut(x):
        return jnp.where(is_output, jnp.take_along_axis(x, place, axis=1), 0).reshape(
            *shape, max_new
        )

    return Outputs(
        tokens=cut(seqs.tokens),
        lengths=lengths.reshape(shape),
        logprobs=cut(seqs.logprobs),
        finish_reason=jnp.where(is_valid, seqs.finish_reason, INVALID).reshape(shape),
        stats=state.counters,
        cache=None if cache is None else with_rows_of(state.cache, cache),
    )
