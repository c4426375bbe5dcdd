"""Calibration of the loss's sensitivity to keys and values: attention received, and gradients of the loss.

All texts go through the model layer by layer, and two of them backward. Means weigh each token by the attention that it
receives, because tokens that are read most should be kept best.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import value
from jkv.methods.quantization.calibrated import packed
from jkv.methods.quantization.kvquant import BINS, NonUniform, levels, spread
from jkv.methods.quantization.sensitivity import METHOD, SIDES, SMALL, WIDTHS
from jkv.models import Params, Projected, family
from jkv.training.calibrate.heads import Found, Say, layers, paid
from jkv.training.calibrate.moments import SOURCES
from jkv.training.data import corpora

SLICE = 128  # tokens whose logits exist at a time
TAILS = (0.5, 99.5)  # percentiles of a channel
BACK = 2  # texts with a backward pass
FIRST = 4  # first tokens of a text, left out of means: they are attention sinks


def sensitivity(params: Params, texts: int, length: int, seed: int, say: Say) -> Found:
    """Calibrate the arrays of `Sensitivity` on texts of prose and code.

    Raises ValueError if the model has layers without attention or caches latents, or for an invalid number or length of
    texts.
    """
    if params.config.layers != params.config.depth:
        raise ValueError(
            "calibrate sensitivity: some blocks of this model do not attend, and their states have no keys"
        )
    if params.config.latent:
        raise ValueError("calibrate sensitivity: keys and values of a latent differ in channels")
    batch = corpora.texts(params, SOURCES, length, texts, seed)
    return measured(params, batch.ids, batch.pos, say), {"sources": list(SOURCES)}


def measured(params: Params, ids: Array, pos: Array, say: Say) -> dict[str, np.ndarray]:
    """Compute the arrays of `Sensitivity` from texts i32[N,T] at pos i32[N,T].

    Raises ValueError if the model gives NaN or infinity.
    """
    xs = [family(params.config).embed(params, jnp.maximum(ids[i : i + 1], 0)) for i in range(len(ids))]
    found: list[dict[str, np.ndarray]] = []
    for _, one, kind in layers(params):
        each = []
        for i, x in enumerate(xs):
            xs[i], seen = through(one, x, pos[i : i + 1], kind)
            each.append(_live(seen, np.asarray(pos[i])))
        tokens, weights = (np.concatenate(x) for x in zip(*each, strict=True))
        if not (np.isfinite(tokens).all() and np.isfinite(weights).all()):
            raise ValueError(f"calibrate sensitivity: layer {len(found)} gives NaN or infinity; load it in float32")
        found.append(_of(tokens, weights))
        say(f"layer {len(found)}")
    made = {name: np.stack([x[name] for x in found]) for name in found[0]}
    return made | _tables(params, ids, pos, made, say)


def _live(seen: Attended, pos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `SIDES` f32[n,2,H,D] of a text's n tokens, and the attention f64[n] they receive from all heads."""
    live = pos >= 0
    sides = np.stack([np.asarray(getattr(seen, side)) for side in SIDES])[:, :, live]
    return np.moveaxis(sides, 2, 0), np.asarray(seen.paid, np.float64)[:, live].sum(0) * (pos[live] >= FIRST)


