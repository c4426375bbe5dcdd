"""Reuse of cached keys and values: prefixes from a block store, text chunks at any position.

Entry points: `store.Store`, `prefix.BegunPrompts`, `chunk_reuse.Passages`. Must not import generation, engine or
speculative.
"""
