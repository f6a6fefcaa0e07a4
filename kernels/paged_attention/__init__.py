"""Attention over K and V that lie in pages found through a block table."""

from .api import ragged_paged_attention
from .plan import AttentionPlan, plan_attention

__all__ = ["AttentionPlan", "plan_attention", "ragged_paged_attention"]
