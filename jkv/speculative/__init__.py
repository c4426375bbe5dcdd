"""Speculative decoding: drafters propose tokens, one pass of the model verifies them. Tokens never change.

Entry points: `build.build_drafter`, `decoding.Drafting`. Must not import generation, engine or prefix_cache.
"""
