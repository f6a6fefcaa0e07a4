"""The arguments of `generate`: checked, and sorted into what is static and what is not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.core import Tracer
from jaxtyping import Array, Int, Key, Shaped, UInt

from paged_jax.cache.paged_cache import PagedCache
from paged_jax.checks import MOST, check_bool, check_int, show
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.engine.requests import max_blocks_held
from paged_jax.errors import ConfigError, InvalidRequestError
from paged_jax.sampling.parameters import LARGEST_INT, PARAMETERS, Parameter, check_ids
from paged_jax.sampling.streams import KEY_WORDS

MAX_RUNNING = 64  # sequences running at once, where the caller does not say
MAX_TOKENS_A_STEP = 512


@dataclass(frozen=True)
class Sizes:
    """What is static in a call of `generate`.

    Attributes:
        is_roomy: whether the pool is to be large enough that nothing is preempted. Its
            `config.num_blocks` then means nothing: it takes the model to know them.
    """

    config: EngineConfig
    is_roomy: bool
    stop_ids: tuple[int, ...]
    num_samples: int


class Prompts(struct.PyTreeNode):
    """What is traced: B prompts of up to P tokens.

    Attributes:
        limits: new tokens of each prompt at most.
        parameters: an array for each name of `sampling.parameters.PARAMETERS`.
    """

    tokens: Int[Array, "B P"]
    lens: Int[Array, "B"]
    key: Key[Array, ""] | UInt[Array, "words"]
    limits: Int[Array, "B"]
    parameters: dict[str, Shaped[Array, "B"]]


def check_arguments(
    graphdef: Any,
    params: Any,
    prompts: Any,
    prompt_lens: Any,
    key: Any,
    *,
    max_new_tokens: Any,
    num_samples: Any,
    parameters: Mapping[str, Any],
    stop_ids: Mapping[str, Any],
    block_size: Any,
    num_blocks: Any,
    max_num_seqs: Any,
    max_num_batched_tokens: Any,
    cache: Any,
    bucket: Any,
) -> tuple[Sizes, Prompts]:
    """Return the arguments of `generate`, which has the same names, static and traced.

    In a bucket they have the shapes of the bucket.

    Raises ConfigError for sizes and InvalidRequestError for parameters.
    """
    _check_model(graphdef, params)
    tokens, lens = _check_prompts(prompts, prompt_lens)
    _check_key(key)
    num_samples = check_int("num_samples", num_samples, 1, error=InvalidRequestError)
    limits = _check_limits(max_new_tokens, tokens.shape[0])
    values = {p.name: _per_prompt(p, parameters[p.name], tokens.shape[0]) for p in PARAMETERS}
    max_new = int(limits.max())
    if check_bool("bucket", bucket, error=ConfigError):
        longest = nnx.merge(graphdef, params).max_model_len
        tokens, max_new = _widen(tokens, max_new, longest)
        lens, limits, values = jax.tree.map(
            lambda x: _lengthen(x, bucket_of(x.shape[0])), (lens, limits, values)
        )
    batch, length = tokens.shape
    stops = tuple(token for name, ids in stop_ids.items() for token in check_ids(name, ids))
    rows = batch * num_samples
    running = MAX_RUNNING
    if max_num_seqs is not None:
        running = check_int("max_num_seqs", max_num_seqs, 1, error=ConfigError)
    running = min(running, rows)
    budget = max_num_batched_tokens
    if budget is None:
        budget = max(running, min(MAX_TOKENS_A_STEP, running * length))
    is_roomy = num_blocks is None and cache is None
    if cache is not None:
        if not isinstance(cache, PagedCache):
            raise ConfigError(f"cache={show(cache)}: a PagedCache of `init_cache` is needed")
        num_blocks, block_size = cache.config.num_blocks, cache.config.block_size
    config = EngineConfig(
        num_blocks=2 if num_blocks is None else num_blocks,
        max_model_len=length + max_new,
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        num_rows=rows,
        block_size=block_size,
        max_stop_ids=max(len(stops), 1),
    )
    arrays = Prompts(_put(tokens), _put(lens), _put(key), _put(limits), _put(values))
    return Sizes(config, is_roomy, stops, num_samples), arrays


def bucket_of(size: int) -> int:
    """Return the next power of two: 5 -> 8, 8 -> 8."""
    return 1 << (size - 1).bit_length()


def _widen(tokens: Any, max_new: int, longest: int) -> tuple[Any, int]:
    """Return prompts [B, P] and the most new tokens in their bucket.

    Prompt and output together stay within `longest` where they were.
    """
    batch, length = tokens.shape
    wide = max(length, min(bucket_of(length), longest - max_new))
    max_new = max(max_new, min(bucket_of(max_new), longest - wide))
    pad = jnp.pad if isinstance(tokens, jax.Array) else np.pad
    return _lengthen(pad(tokens, ((0, 0), (0, wide - length))), bucket_of(batch)), max_new


def _lengthen(x: Any, size: int) -> Any:
    """Pad the first axis with zeros: prompts of length 0, which are not computed."""
    pad = jnp.pad if isinstance(x, jax.Array) else np.pad
    return pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def check_fits(
    config: EngineConfig,
    needed: CacheConfig,
    model: Any,
    stop_ids: tuple[int, ...],
    cache: PagedCache | None,
) -> None:
    """Raise where the sizes do not fit the model, the pool, or the cache that was passed."""
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_new_tokens: with prompts {config.max_model_len} tokens; the model was made for "
            f"{model.max_model_len} at most"
        )
    need = max_blocks_held(needed, config.max_model_len, config.max_num_batched_tokens)
    if need > config.num_blocks - 1:
        raise ConfigError(
            f"num_blocks={config.num_blocks}: a row of {config.max_model_len} tokens (the prompts' "
            f"width and max_new_tokens) needs up to {need} blocks of {config.block_size} besides "
            "the null block"
        )
    for token in stop_ids:
        if token >= model.vocab_size:
            raise InvalidRequestError(
                f"eos_ids, stop_ids: {token} is outside the vocabulary of {model.vocab_size}"
            )
    if cache is not None:
        _check_pages(cache, needed)


def _check_pages(cache: PagedCache, needed: CacheConfig) -> None:
    """Raise ConfigError where a cache has other groups or pages than the model needs."""
    arrays = (cache.kv.k_pages, cache.kv.v_pages)
    given = [[f"{pages.shape} {pages.dtype}" for pages in kind] for kind in arrays]
    shape = (needed.num_blocks, needed.block_size, needed.num_kv_heads, needed.head_dim)
    wanted = [[f"{shape} {needed.dtype}"] * needed.num_layers] * 2
    if given != wanted or cache.config.groups != needed.groups:
        raise ConfigError(
            f"cache: pages {given[0]}, groups {cache.config.groups}; the model needs {wanted[0]}, "
            f"groups {needed.groups}: `init_cache(CacheConfig.for_decoder(model, ...))`"
        )


def _check_model(graphdef: object, params: object) -> None:
    is_split = isinstance(graphdef, nnx.GraphDef)
    if not is_split or isinstance(params, nnx.Module | nnx.GraphDef):
        raise ConfigError(
            f"graphdef, params: a {type(graphdef).__name__} and a {type(params).__name__}; pass "
            "`graphdef, params = nnx.split(model)`, in that order"
        )


def _check_prompts(prompts: Any, prompt_lens: Any) -> tuple[Any, Any]:
    tokens, lens = _to_ids("prompts", prompts), _to_ids("prompt_lens", prompt_lens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or 0 in tokens.shape:
        raise ConfigError(
            f"prompts: shape {tokens.shape} of {tokens.dtype}; int token ids [B, P] are needed"
        )
    batch = tokens.shape[0]
    if lens.shape != (batch,) or not jnp.issubdtype(lens.dtype, jnp.integer):
        raise ConfigError(
            f"prompt_lens: shape {lens.shape} of {lens.dtype}; int32 [{batch}] is needed"
        )
    # A narrow dtype could not be compared with the vocabulary.
    return tokens.astype(np.int32), lens.astype(np.int32)


def _to_ids(name: str, values: Any) -> Array | np.ndarray:
    """Return an array. What does not fit 32 bits is clamped to an id of no vocabulary."""
    if not isinstance(values, jax.Array):
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ConfigError(
                f"{name}={show(values)}: rows of one length are needed, padded where shorter"
            ) from error
        if not np.issubdtype(values.dtype, np.number):
            raise ConfigError(
                f"{name}={show(values)}: int token ids and lengths are needed, not {values.dtype}"
            )
    if jnp.issubdtype(values.dtype, jnp.integer):
        values = _clip_to_32_bits(values)
    return values


def _check_key(key: Any) -> None:
    is_array = isinstance(key, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        is_key = key.ndim == 0
    else:
        is_key = is_array and key.dtype == jnp.uint32 and key.shape in {(n,) for n in KEY_WORDS}
    if not is_key:
        shape = f" has shape {key.shape} of {key.dtype};" if is_array else ""
        raise InvalidRequestError(
            f"key={show(key)}:{shape} one key of jax.random is needed, `jax.random.key(0)`, or its "
            f"{' or '.join(map(str, KEY_WORDS))} words as uint32"
        )


def _check_limits(max_new_tokens: Any, batch: int) -> np.ndarray:
    name = "max_new_tokens"
    if isinstance(max_new_tokens, Tracer):
        raise ConfigError(
            f"{name}: is traced; its greatest is a shape, so pass an int, a list or a numpy array"
        )
    try:
        limits = np.asarray(max_new_tokens)
    except ValueError as error:  # rows of several lengths
        raise InvalidRequestError(f"{name}={show(max_new_tokens)}: ints are needed") from error
    if not np.issubdtype(limits.dtype, np.integer) or limits.shape not in ((), (batch,)):
        raise InvalidRequestError(
            f"{name}={show(max_new_tokens)}: an int, or one for each of {batch} prompts, is needed"
        )
    if limits.min() < 1 or limits.max() > MOST:
        raise InvalidRequestError(f"{name}={show(max_new_tokens)}: must be from 1 to {MOST}")
    return np.broadcast_to(limits, (batch,)).astype(np.int32)


def _per_prompt(parameter: Parameter, value: Any, batch: int) -> Any:
    """Return one value of a sampling parameter for each prompt, checked where it is concrete."""
    name = parameter.name
    try:
        given = value if isinstance(value, jax.Array) else np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{name}={show(value)}: numbers are needed") from error
    is_int, is_float = (jnp.issubdtype(given.dtype, kind) for kind in (jnp.integer, jnp.floating))
    if not (is_int or (is_float and not parameter.is_int)):
        kind = "ints are" if parameter.is_int else "real numbers are"
        raise InvalidRequestError(f"{name}={show(value)}: is of {given.dtype}; {kind} needed")
    if given.shape not in ((), (batch,)):
        raise InvalidRequestError(
            f"{name}: shape {given.shape}; one value, or one for each of {batch} prompts, is needed"
        )
    if is_int:
        given = _clip_to_32_bits(given)
    if not isinstance(given, Tracer) and not np.all(parameter.is_accepted(np.asarray(given))):
        raise InvalidRequestError(f"{name}={show(value)}: must be {parameter.accepted}")
    given = given.astype(parameter.dtype)
    if isinstance(given, np.ndarray | np.generic):
        return np.broadcast_to(given, (batch,))
    return jnp.broadcast_to(given, (batch,))


def _put(arrays: Any) -> Any:
    """Transfer what is of NumPy, said aloud: `jax_transfer_guard` may forbid the rest."""
    return jax.tree.map(lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, arrays)


def _clip_to_32_bits(values: Any) -> Any:
    """Return integers of any dtype as int32, those outside as the nearest inside."""
    if jnp.iinfo(values.dtype).max <= LARGEST_INT:
        return values.astype(np.int32)
    least = max(jnp.iinfo(values.dtype).min, -LARGEST_INT)
    return values.clip(least, LARGEST_INT).astype(np.int32)
