"""Comparisons with other libraries, and the scripts behind results/: python -m benchmarks.NAME in a checkout.

They need torch, transformers, kvpress or xllamacpp (the extras parity, kvpress and llama), and are not in the wheel.
"""