def _of(x: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Compute a layer's moments from tokens f32[n,2,H,D], weighted by f64[n]."""
    weights = weights / weights.sum() if weights.any() else np.full(len(x), 1 / len(x))
    mean = np.tensordot(weights, x, 1)
    deviation = np.sqrt(np.tensordot(weights, np.square(x - mean), 1))
    unit = np.moveaxis((x - mean) / np.where(deviation > 0, deviation, 1), 0, 2)  # [2,H,n,D]
    alike = packed((unit * weights[:, None]).swapaxes(-1, -2) @ unit)
    each = {"mean": mean, "deviation": deviation, SMALL: alike}
    made = {f"{side}_{name}": y[i] for name, y in each.items() for i, side in enumerate(SIDES)}
    low, high = np.percentile(x[:, SIDES.index("plain")], TAILS, axis=0)
    return {name: y.astype(np.float32) for name, y in (made | dict(plain_low=low, plain_high=high)).items()}


def _tables(params: Params, ids: Array, pos: Array, made: dict[str, np.ndarray], say: Say) -> dict[str, np.ndarray]:
    """Compute the quantization levels f32[L,2**bits] for each number of bits."""
    found, aside = [], NonUniform().aside(params.config.head_dim)
    for i in range(0, len(ids), -(-len(ids) // BACK)):
        ends = made["plain_low"], made["plain_high"]
        found.append(spreads(params, ids[i : i + 1], pos[i : i + 1], *ends, aside))
        say(f"gradients of text {i}")
    weights = np.sum(found, 0)
    return {
        f"{side}_table{bits}": np.stack([levels(x, bits) for x in weights[:, j]]).astype(np.float32)
        for j, side in enumerate(SIDES)
        for bits in WIDTHS
    }


def wide(name: str) -> bool:
    """Return whether an array is written in float32."""
    return not name.endswith(SMALL)


def spreads(params: Params, ids: Array, pos: Array, low: np.ndarray, high: np.ndarray, aside: int) -> np.ndarray:
    """Compute histograms f64[L,2,BINS] of squared loss gradients at un-rotated keys and at values.

    The loss is that of one text i32[1,T]. Each gradient falls in the bin of its number, relative to a range: of its
    channel for keys, and of its token for values.

    Args:
        low: f[L,H,D], lower ends of key channels.
        high: f[L,H,D], upper ends of key channels.
        aside: Numbers at either end of a token's D values that its range leaves out.
    """
    parts, live = [*layers(params)], np.asarray(pos)[0] >= 0
    # Forward, keeping each layer's input.
    xs = [family(params.config).embed(params, jnp.maximum(ids, 0))]
    for _, one, kind in parts:
        xs.append(through(one, xs[-1], pos, kind)[0])
    # Backward, layer by layer.
    back = _head(params, xs.pop(), ids, pos)
    found = np.zeros((len(parts), 2, BINS))
    for (i, one, kind), x in zip(reversed(parts), reversed(xs), strict=True):
        back, *sides = _back(one, x, pos, kind, back)
        k, v, by_k, by_v = (np.asarray(a, np.float64)[:, live] for a in sides)
        order = np.sort(v, -1)
        token = order[..., aside, None], order[..., v.shape[-1] - 1 - aside, None]
        for j, (a, by, ends) in enumerate(((k, by_k, (low[i][:, None], high[i][:, None])), (v, by_v, token))):
            half = np.maximum((ends[1] - ends[0]) / 2, 1e-30)
            found[i, j] = spread(((a - (ends[0] + ends[1]) / 2) / half).ravel(), np.square(by).ravel())
    return found


@value
class Attended:
    """A layer's keys and values of one text.

    Attributes:
        plain: f32[H,T,D], un-rotated keys.
        values: f32[H,T,D].
        paid: f32[H,T], the attention that each token receives, summed over all queries of a kv head.
    """

    plain: Array
    values: Array
    paid: Array


@partial(jax.jit, static_argnames=("kind",))
def through(one: Params, x: Array, pos: Array, kind: int, more: Array | None = None) -> tuple[Array, Attended]:
    """Run a layer on x f[1,T,E]; also return its keys, values and attention.

    Args:
        more: f[2,1,H,T,D], added to the un-rotated keys and the values, or None.
    """
    c = one.config

    def attend(i: int, a: Projected) -> tuple[Array, Attended]:
        plain, v = (y.astype(jnp.float32) for y in (a.k, a.v))
        plain, v = (plain, v) if more is None else (plain + more[0], v + more[1])
        q, k = (
            c.ropes[kind].rotate(a.q.astype(jnp.float32), pos[:, None, None]),
            c.ropes[kind].rotate(plain, pos[:, None]),
        )
        p = paid(one, q, k, pos, pos, kind)
        live = jnp.where(pos[:, None, None, :, None] >= 0, p, 0)
        seen = Attended(plain=plain[0], values=v[0], paid=live.sum((2, 3))[0])
        return jnp.einsum("bhgts,bhsd->bhgtd", p, v).astype(x.dtype), seen

    return family(c).layer(one, 0, x, pos, attend)


@partial(jax.jit, static_argnames=("kind",))
def _back(one: Params, x: Array, pos: Array, kind: int, back: Array) -> tuple[Array, ...]:
    """Backpropagate the gradient `back` through a layer.

    Returns:
        The gradient at its input, keys, values, and the gradients at both.
    """
    c = one.config
    none = jnp.zeros((2, 1, c.heads, x.shape[1], c.head_dim))
    _, pull, seen = jax.vjp(lambda x, more: through(one, x, pos, kind, more), x, none, has_aux=True)
    before, (by_k, by_v) = pull(back)
    return before, seen.plain, seen.values, by_k[0], by_v[0]


@jax.jit
def _loss(params: Params, x: Array, told: Array) -> Array:
    """Sum the negative log-likelihoods of tokens i32[1,n], -1 for none."""
    logits = jax.nn.log_softmax(family(params.config).head(params, x).astype(jnp.float32))
    return -jnp.where(told >= 0, jnp.take_along_axis(logits, jnp.maximum(told, 0)[..., None], -1)[..., 0], 0).sum()


def _head(params: Params, x: Array, ids: Array, pos: Array) -> Array:
    """Compute the gradient of the next-token loss at x f[1,T,E], slice by slice."""
    told = jnp.pad(jnp.where((pos >= 0)[:, 1:], ids[:, 1:], -1), ((0, 0), (0, 1)), constant_values=-1)
    cuts = range(SLICE, x.shape[1], SLICE)
    pairs = zip(jnp.split(x, [*cuts], 1), jnp.split(told, [*cuts], 1), strict=True)
    return jnp.concatenate([jax.grad(_loss, 1)(params.ends, a, b) for a, b in pairs], 1)


METHODS: dict[str, Callable[[Params, int, int, int, Say], Found]] = {METHOD: sensitivity}
