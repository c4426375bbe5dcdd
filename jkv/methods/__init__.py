"""Methods: what papers are made of, and the catalogue of them as compositions of text."""

from jkv.methods.text import CATALOGUE, as_config, known, pairs, parse

__all__ = ["CATALOGUE", "as_config", "known", "pairs", "parse"]
