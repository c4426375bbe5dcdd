"""Codecs: how keys and values are stored."""
