"""Speculative decoding: propose draft tokens, verify them in one pass.

Entry points: `build.drafter`, `decoding.Speculative`. Never changes a token. Must not import generation, engine or
prefix_cache.
"""
