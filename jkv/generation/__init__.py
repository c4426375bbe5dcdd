"""Text in, text and receipt out.

Entry points: `api.generate`, `api.stream`, `score.score`. Must not import engine, batch or serve.
"""
