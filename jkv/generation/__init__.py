"""Text in, text and receipt out: host code around the core."""
