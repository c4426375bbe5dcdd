"""AttentionPredictor: page selection by predicted attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import leaf, part, value
from jkv.attention.evidence import QUERIES
from jkv.io import trained_weights
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked
from jkv.protocols import Entered, Look, Needs

if TYPE_CHECKING:
    from jkv.models import Params

METHOD = "attentionpredictor"
LEAST_ROWS = 8  # the two ends of a history must not overlap the rows that slide between them


class Predictor(Protocol):
    """Predict row N of a history x f32[...,n,N], rows last, from rows 0 to N-1; use bool[...,n]: units in use.

    `inner` f32[...,n,K] is the state that is carried from step to step.
    """

    def start(self, x: Array, use: Array) -> Array:
        """Inner state of a history."""
        ...

    def slide(self, inner: Array, old: Array, new: Array, use: Array) -> Array:
        """Inner state of `new`, which is `old` without its first row and with one row more."""
        ...

    def __call__(self, x: Array, inner: Array, use: Array) -> Array:
        """f32[...,n]: the predicted row, 0 for units not in use."""
        ...


@value
class Convolution:
    """AttentionPredictor: y = last . mean over rows of relu(second * relu(first * x)) + rest, * a 3x3 convolution.

    first f[16,1,3,3], second f[32,16,3,3] over (rows, units), zero-padded, last f[32]; 4,833 parameters with their
    biases. The inner state is the sum of the second convolution's rows that see no end of the history: a step changes
    two of these, and four more are at the ends. Source: AttentionPredictor (2502.04077).
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
        """f32[...,n,32]: sum of the second convolution's rows, each side padded or not."""
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
    """y = w0 newest row + w1 the row before + w2 mean of all rows, the baseline of the network. weights f[3]."""

    weights: Array

    def start(self, x: Array, use: Array) -> Array:
        return x.sum(-1, keepdims=True)

    def slide(self, inner: Array, old: Array, new: Array, use: Array) -> Array:
        return inner - old[..., :1] + new[..., -1:]

    def __call__(self, x: Array, inner: Array, use: Array) -> Array:
        seen = jnp.stack([x[..., -1], x[..., -2], inner[..., 0] / x.shape[-1]], -1)
        return jnp.where(use, jnp.einsum("...k,k->...", seen, self.weights), 0)


def forecast(net: Predictor, x: Array, use: Array) -> Array:
    """f32[...,n]: the predicted row after a history f32[...,n,N], without a carried state."""
    return net(x, net.start(x, use), use)


@value
class Watched:
    """Summary of a unit.

    Attributes:
        history: f32[N], attention per row, oldest first.
        inner: f32[K], inner state of the predictor.
        ahead: Predicted next row.
    """

    history: Array
    inner: Array
    ahead: Array


@part
class Forecast(Ranked):
    """AttentionPredictor: read the `pages` units of the highest predicted attention.

    A unit's history is the highest attention, over G and its tokens, of each of the last `rows` queries; a step's
    forecast is made at the end of the step before. A decode step's row covers the units that were read only; every
    flush makes all rows complete. Units are neighbours in time, not in slots. With fewer than three units to choose
    from, all forecasts are equal.

    Source: 2502.04077; history and choice per kv head, histories padded with zeros, and the training are a
    reconstruction.

    Attributes:
        sinks: First tokens, which are always read.
        rows: Queries of a history.
        kind: Predictor to load from a folder, "conv" or "linear".
        net: Weights, or None: shipped with jkv for the model.
        models: Fingerprints of the models that the weights were trained for.
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
    """Read the predictor and the model fingerprints of a folder.

    Raises:
        FormatError: `jkv train attentionpredictor` did not write the folder.
    """
    arrays, card = trained_weights.read(folder, METHOD)
    if not trained_weights.fit(arrays, {**Convolution.axes, "linear": (3,)}):
        raise trained_weights.unlike(folder, arrays, METHOD)
    made = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    line = made.pop("linear")
    return (Linear(weights=line) if kind == "linear" else Convolution(**made)), tuple(card["model"])


@method(
    "2502.04077",
    "approximation: reads the pages of highest forecast; rows between flushes know what was read",
    "13x compression, and 5.6x the speed when the cache is offloaded",
)
def attentionpredictor(
    *,
    pages: Positive = 64,
    page: Positive = 16,
    sinks: int = 64,
    rows: int = 64,
    dense_layers: int = 2,
    kind: str = "conv",
    predictor: str | None = None,
) -> Axes:
    """AttentionPredictor: pages by a trained forecast of their attention; `predictor` is a folder of `jkv train`.

    It keeps every token and an index: it saves reads, not memory.
    """
    if kind not in ("conv", "linear"):
        raise ValueError(f"attentionpredictor: kind={kind!r}: 'conv', or 'linear' for the baseline of three numbers")
    if not LEAST_ROWS <= rows <= QUERIES:
        raise ValueError(f"attentionpredictor: rows={rows}: steps of a history, from {LEAST_ROWS} to {QUERIES}")
    if min(pages, page) < 1 or sinks < 0:
        raise ValueError(f"attentionpredictor: pages={pages}, page={page}, sinks={sinks}: 1 or more, sinks 0 or more")
    net, models = (None, ()) if predictor is None else trained(predictor, kind)
    select = Forecast(
        unit=page, pages=pages, sinks=sinks, rows=rows, kind=kind, net=net, models=models, first=dense_layers
    )
    return dict(select=select, recent=64)
