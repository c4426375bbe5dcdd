"""Compression methods: the parts that papers are built from, and the catalogue that composes them from text."""

from jkv.methods.catalogue import METHODS
from jkv.methods.parser import as_config, known, pairs, parse

__all__ = ["METHODS", "as_config", "known", "pairs", "parse"]
