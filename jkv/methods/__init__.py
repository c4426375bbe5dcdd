"""Methods: what papers are made of, and the catalogue of them as compositions of text."""

from jkv.methods.parser import CATALOGUE, as_config, known, pairs, parse
from jkv.methods.rows import ROWS  # noqa: F401  # they are in the catalogue once they are imported

__all__ = ["CATALOGUE", "as_config", "known", "pairs", "parse"]
