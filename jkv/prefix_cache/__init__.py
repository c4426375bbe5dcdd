"""Reuse of cached keys and values: prefixes from a block store, text chunks at any position.

Entry points: `store.PrefixCache`, `prefix.BegunPrompts`, `chunk_reuse.ChunkCache`. Must not import generation,
engine or speculative.
"""
