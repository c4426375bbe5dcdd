"""Pages by what is expected of them: a forecast of the next step's attention from that of the last steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part, value
from jkv.io import trained_weights
from jkv.methods.selection.base import Ranked
from jkv.protocols import Entered, Look, Needs

if TYPE_CHECKING:
    from jkv.models import Params

METHOD = "attentionpredictor"
LEAST_ROWS = 8  # the two ends of a history and what slides between them must not overlap


class Predictor(Protocol):
    """A forecast of row N of a history x f32[...,n,N], rows last, from rows 0 to N-1; use bool[...,n]: units in it.

    `inner` is what can be carried from step to step: f32[...,n,K].
    """

    def start(self, x: Array, use: Array) -> Array:
        """The inner state of a history."""
        ...

    def slide(self, inner: Array, old: Array, new: Array, use: Array) -> Array:
        """The inner state of `new`, which is `old` without its first row and with one more."""
        ...

    def __call__(self, x: Array, inner: Array, use: Array) -> Array:
        """f32[...,n]; what is not in use is 0."""
        ...


@value
class Convolution:
    """y = last . mean over rows of relu(second * relu(first * x)) + rest; * are 3x3 convolutions, padded by zeros.

    first f[16,1,3,3], second f[32,16,3,3] over (rows, units), last f[32]; 4,833 parameters with their biases. The inner
    state is the sum of the rows of the second convolution that see no end of the history: a step changes two of them,
    and four more stand at the ends. Source: AttentionPredictor (2502.04077).
    """

    first: Array
    first_bias: Array
    second: Array
    second_bias: Array
    last: Array
    rest: Array

    axes: ClassVar = dict(
        first=(16, 1, 3, 3), first_bias=(16,), second=(32, 16, 3, 3), second_bias=(32,), last=(32,), rest=()
    )

    def start(self, x: Array, use: Array) -> Array:
        return self._features(x, use, 0, 0)

    def slide(self, inner: Array, old: Array, new: Array, use: Array) -> Array:
        return inner - self._features(old[..., :5], use, 0, 0) + self._features(new[..., -5:], use, 0, 0)

    def __call__(self, x: Array, inner: Array, use: Array) -> Array:
        ends = self._features(x[..., :4], use, 1, 0) + self._features(x[..., -4:], use, 0, 1)
        y = jnp.einsum("...k,k->...", inner + ends, self.last) / x.shape[-1]
        return jnp.where(use, y + self.rest.reshape((1,) * y.ndim), 0)

    def _features(self, x: Array, use: Array, above: int, below: int) -> Array:
        """f32[...,n,32]: the sum of the second convolution's rows, padded above and below or not at all."""
        lead, (n, rows) = x.shape[:-2], x.shape[-2:]
        x = jnp.where(use[..., None], x, 0).reshape(-1, n, rows, 1)
        inside = use.reshape(-1, n, 1, 1)
        for kernel, bias in ((self.first, self.first_bias), (self.second, self.second_bias)):
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), ((above, below), (1, 1)), dimension_numbers=("NWHC", "OIHW", "NWHC")
            )
            x = jnp.where(inside, jax.nn.relu(x + bias[None, None, None]), 0)
        return x.sum(2).reshape(*lead, n, -1)


@value
class Linear:
    """y = w0 newest row + w1 the one before + w2 mean of all rows: what a network must beat. weights f[3]."""

    weights: Array

    def start(self, x: Array, use: Array) -> Array:
        return x.sum(-1, keepdims=True)

    def slide(self, inner: Array, old: Array, new: Array, use: Array) -> Array:
        return inner - old[..., :1] + new[..., -1:]

    def __call__(self, x: Array, inner: Array, use: Array) -> Array:
        seen = jnp.stack([x[..., -1], x[..., -2], inner[..., 0] / x.shape[-1]], -1)
        return jnp.where(use, jnp.einsum("...k,k->...", seen, self.weights), 0)


def forecast(net: Predictor, x: Array, use: Array) -> Array:
    """f32[...,n]: the row after a history f32[...,n,N], from nothing but it."""
    return net(x, net.start(x, use), use)


@value
class Watched:
    """Of a unit: its history f32[N], oldest first; the predictor's inner state f32[K]; the forecast of the next row."""

    history: Array
    inner: Array
    ahead: Array


@part
class Forecast(Ranked):
    """AttentionPredictor: the `pages` units of the highest forecast are read, the first `sinks` tokens always.

    A unit's history is the most attention, over G and its tokens, of the last `rows` queries; the forecast for a step
    is made at the end of the step before. A step's row knows only the units that were read; every flush makes all rows
    whole. Units are neighbours in time, whatever slots they are in. With fewer than three units to choose from none is
    better than another. net: its weights, or None: those that come with jkv for the model, `kind` says which of a
    folder's; models: fingerprints of the model that they are for. Source: 2502.04077; that history and choice are of a
    kv head, that short histories begin with zeros, and the training are a reconstruction.
    """

    sinks: int = 64
    rows: int = 64
    kind: str = "conv"
    net: Predictor | None = leaf(default=None)
    models: tuple[str, ...] = ()

    stateful = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.rows)

    def bound(self, params: Params) -> Forecast:
        if self.net is None:
            net, models = trained_weights.shipped(METHOD, params, trained, self.kind)
            return replace(self, net=net, models=models)
        trained_weights.check(self.models, params)
        return self

    def _net(self) -> Predictor:
        if self.net is None:
            raise ValueError(
                f"{METHOD} has no predictor yet: give predictor='FOLDER', as `jkv train {METHOD}` writes it"
            )
        return self.net

    def summarize(self, new: Entered) -> Watched:
        units = new.k.shape[:3]
        history = jnp.zeros((*units, self.rows))
        inner = jax.eval_shape(self._net().start, history, jax.ShapeDtypeStruct(units, bool))
        return Watched(history=history, inner=jnp.zeros(inner.shape), ahead=jnp.zeros(units))

    def score(self, look: Look) -> Array:
        return look.summary.ahead[:, :, None]

    def observe(self, summary: Watched, rows: Array, pos: Array) -> Watched:
        net = self._net()
        order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos), axis=-1, stable=True)
        use = moved(pos, order) >= self.sinks
        old, new = (jnp.where(use[..., None], moved(x, order), 0) for x in (summary.history, rows))
        history = jnp.concatenate([old[..., new.shape[-1] :], new], -1)
        if new.shape[-1] == 1:
            inner = net.slide(jnp.where(use[..., None], moved(summary.inner, order), 0), old, history, use)
        else:
            inner = net.start(history, use)
        ahead = jnp.where(use.sum(-1, keepdims=True) < 3, 0, net(history, inner, use))
        made = Watched(history=history, inner=inner, ahead=jnp.where(use, ahead, 0))
        back = jnp.argsort(order, axis=-1)
        return jax.tree.map(lambda x: moved(x, back), made)


def moved(x: Array, order: Array) -> Array:
    """x [B,H,n,...] in the order i32[B,H,n]."""
    return take_along(x, order.reshape(*order.shape, *[1] * (x.ndim - 3)), 2)


def trained(folder: str, kind: str) -> tuple[Predictor, tuple[str, ...]]:
    """The predictor in a folder of `jkv train attentionpredictor`, and its models; FormatError if there is none."""
    arrays, card = trained_weights.read(folder, METHOD)
    if not trained_weights.fit(arrays, {**Convolution.axes, "linear": (3,)}):
        raise trained_weights.unlike(folder, arrays, METHOD)
    made = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    line = made.pop("linear")
    return (Linear(weights=line) if kind == "linear" else Convolution(**made)), tuple(card["model"])
