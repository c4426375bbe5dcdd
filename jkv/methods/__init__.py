"""Methods: what papers are made of, and the catalogue of them as compositions of text."""

from jkv.methods.rows import ROWS  # noqa: F401  # they are in the catalogue once they are imported
from jkv.methods.text import CATALOGUE, as_config, known, pairs, parse

__all__ = ["CATALOGUE", "as_config", "known", "pairs", "parse"]
