"""Sizes of an engine where the caller names none."""

import jax
import jax.numpy as jnp

from paged_jax.config import EngineConfig, require_int

CPU_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.85  # of what the params leave free


def choose_sizes(decoder, block_size, num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens) -> EngineConfig:
    """The config of an engine for `decoder`, with sizes for what is None: what memory allows, and no more than can be used."""
    on_cpu = jax.default_backend() == "cpu"
    require_int("block_size", block_size, 1)
    running = (32 if on_cpu else 256) if max_num_seqs is None else require_int("max_num_seqs", max_num_seqs, 1)
    budget = max(running, 128 if on_cpu else 2048) if max_num_batched_tokens is None else max_num_batched_tokens
    length = decoder.max_model_len if max_model_len is None else require_int("max_model_len", max_model_len, 2)
    groups = len(decoder.kv_groups)
    if num_blocks is not None:
        require_int("num_blocks", num_blocks, 2)
    else:
        wanted = 1 + running * groups * -(-length // block_size)
        num_blocks = max(2, min(wanted, _cache_bytes() // _block_bytes(decoder, block_size)))
    if max_model_len is None:
        length = max(2, min(length, (num_blocks - 1) // groups * block_size))
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=length,
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        block_size=block_size,
    )


def _block_bytes(decoder, block_size: int) -> int:
    layers = max(group.num_layers for group in decoder.kv_groups)
    return 2 * layers * block_size * decoder.num_kv_heads * decoder.head_dim * jnp.dtype(decoder.dtype).itemsize


def _cache_bytes() -> int:
    stats = jax.devices()[0].memory_stats()
    if jax.default_backend() == "cpu" or not stats or "bytes_limit" not in stats:
        return CPU_CACHE_BYTES
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * GPU_CACHE_SHARE)
