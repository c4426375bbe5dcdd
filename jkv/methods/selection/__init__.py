"""Selectors: which pages of a tier a step reads."""
