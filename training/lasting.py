"""Training what `retrieval` forgets by: gates as TRIM-KV's, in one contest of all layers and heads.

A token of age n of a kv head that retrieves a ranks by (1 - a) n log beta. A contest is of orders alone, so in nats

    s = -log(-log beta) - log n - log(1 - a)

The hidden numbers of a gate stay as they are, and how each kv head weighs them is learned by suffix distillation.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import part
from jkv.methods.scores.learned import Contested, Gate
from jkv.training import suffix

LEAST = 1e-3  # of 1 - a: who never forgets learns nothing


@part
class Slowed(Contested):
    """The score while it is trained. shares: 1 - a of each kv head, layer by layer."""

    shares: tuple[tuple[float, ...], ...] = ()


@part
class Recipe(suffix.Recipe):
    """How the gates of a contest are trained: `out` and `offset`."""

    def worth(self, score: Slowed, held: suffix.Prefix, live: Array) -> Array:
        size, at = live.sum(1, keepdims=True), jnp.cumsum(live, 1) - 1
        age = jnp.log(jnp.maximum(size + 1 - at, 1).astype(jnp.float32))
        slow = -jnp.log(jnp.maximum(jnp.asarray(score.shares, jnp.float32), LEAST))
        own = (-jnp.log(-_of_layer(score.weights, i)(held.x[:, i])) for i in range(held.x.shape[1]))
        return jnp.stack(list(own)) + slow[:, None, :, None] - age[None, :, None]


def _of_layer(gate: Gate, i: int) -> Gate:
    """The gate of a layer, whose first product learns nothing."""
    gate = jax.tree.map(lambda a: a[i], gate)
    return replace(gate, into=jax.lax.stop_gradient(gate.into), bias=jax.lax.stop_gradient(gate.bias))
