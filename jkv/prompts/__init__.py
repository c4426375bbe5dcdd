"""Prompts into caches: tokenization, capacity, allocation, and prefill in chunks that fit into memory.

Entry points: `prefill.prefilled`, `allocation.CacheShape`. Must not import generation, speculative or prefix_cache.
"""
