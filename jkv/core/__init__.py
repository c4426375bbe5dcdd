"""Transitions of a cache (flush, prefill, step, decode) with their compilation and sharding.

Nothing here knows a method, text or files.
"""
