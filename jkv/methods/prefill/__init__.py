"""Prompt compression: what happens to a prompt between its prefill and the first new token."""
