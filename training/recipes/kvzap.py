"""Recipe of KVzap: surrogates that predict the attention a token will receive. The model gets no gradient.

The model reads a text and repeats it as the answer to a request. With a the softmax of query j over everything it sees
and g the query heads of a kv head, the target of a token i of the text is

    s_i = max(max over g, j of a_gji in the repetition, own sum over g, j of a_gji in the text, j > i + window)

so that tokens count that are looked at once, to be copied, or often, to continue the text. The surrogate estimates
y = log s from the layer's normed input: with one layer by least squares in closed form, with two by AdamW. Sources:
KVzap (2601.07891), whose authors weight attention by what a value adds, which here predicts text less well; the text's
own queries are from Fast KVzip (2601.17668), which takes their maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.online_softmax import with_sinks
from jkv.arrays.pytree import part, value
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal, visible
from jkv.methods.eviction.author_gates import Repeated
from jkv.methods.prefill.probes import AGAIN, answering, within
from jkv.models import ModelConfig, Params, family
from jkv.nn.gates import Surrogate
from jkv.nn.network import Network
from jkv.training.calibrate.heads import layers
from jkv.training.distillation import suffix
from jkv.training.losses import Batch
from jkv.training.optimizer import TrainState, adamw, cosine, create

TILE = 128  # queries whose logits exist at a time
LEAST = 1e-20  # target of a token without attention
RIDGE = 1.0  # ridge of the closed form, added to the inputs' sums of squares, as in the paper


@part
class Recipe(suffix.Recipe):
    """Recipe of surrogates: layer-wise least squares, then `steps` of suffix distillation.

    Attributes:
        warm: Passes over the tokens of all texts per layer; 0 for none.
        early: Peak learning rate of these passes.
        tokens: Tokens per step of these passes.
        width: Hidden width of the surrogates; 0 for one layer in closed form.
        own: Weight of the attention from the text's own queries, those more than `window` tokens after a key.
    """

    warm: int = 15
    early: float = 2e-3
    tokens: int = 2048
    width: int = 72
    own: float = 1 / 12

    def warmed(self, params: Params, texts: Batch, score: Repeated, done: int) -> Iterator[tuple[Repeated, np.ndarray]]:
        gate, live = score.weights, np.asarray(texts.pos) >= 0
        if not self.warm or done == params.config.layers:
            return
        for i, x, y in lessons(params, texts, self, done):
            key = jax.random.fold_in(jax.random.key(self.seed), i)
            made = fit(gate.part(i), x[live], y[live], key, self) if self.width else solve(x[live], y[live])
            gate = jax.tree.map(lambda a, b: a.at[i].set(b), gate, made[0])  # noqa: B023
            yield replace(score, gate=gate), np.asarray(made[1])

    def worth(self, score: Repeated, held: suffix.Prefix, live: Array) -> Array:
        return jnp.stack([score.weights.part(i)(held.x[:, i]) for i in range(held.x.shape[1])])

    def explained(self, params: Params, texts: Batch, score: Repeated) -> dict[str, Any]:
        return explained(params, texts, score, self)


@value
class Read:
    """A text, a request to repeat it, and the repetition. The text's padding is before the request.

    Attributes:
        ids: i32[1,S], token ids, -1 for padding.
        pos: i32[1,S], positions, -1 for padding.
        repeated: bool[S], the repetition.
    """

    ids: Array
    pos: Array
    repeated: Array


def request(params: Params, length: int) -> list[int]:
    """Tokenize the request to repeat a text of `length` tokens; raises ValueError beyond the model's context."""
    ask = [*within(params, AGAIN), *within(params, answering(params))]
    if (size := 2 * length + len(ask)) > params.config.context:
        raise ValueError(
            f"length={length}: a text, the request to repeat it and the repetition are {size} tokens, and the model's "
            f"context is {params.config.context}; give --length {(params.config.context - len(ask)) // 2} or less"
        )
    return ask


def read(params: Params, texts: Batch) -> list[Read]:
    """Build text, request and repetition of each text, all of one length; raises ValueError beyond the context."""
    ids = np.asarray(texts.ids)
    t, made = ids.shape[1], []
    ask = request(params, t)
    size = 2 * t + len(ask)
    for row in ids:
        text = row[row >= 0].tolist()
        whole = np.full(size, -1, np.int32)
        whole[: len(text)] = text
        whole[t : t + len(ask) + len(text)] = [*ask, *text]
        pos = np.where(whole >= 0, np.cumsum(whole >= 0) - 1, -1)
        after = np.arange(size) >= t + len(ask)
        made.append(
            Read(
                ids=jnp.asarray(whole[None]),
                pos=jnp.asarray(pos[None].astype(np.int32)),
                repeated=jnp.asarray(after & (whole >= 0)),
            )
        )
    return made


