"""Attention and cache-write kernels: arrays in, arrays out."""

from .paged_attention import AttentionPlan, plan_attention, ragged_paged_attention
from .write_kv import write_kv

__all__ = ["AttentionPlan", "plan_attention", "ragged_paged_attention", "write_kv"]
