"""The rows of the catalogue, a module a family."""

from jkv.methods.rows import (
    coding,
    eviction,
    gates,
    geometry,
    layers,
    lookahead,
    merging,
    modifiers,
    precision,
    queried,
    reading,
    rotation,
    subspaces,
)

ROWS = (
    modifiers,
    eviction,
    geometry,
    queried,
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
