"""Eviction scores: which tokens stay."""
