"""Prompts into caches: tokenization, capacity, allocation, and prefill in pieces that fit.

Entry points: `prefill.prefilled`, `allocation.layout`. Knows nothing of decoding, drafts or stored prefixes.
"""
