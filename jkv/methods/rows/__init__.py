"""The rows of the catalogue, a module a family."""

from jkv.methods.rows import (
    coding,
    eviction,
    gates,
    layers,
    lookahead,
    merging,
    modifiers,
    precision,
    reading,
    rotation,
    subspaces,
)

ROWS = (
    modifiers,
    eviction,
    layers,
    lookahead,
    gates,
    merging,
    precision,
    coding,
    rotation,
    subspaces,
    reading,
)  # in this order
