"""Flax (NNX) decoders and checkpoint loaders."""
