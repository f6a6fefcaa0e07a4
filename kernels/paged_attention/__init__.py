"""Attention over K and V that lie in pages found through a block table."""

from .api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
