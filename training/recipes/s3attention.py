"""Recipe of S3-Attention: sparse feature dictionaries of a frozen model's keys and queries.

With x a head's key, or a query of its group, before rotation, and x' its reconstruction from its features z,

    loss = sum |x - x'|^2 / sum |x - mean|^2

over random tokens of each text: the unexplained share of the variance, so that heads, keys and queries count equally.
Source: S3-Attention (2601.17702), from its abstract; sizes and steps are ours.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.methods.prefill.s3attention import KEYS, QUERIES, Dictionary, Featured
from jkv.models import Params
from jkv.training import trainer
from jkv.training.data.corpora import rows
from jkv.training.losses import Batch
from jkv.training.optimizer import adamw, cosine
from jkv.training.soft_cache_model import hidden


@value
class Seen:
    """Un-rotated keys and queries of N layers.

    Attributes:
        k: f16[B,N,H,T,D], keys.
        q: f16[B,N,H,G,T,D], queries.
    """

    k: Array
    q: Array

    def sides(self, at: Array) -> tuple[Array, Array]:
        """Gather keys f32[N,H,B*n,D] and queries f32[N,H,B*G*n,D] of tokens i32[B,n]."""
        k = jnp.take_along_axis(self.k, at[:, None, None, :, None], 3)
        q = jnp.take_along_axis(self.q, at[:, None, None, None, :, None], 4)
        found = (jnp.moveaxis(x, 0, 2).astype(jnp.float32) for x in (k, q))
        k, q = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in found)
        return k, q


@partial(jax.jit, static_argnames=("layers",))
def seen(params: Params, batch: Batch, layers: tuple[int, ...]) -> Seen:
    """Compute the un-rotated keys and queries of some layers."""
    memos = hidden(params.first(layers[-1] + 1), batch, lambda i, a, age: (jnp.zeros((1, 1, 1, 1)), (a.k, a.q)))[1]
    k, q = (jnp.stack([memos[i][side] for i in layers], 1).astype(jnp.float16) for side in (0, 1))
    return Seen(k=k, q=q)


def start(params: Params, texts: Batch, layers: tuple[int, ...], features: int, active: int, key: Array) -> Dictionary:
    """Initialize random unit directions, equal for encoding and decoding, centred on the first text's means.

    Args:
        params: The model.
        texts: The texts.
        layers: Numbers of the layers, ascending.
        features: Number F of features per kv head.
        active: Features that a key or a query has.
        key: Random key.
    """
    c = params.config
    drawn = jax.random.normal(key, (len(layers), c.heads, features, c.head_dim))
    unit = drawn / jnp.linalg.norm(drawn, axis=-1, keepdims=True)
    first = rows(texts, [0])
    sides = seen(params, first, layers).sides(jnp.arange(int((first.pos >= 0).sum()))[None])
    centre = jnp.stack([x.mean(2) for x in sides], 2)
    bias = jnp.zeros((*unit.shape[:2], 2, features))
    return Dictionary(encode=unit, decode=unit, centre=centre, bias=bias, layers=layers, active=active)


def missed(own: Dictionary, x: Array, of: int) -> Array:
    """Compute the unexplained share f32[] of the variance of a head's keys or queries x f[n,D]."""
    gap = jnp.square(x - own.restored(own.features(x, of), of)).sum()
    return gap / jnp.square(x - x.mean(0, keepdims=True)).sum()


def both(gate: Dictionary, sides: tuple[Array, Array]) -> tuple[Array, Array]:
    """Compute `missed` of the keys and of the queries of all heads, f32[N,H] each."""
    k, q = (jax.vmap(jax.vmap(partial(missed, of=of)))(gate, x) for of, x in zip((KEYS, QUERIES), sides, strict=True))
    return k, q


@part
class Recipe(trainer.Recipe):
    """Recipe of a dictionary. The learning rate falls in a cosine.

    Attributes:
        tokens: Tokens drawn per text and step.
        layers: Numbers of the layers.
        warm: 0, as no layer is trained alone.
    """

    tokens: int = 256
    layers: tuple[int, ...] = ()

    warm: ClassVar[int] = 0

    def tune(self) -> Any:
        return adamw(cosine(self.rate, self.steps // 20 + 1, self.steps), self.clip)

    def lesson(self, params: Params, batch: Batch) -> Seen:
        return seen(params, batch, self.layers)

    def loss(
        self, score: Featured, params: Params, batch: Batch, teacher: Seen, step: Array, key: Array
    ) -> trainer.Told:
        size = (batch.pos >= 0).sum(1, keepdims=True)
        at = jax.random.randint(key, (size.shape[0], self.tokens), 0, size)
        k, q = (x.mean() for x in both(score.weights, teacher.sides(at)))
        return (k + q) / 2, {"loss": (k + q) / 2, "keys": k, "queries": q}

    def explained(self, params: Params, texts: Batch, score: Featured) -> dict[str, Any]:
        """Return the unexplained share of each layer's keys and queries, averaged over heads and texts."""
        each = []
        for i in range(texts.ids.shape[0]):
            one = rows(texts, [i])
            sides = self.lesson(params, one).sides(jnp.arange(int((one.pos >= 0).sum()))[None])
            each.append([np.asarray(x.mean(1), float) for x in both(score.weights, sides)])
        k, q = (np.round(x, 4).tolist() for x in np.mean(each, 0))
        print(f"missed of the variance, layers {list(self.layers)}: keys {k}, queries {q}")
        return {"missed": {"keys": k, "queries": q}}
