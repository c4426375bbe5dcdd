"""Compression methods: the parts that papers are built from, and the catalogue that composes them from text."""

from jkv.methods.parser import CATALOGUE, as_config, known, pairs, parse, refusal
from jkv.methods.rows import ROWS  # noqa: F401  # importing them fills the catalogue

__all__ = ["CATALOGUE", "as_config", "known", "pairs", "parse", "refusal"]
