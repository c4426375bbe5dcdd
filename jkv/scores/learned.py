"""Scores that were trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.io import learned
from jkv.models import linear
from jkv.protocols import Born, Columns, Score
from jkv.tree import leaf, part, value

if TYPE_CHECKING:
    from jkv.evidence import Evidence
    from jkv.models import ModelConfig, Params

LEAST = 1e-30  # a gate may round to 1 in float32, and the age must still count


@value
class Gate:
    """log beta = logsigmoid(out silu(into x + bias) + offset) of a block's normed input, for each kv head.

    into f[L,W,E], bias f[L,W], out f[L,H,W], offset f[L,H]; in a layer's own score without L.
    """

    into: Array
    bias: Array
    out: Array
    offset: Array

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T], below 0, of x f[B,T,E]."""
        x = x.astype(jnp.float32)
        hidden = jax.nn.silu(linear(self.into, x) + self.bias[None, None])
        z = linear(self.out, hidden) + self.offset[None, None]
        return jnp.minimum(jax.nn.log_sigmoid(z).transpose(0, 2, 1), -LEAST)


def start(model: ModelConfig, width: int, offset: float, key: Array) -> Gate:
    """A gate that forgets nothing yet: weights of deviation 0.02, and beta = sigmoid(offset) for every token.

    >>> from jkv import models
    >>> start(models.read_config(models.TINY), 8, 5.0, jax.random.key(0)).out.shape
    (2, 2, 8)
    """
    first, second = jax.random.split(key)
    layers, heads, e = model.layers, model.heads, model.width
    return Gate(
        into=0.02 * jax.random.normal(first, (layers, width, e)),
        bias=jnp.zeros((layers, width)),
        out=0.02 * jax.random.normal(second, (layers, heads, width)),
        offset=jnp.full((layers, heads), offset, jnp.float32),
    )


@part
class Retention(Score):
    """What a token was worth at birth, fading with its age: rank = (seen + 1 - pos) log beta, in float32.

    Tokens whose beta rounds to 1 rank by age, the oldest last. gate: its weights, or None: those that come with jkv
    for the model; models: fingerprints of the model that it was trained for, in each dtype. Source: TRIM-KV
    (2512.03324).
    """

    gate: Gate | None = leaf(default=None)
    models: tuple[str, ...] = ()

    def bound(self, params: Params) -> Retention:
        if self.gate is None:
            return learned.shipped("trimkv", params, trained)
        learned.check(self.models, params)
        return self

    def birth(self, new: Born) -> Columns:
        if self.gate is None:
            raise ValueError("trimkv has no gate yet: give gate='FOLDER', as `jkv train trimkv` writes it")
        return {"log_beta": self.gate(new.x)}

    def rank(self, ev: Evidence) -> Array:
        age = (ev.seen[:, None, None] + 1 - ev.pos).astype(jnp.float32)
        return age * ev.columns["log_beta"]


def trained(folder: str) -> Retention:
    """The retention gate in a folder that `jkv train trimkv` wrote; FormatError if it holds no gate."""
    arrays, card = learned.read(folder, "trimkv")
    shapes = {name: x.shape for name, x in arrays.items()}
    try:
        (layers, width, e), (_, heads) = shapes["into"], shapes["offset"]
        want = dict(into=(layers, width, e), bias=(layers, width), out=(layers, heads, width), offset=(layers, heads))
    except (KeyError, ValueError):
        want = None
    if shapes != want:
        raise learned.broken(
            folder, f"its arrays are no gate ({', '.join(f'{k}{list(v)}' for k, v in shapes.items())})"
        )
    gate = Gate(**{name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()})
    return Retention(gate=gate, models=tuple(card["model"]))
