"""An HTTP server with OpenAI's API over continuous batches, one for each cache that requests ask for.

Entry point: `server.run`. Must not import batch.
"""