@partial(jax.jit, static_argnames=("kind", "t", "window"))
def taught(
    params: Params, x: Array, one: Read, kind: int, t: int, window: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Run the only layer in `params` on x f[1,S,E]; also return inputs and attention of the text's T = t tokens.

    Returns:
        The layer's output, and of the text the normed input [T,E] and the two results of `looked`.
    """
    c, pos = params.config, one.pos

    def attend(_: int, a: Any) -> tuple[Array, Any]:
        rope = c.ropes[kind]
        q, k = rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None])
        found = with_sinks(attend_window(q, k, a.v, causal(pos, c.windows[kind]), pos, c.scale), a.sinks)
        looks = looked(q[0], k[0, :, :t], found.lse[0], one, c.scale, window, c.windows[kind])
        return found.finish(), (a.x[0, :t], *looks)

    return family(c).layer(params, 0, x, pos, attend)


def looked(
    q: Array, k: Array, lse: Array, one: Read, scale: Any, window: int, sliding: int | None
) -> tuple[Array, Array]:
    """Compute the attention that each key of the text receives, a tile of queries at a time.

    Args:
        q: f[H,G,S,D], rotated queries.
        k: f[H,T,D], rotated keys of the text.
        lse: f32[H,G,S], log-sum-exp of the queries.
        one: The text and its repetition.
        scale: Attention scale.
        window: Own queries count from this distance on (exclusive).
        sliding: Sliding window of the layer, or None.

    Returns:
        f32[H,T], the largest attention of a query in the repetition, and f32[H,T], the sum over the text's own queries.
    """
    t, size = k.shape[1], q.shape[2]
    n = -(-size // TILE)

    def padded(y: Array, axis: int, fill: Any) -> Array:
        widths = [(0, n * TILE - size if i == axis else 0) for i in range(y.ndim)]
        return jnp.pad(y, widths, constant_values=fill)

    q, lse, pos = padded(q, 2, 0), padded(lse, 2, 0), padded(one.pos[0], 0, -1)
    again, text = padded(one.repeated, 0, False), jnp.arange(n * TILE) < t

    def tile(found: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        asked, total, at, in_repetition, in_text = (
            jax.lax.dynamic_slice_in_dim(y, start, TILE, axis)
            for y, axis in ((q, 2), (lse, 2), (pos, 0), (again, 0), (text, 0))
        )
        see = visible(at[None], one.pos[:, None, :t], sliding)[0, 0] & (at >= 0)[:, None]
        logits = jnp.einsum("hgnd,htd->hgnt", asked, k, preferred_element_type=jnp.float32) * scale
        p = jnp.where(see[None, None], jnp.exp(jnp.where(see[None, None], logits - total[..., None], 0)), 0)
        late = in_text[:, None] & (at[:, None] - one.pos[:, :t] > window)
        once = jnp.where(in_repetition[None, None, :, None], p, 0).max((1, 2))
        often = jnp.where(late[None, None], p, 0).sum((1, 2))
        return (jnp.maximum(found[0], once), found[1] + often), None

    first = jnp.zeros((k.shape[0], t))
    return jax.lax.scan(tile, (first, first), jnp.arange(n) * TILE)[0]


def lessons(
    params: Params, texts: Batch, recipe: Recipe, done: int = 0
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the number of each layer from `done` on, the normed inputs f[N,T,E] of all texts, and y f32[N,T,H].

    All texts go through a layer before the next one, so that only one layer's data is in memory.
    """
    rows, t = read(params, texts), texts.ids.shape[1]
    xs = [family(params.config).embed(params, jnp.maximum(one.ids, 0)) for one in rows]
    for i, single, kind in layers(params):
        found = []
        for n, one in enumerate(rows):
            xs[n], (x, once, often) = taught(single, xs[n], one, kind, t, recipe.window)
            if i >= done:
                worth = np.maximum(once, recipe.own * np.asarray(often))
                found.append((np.asarray(x, np.float32), np.log(np.maximum(worth, LEAST)).T))
        if i >= done:
            yield i, np.stack([x for x, _ in found]), np.stack([y for _, y in found])


def start(model: ModelConfig, width: int, key: Array) -> Network:
    """Initialize surrogates; linear ones, of zeros, if the width is 0."""
    if not width:
        return jax.tree.map(jnp.zeros_like, Surrogate.start(model, 0, key, depth=0))
    return Surrogate.start(model, width, key)


def solve(x: np.ndarray, y: np.ndarray) -> tuple[Network, np.ndarray]:
    """Fit a one-layer surrogate by ridge regression of y f[N,H] on x f[N,E]; also return its mean squared error."""
    mean, level = x.mean(0, dtype=np.float64), y.mean(0, dtype=np.float64)
    a, b = (x - mean).astype(np.float64), y - level
    out = np.linalg.solve(a.T @ a + RIDGE * np.eye(x.shape[1]), a.T @ b)
    error = np.square(a @ out - b).mean()
    arrays = {"out.kernel": jnp.asarray(out, jnp.float32), "out.bias": jnp.asarray(level - mean @ out, jnp.float32)}
    return Network(arrays=arrays, kind=Surrogate), np.array([error])


def fit(gate: Network, x: np.ndarray, y: np.ndarray, key: Array, recipe: Recipe) -> tuple[Network, Array]:
    """Train a layer's two-layer surrogate by least squares of y f[N,H] from x f[N,E]; also return the losses.

    y is standardized by one mean and deviation over all heads of the layer, which the output weights then undo.
    """
    mean, deviation = float(y.mean(dtype=np.float64)), float(y.std(dtype=np.float64)) or 1.0
    gate, losses = _fitted(gate, jnp.asarray(x), jnp.asarray((y - mean) / deviation), key, recipe)
    gate = gate.update(lambda x: x * deviation, "out.kernel").update(lambda x: x * deviation + mean, "out.bias")
    return gate, losses * deviation**2


@partial(jax.jit, static_argnames=("recipe",))
def _fitted(gate: Network, x: Array, y: Array, key: Array, recipe: Recipe) -> tuple[Network, Array]:
    n = x.shape[0]
    size = min(recipe.tokens, n)
    steps = recipe.warm * max(n // size, 1)
    tx = adamw(cosine(recipe.early, steps // 20 + 1, steps), recipe.clip, 0.01)

    def loss(gate: Network, at: Array) -> Array:
        return jnp.square(gate(x[at][None])[0].T - y[at]).mean()

    def step(state: TrainState, key: Array) -> tuple[TrainState, Array]:
        value, grads = jax.value_and_grad(loss)(state.score, jax.random.randint(key, (size,), 0, n))
        return state.apply_gradients(grads={"score": grads}), value

    state, losses = jax.lax.scan(step, create(gate, tx), jax.random.split(key, steps))
    return state.score, losses


def explained(params: Params, texts: Batch, score: Repeated, recipe: Recipe) -> dict[str, Any]:
    """Compute how well a surrogate predicts y on texts.

    Returns:
        `r2` [L][H], the R2 of each kv head; `best`, the overlap of the predicted and true best quarter of a text's
        tokens over all layers and heads, which compete; `by_head` [L][H], that overlap per head.
    """
    gate, of_layers = score.weights, []
    for i, x, y in lessons(params, texts, recipe):
        of_layers.append((np.asarray(gate.part(i)(jnp.asarray(x))).swapaxes(1, 2), y))
    live = np.asarray(texts.pos) >= 0
    # R2 per head.
    said, y = (np.stack([layer[k] for layer in of_layers], 1) for k in (0, 1))  # [N,L,T,H]
    used = np.broadcast_to(live[:, None, :, None], y.shape)
    mean = np.where(used, y, 0).sum((0, 2), keepdims=True) / used.sum((0, 2), keepdims=True)
    off, spread = (np.where(used, np.square(a), 0).sum((0, 2)) for a in (said - y, y - mean))
    # Overlap of the best quarters.
    wanted, chosen = (np.stack([_quarter(a, u) for a, u in zip(z, used, strict=True)]) for z in (y, said))
    both, every = ((wanted & a).sum((0, 2)) for a in (chosen, wanted))
    return {
        "r2": (1 - off / np.maximum(spread, 1e-30)).round(3).tolist(),
        "best": round(float(both.sum() / every.sum()), 4),
        "by_head": (both / np.maximum(every, 1)).round(3).tolist(),
    }


def _quarter(x: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the best quarter of the used entries."""
    least = np.quantile(x[used], 0.75)
    return used & (x > least)
