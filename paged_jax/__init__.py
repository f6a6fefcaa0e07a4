"""PagedAttention as pure JAX functions: block tables, scheduler and decoder in one jitted step."""

from paged_jax.cache.by_hand import allocate_slots, fork, free
from paged_jax.cache.paged_cache import PagedCache, init_cache
from paged_jax.config import CacheConfig, EngineConfig
from paged_jax.engine.engine import Engine
from paged_jax.engine.integrity import check_integrity
from paged_jax.engine.report import Update
from paged_jax.errors import (
    ConfigError,
    EngineBusyError,
    EngineClosedError,
    InvalidRequestError,
    NoProgressError,
    PagedJaxError,
    UnknownOptionError,
)
from paged_jax.generate import Generated, generate
from paged_jax.kv_group import FullAttention, SlidingWindow
from paged_jax.llm import LLM
from paged_jax.outputs import CompletionOutput, Delta, Metrics, RequestOutput
from paged_jax.sampling.parameters import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "Delta",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "FullAttention",
    "Generated",
    "InvalidRequestError",
    "Metrics",
    "NoProgressError",
    "PagedCache",
    "PagedJaxError",
    "RequestOutput",
    "SamplingParams",
    "SlidingWindow",
    "UnknownOptionError",
    "Update",
    "allocate_slots",
    "check_integrity",
    "fork",
    "free",
    "generate",
    "init_cache",
]
