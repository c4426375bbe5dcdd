"""Weights of mixtures of cache entries (LoCoCo, 2406.05317)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jkv.nn.gates import even
from jkv.nn.network import Network, Shapes, per_layer

if TYPE_CHECKING:
    from jkv.models import ModelConfig


class Blend(nnx.Module):
    """Weights of m mixtures of n entries in order of position: w = (1 - share) e + share softmax(relu(conv [k; v])).

    e is one-hot at each mixture's own entry; the convolution runs over the entries, and w sums to 1 over them. All kv
    heads of a layer share them.

    Args:
        inputs: Channels of a key and a value together.
        mixtures: m.
        width: Entries that the convolution spans.
    """

    def __init__(self, inputs: int, mixtures: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(inputs, mixtures, width, kernel_init=even, rngs=rngs)
        self.share = nnx.Param(jnp.full((), 0.5))

    @classmethod
    def start(cls, model: ModelConfig, mixtures: int, width: int, key: Array) -> Network:
        """Initialize mixtures that are about half their own entry and half the mean of all."""
        return per_layer(partial(cls, model.head_dim + model.value_dim, mixtures, width), model.layers, key)

    @classmethod
    def sizes(cls, shapes: Shapes) -> dict[str, int]:
        width, inputs, mixtures = shapes["conv.kernel"]
        return dict(inputs=inputs, mixtures=mixtures, width=width)

    def __call__(self, k: Array, v: Array, there: Array, own: Array) -> Array:
        """w f32[N,m,n], 0 for dead entries.

        Args:
            k, v: f[N,n,D].
            there: bool[N,n], False for dead entries.
            own: i32[N,m], index in n of each mixture's own entry.
        """
        x = jnp.concatenate([k, v], -1).astype(jnp.float32)
        p = jax.nn.softmax(jnp.where(there[:, None], jax.nn.relu(self.conv(x)).swapaxes(1, 2), -jnp.inf), -1)
        e = own[..., None] == jnp.arange(k.shape[1])[None, None]
        return (1 - self.share) * e.astype(jnp.float32) + self.share * p
