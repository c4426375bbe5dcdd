"""OpenAI-compatible HTTP server over continuous batches, one batch for each cache config that requests choose.

Entry point: `server.serve`. Must not import batch.
"""
