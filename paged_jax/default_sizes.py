"""Sizes of an engine where the caller gives none."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.arrays import ceil_div
from paged_jax.checks import check_int
from paged_jax.config import EngineConfig, token_widths
from paged_jax.errors import ConfigError

CPU_CACHE_BYTES = 2**30
LEAST_WIDE, MOST_WIDE = 32, 256  # tokens of a pass that is wide enough for a prompt, and of any
GPU_CACHE_SHARE = 0.85  # of what the params leave free


def choose_sizes(
    decoder: Any,
    *,
    block_size: Any,
    num_blocks: Any,
    max_model_len: Any,
    max_num_seqs: Any,
    max_num_batched_tokens: Any,
    enable_prefix_caching: Any,
    watermark: Any,
) -> EngineConfig:
    """Return the config of an engine for `decoder`, with sizes for what is None.

    They are what memory allows, and no more than can be used. Raises ConfigError for a size that
    cannot work.
    """

    def given(name: str, value: Any, least: int, default: int) -> int:
        return default if value is None else check_int(name, value, least, error=ConfigError)

    on_cpu = jax.default_backend() == "cpu"
    block_size = check_int("block_size", block_size, 1, error=ConfigError)
    running = given("max_num_seqs", max_num_seqs, 1, 64 if on_cpu else 256)
    default_budget = max(running, 512 if on_cpu else 2048)
    budget = given("max_num_batched_tokens", max_num_batched_tokens, 1, default_budget)
    length = given("max_model_len", max_model_len, 2, decoder.max_model_len)
    num_groups = len(decoder.kv_groups)
    usable = 1 + running * num_groups * ceil_div(length, block_size)
    fitting = max(0, cache_bytes(decoder)) // _block_bytes(decoder, block_size)
    num_blocks = given("num_blocks", num_blocks, 2, max(2, min(usable, fitting)))
    if max_model_len is None:
        length = max(2, min(length, (num_blocks - 1) // num_groups * block_size))
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=length,
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_stop_ids=max(8, len(decoder.eos_token_ids) + 4),
        watermark=watermark,
    )


class Widths(NamedTuple):
    """Token counts that an engine's steps are compiled for.

    Attributes:
        first: of the program that serves from the start.
        later: of the one that is compiled in the background meanwhile, or None.
    """

    first: tuple[int, ...]
    later: tuple[int, ...] | None


def choose_widths(config: EngineConfig) -> Widths:
    """Return the widths for the default backend.

    On a CPU a step costs what its width costs: one row and all running rows at first, then each
    power of two but 2, for two rows cost what four cost. On a GPU a narrow step costs what a wider
    one costs.

        64 running, budget 512 -> (1, 64), later (1, 4, 8, 16, 32, 64, 128, 256)
    """
    running, budget = config.max_num_seqs, config.max_num_batched_tokens
    if jax.default_backend() != "cpu":
        return Widths(token_widths(config), None)
    first = {1, min(max(running, LEAST_WIDE), budget)}
    later = {1, running, *(1 << i for i in range(2, min(budget, MOST_WIDE).bit_length()))}
    return Widths(tuple(sorted(first)), None if later <= first else tuple(sorted(later)))


def _block_bytes(decoder: Any, block_size: int) -> int:
    """Return the bytes of one block in all layers, K and V."""
    layers = max(group.num_layers for group in decoder.kv_groups)
    width = decoder.num_kv_heads * decoder.head_dim * jnp.dtype(decoder.dtype).itemsize
    return max(1, 2 * layers * block_size * width)


def cache_bytes(decoder: Any) -> int:
    """Return the bytes that the cache may take beside the decoder's params, loaded or not."""
    stats = jax.devices()[0].memory_stats()
    if jax.default_backend() == "cpu" or not stats or "bytes_limit" not in stats:
        return CPU_CACHE_BYTES
    params = jax.tree.leaves(nnx.state(decoder))
    to_load = sum(x.size * x.dtype.itemsize for x in params if isinstance(x, jax.ShapeDtypeStruct))
    return int((stats["bytes_limit"] - stats["bytes_in_use"] - to_load) * GPU_CACHE_SHARE)
