"""Weights: the params pytree, loading, quantization and matmuls."""
