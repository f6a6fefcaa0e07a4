"""PagedAttention as pure JAX functions."""
