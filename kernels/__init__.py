"""Attention and cache-write kernels: arrays in, arrays out."""
