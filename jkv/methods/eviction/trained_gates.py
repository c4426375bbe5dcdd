"""Scores by trained gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.models import linear
from jkv.protocols import Born, Columns, Evidence, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig

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

    axes: ClassVar = dict(into="LWE", bias="LW", out="LHW", offset="LH")

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T], below 0, of x f[B,T,E]."""
        x = x.astype(jnp.float32)
        return _log_beta(self, jax.nn.silu(linear(self.into, x) + self.bias[None, None]))


@value
class Deep:
    """A `Gate` with one layer more: log beta = logsigmoid(out silu(middle silu(into x + bias) + shift) + offset).

    middle f[L,W,W], shift f[L,W]; the others as in `Gate`.
    """

    into: Array
    bias: Array
    middle: Array
    shift: Array
    out: Array
    offset: Array

    axes: ClassVar = dict(Gate.axes, middle="LWW", shift="LW")

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T], below 0, of x f[B,T,E]."""
        hidden = jax.nn.silu(linear(self.into, x.astype(jnp.float32)) + self.bias[None, None])
        return _log_beta(self, jax.nn.silu(linear(self.middle, hidden) + self.shift[None, None]))


def _log_beta(gate: Gate | Deep, hidden: Array) -> Array:
    """f32[B,H,T], below 0, of the last hidden numbers f32[B,T,W]."""
    z = linear(gate.out, hidden) + gate.offset[None, None]
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


def deeper(model: ModelConfig, width: int, offset: float, key: Array) -> Deep:
    """A deep gate that forgets nothing yet, as `start` makes one; `out` and `offset` are the same in all layers.

    >>> from jkv import models
    >>> deeper(models.read_config(models.TINY), 8, 5.0, jax.random.key(0)).middle.shape
    (2, 8, 8)
    """
    first, second = jax.random.split(key)
    begun = start(model, width, offset, first)
    return Deep(
        into=begun.into,
        bias=begun.bias,
        middle=0.02 * jax.random.normal(second, (model.layers, width, width)),
        shift=begun.bias,
        out=jnp.broadcast_to(begun.out[:1], begun.out.shape),
        offset=begun.offset,
    )


@value
class Estimate:
    """out silu(into x) of a block's normed input, for each kv head: a logit, of either sign.

    into f[L,W,E], out f[L,H,W]; in a layer's own score without L. The heads of Locret (2410.01805) read a token's
    un-rotated [q; k; v], which are products of x: the same functions, but where a model norms q and k.
    """

    into: Array
    out: Array

    axes: ClassVar = dict(into="LWE", out="LHW")

    def __call__(self, x: Array) -> Array:
        """f32[B,H,T] of x f[B,T,E]."""
        return linear(self.out, jax.nn.silu(linear(self.into, x.astype(jnp.float32)))).transpose(0, 2, 1)


def guess(model: ModelConfig, width: int, key: Array) -> Estimate:
    """Heads that know nothing yet: weights of deviation 1 / sqrt(inputs), as those of a linear layer are begun.

    >>> from jkv import models
    >>> guess(models.read_config(models.TINY), 8, jax.random.key(0)).into.shape
    (2, 8, 32)
    """
    first, second = jax.random.split(key)
    layers, heads, e = model.layers, model.heads, model.width
    return Estimate(
        into=jax.random.normal(first, (layers, width, e)) / e**0.5,
        out=jax.random.normal(second, (layers, heads, width)) / width**0.5,
    )


@part
class Trained(trained_weights.Bearer, Score):
    """What a token is worth, as weights that were trained say when it is made: a column, kept with it.

    gate: the weights, or None: those that come with jkv for the model; models: fingerprints of the model that they
    were trained for, in each dtype.
    """

    gate: Any = leaf(default=None)
    models: tuple[str, ...] = ()

    column: ClassVar[str] = ""

    def birth(self, new: Born) -> Columns:
        return {self.column: self.weights(new.x)}


@part
class Retention(Trained):
    """What a token was worth at birth, fading with its age: rank = (seen + 1 - pos) log beta, in float32.

    Tokens whose beta rounds to 1 rank by age, the oldest last. Source: TRIM-KV (2512.03324).
    """

    methods, column, kinds = ("trimkv",), "log_beta", (Gate,)

    def rank(self, ev: Evidence) -> Array:
        age = (ev.seen[:, None, None] + 1 - ev.pos).astype(jnp.float32)
        return age * ev.columns[self.column]


@part
class Outlook(Retention):
    """What a token will be worth over the next n = `ahead` queries: rank = log of the sum of beta^(a+m), m = 0 .. n-1.

    a log beta + log(1 - beta^n) - log(1 - beta) at age a = seen + 1 - pos; n = 1 is `Retention`. Source: Make Each
    Token Count (2605.09649).
    """

    ahead: int = 1

    methods, kinds = ("makeeach", "trimkv"), (Deep, Gate)

    def rank(self, ev: Evidence) -> Array:
        log_beta = ev.columns[self.column]
        later = jnp.log(jnp.expm1(self.ahead * log_beta) / jnp.expm1(log_beta))
        return super().rank(ev) + later


@part
class Foreseen(Trained):
    """The largest logit that an answer is expected to give a token; it does not fade. Source: Locret (2410.01805)."""

    methods, column, kinds = ("locret",), "foreseen", (Estimate,)

    def rank(self, ev: Evidence) -> Array:
        return ev.columns[self.column]
