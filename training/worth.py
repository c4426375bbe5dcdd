"""Training what `utility` keeps: what a question may look up, and what the next lines need, in one contest.

A token of age n is worth

    s = log(exp(r) + exp(level) beta^n)

nats to a kv head, where r is KVzap's and beta TRIM-KV's. Either was trained alone, so neither says what one of its
nats is worth beside another head's or the other's: that is learned by suffix distillation. The hidden numbers of both
stay as they are; how each kv head weighs them, its offsets and its level move.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.tree import part
from jkv.methods.scores.utility import Twofold, Utility
from jkv.training import suffix


@part
class Recipe(suffix.Recipe):
    """How both gates are weighed, head by head."""

    def worth(self, score: Utility, held: suffix.Prefix, live: Array) -> Array:
        size, at = live.sum(1, keepdims=True), jnp.cumsum(live, 1) - 1
        age = jnp.maximum(size + 1 - at, 1).astype(jnp.float32)[:, None]
        gate = _weighed(score.weights)

        def of_layer(i: int) -> Array:
            own, x = jax.tree.map(lambda a: a[i], gate), held.x[:, i]
            return jnp.logaddexp(own.foreseen(x), own.level[None, :, None] + age * own.fading(x))

        return jnp.stack([of_layer(i) for i in range(held.x.shape[1])])

    def quick(self, score: Any, change: Any) -> Any:
        gate = score.gate
        return replace(score, gate=replace(gate, offset=change(gate.offset), level=change(gate.level)))


def _weighed(gate: Twofold) -> Twofold:
    """The same, whose first products learn nothing."""
    names = ("into", "bias", "fade_into", "fade_bias")
    return replace(gate, **{name: jax.lax.stop_gradient(getattr(gate, name)) for name in names})
