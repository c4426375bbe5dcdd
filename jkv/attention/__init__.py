"""Attention over a cache: exact tokens, codes tile by tile, and the statistics that scores read."""
