"""Text generation and scoring through a KV cache, with a receipt of memory, time and exactness.

Entry points: `api.generate`, `api.stream`, `score.score`. Must not import engine, batch or serve.
"""
