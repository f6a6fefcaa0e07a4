"""PagedAttention as pure JAX functions: block tables, scheduler and decoder in one jitted step."""

from paged_jax.cache_manager import PagedCache, init_cache
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.engine import Engine
from paged_jax.errors import (
    ConfigError,
    DoubleFreeError,
    InvalidRequestError,
    NoProgressError,
    OutOfBlocksError,
    PagedJaxError,
)
from paged_jax.functional_core import allocate_slots, fork, free
from paged_jax.generate import Generated, generate
from paged_jax.integrity import check_integrity
from paged_jax.llm import LLM
from paged_jax.outputs import CompletionOutput, Delta, Metrics, RequestOutput
from paged_jax.report import Update
from paged_jax.sampling_params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "Delta",
    "DoubleFreeError",
    "Engine",
    "EngineConfig",
    "Generated",
    "InvalidRequestError",
    "Metrics",
    "NoProgressError",
    "OutOfBlocksError",
    "PagedCache",
    "PagedJaxError",
    "RequestOutput",
    "SamplingParams",
    "Update",
    "allocate_slots",
    "check_integrity",
    "fork",
    "free",
    "generate",
    "init_cache",
]
