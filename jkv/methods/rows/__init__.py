"""The rows of the catalogue, a module a family."""

from jkv.methods.rows import (
    modifiers,
    eviction,
    layers,
    lookahead,
    gates,
    merging,
    precision,
    coding,
    rotation,
    reading,
)  # isort: skip

ROWS = (modifiers, eviction, layers, lookahead, gates, merging, precision, coding, rotation, reading)  # in this order
