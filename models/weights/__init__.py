"""Weights: the params pytree, how it is loaded, quantized and multiplied."""
