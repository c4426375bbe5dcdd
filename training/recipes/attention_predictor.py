"""Recipe of AttentionPredictor: forecast each page's attention from its history, learned from a full model.

Only the texts go through the model, once. From every kv head of every layer that selects, some moments are drawn: the
last `rows` queries, as a selector that reads everything would see them, and the next query, whose attention is the
target. One network for all layers and heads starts as its three-parameter linear baseline, and learns the pages' shares
of the attention:

    loss = KL(y / sum y || f / sum f), f = max(forecast, 0) + 1e-5

A squared error would be dominated by the few heads that look far away at few tokens; this loss counts every head
equally, as page selection does. Source: AttentionPredictor (2502.04077), whose training is not public: a
reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.methods.selection.attention_predictor import Convolution, Forecast, Linear, Predictor, forecast
from jkv.methods.selection.quest import PageBound
from jkv.models import Params, family
from jkv.training.checkpoints import Folder
from jkv.training.distillation.layerwise import through
from jkv.training.losses import Batch
from jkv.training.optimizer import TrainState, adamw, cosine, create, finite

RECENT = 64  # newest tokens, which a step always reads
BASELINE = "linear"
LEAST = 1e-5  # added to a forecast, so that it is not 0


@part
class Recipe:
    """Recipe of the forecast.

    Attributes:
        steps: Training steps.
        batch: Moments per step.
        rate: Peak learning rate.
        moments: Moments drawn per text, layer and kv head.
        dense_layers: First layers, which do not select.
        every: Steps between checkpoints.
        seed: Random seed.
    """

    steps: int = 1000
    batch: int = 32
    rate: float = 5e-4
    moments: int = 3
    dense_layers: int = 2
    every: int = 100
    seed: int = 0


@value
class Moments:
    """N training examples with n pages each.

    Attributes:
        x: f[N,n,rows], history of each page, oldest first.
        y: f[N,n], the largest attention of the next query to a token of the page.
        mass: f[N,n], the attention of the next query to all tokens of the page.
        use: bool[N,n], pages to choose from.
    """

    x: Array
    y: Array
    mass: Array
    use: Array


def start(line: Linear, rows: int, key: Array) -> Convolution:
    """Initialize a network that computes the baseline's forecast and has free channels to improve on it.

    Channel 0 passes the history on. Channel 1 is 1 on every row and 0 below the last, where the padding is. Attention
    is at most 1, so subtracting the row below leaves only the newest row in channel 1 of the second convolution, and
    only the one before it in channel 2. Other channels are random, scaled to preserve a signal through relu, with
    output weight 0.

    Args:
        line: The linear baseline.
        rows: Length of the history.
        key: Key for the random channels.
    """
    one, two = jax.random.split(key)
    first = jax.random.normal(one, (16, 1, 3, 3)) * (2 / 9) ** 0.5
    second = jax.random.normal(two, (32, 16, 3, 3)) * (2 / 144) ** 0.5
    newest, before, mean = line.weights
    return Convolution(
        first=first.at[:2].set(0).at[0, 0, 1, 1].set(1),
        first_bias=jnp.zeros(16).at[1].set(1),
        second=second.at[:, 1].set(0).at[:3].set(0)
        .at[:2, 0, 1, 1].set(1).at[2, 0, 0, 1].set(1).at[1:3, 1, 2, 1].set(-1),
        second_bias=jnp.zeros(32),
        last=jnp.zeros(32).at[:3].set(jnp.stack([mean, rows * newest, rows * before])),
        rest=jnp.zeros(()),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("select", "scale", "window"))
def moments(q: Array, k: Array, at: Array, select: Forecast, scale: float, window: int | None) -> Moments:
    """Compute the moments of one layer's kv heads at positions i32[m] of one text: m * H moments.

    Args:
        q: f[H,G,T,D], rotated queries.
        k: f[H,T,D], rotated keys.
        at: i32[m], positions of the next queries.
        select: The selector.
        scale: Attention scale.
        window: Sliding window of the layer, or None.
    """
    h, g, t, _ = q.shape
    n = t // select.unit

    def one(at: Array) -> Moments:
        asking = at - select.rows + jnp.arange(select.rows + 1)
        asked = jnp.take(q, jnp.maximum(asking, 0), axis=2)
        logits = jnp.einsum("hgqd,htd->hgqt", asked, k, preferred_element_type=jnp.float32) * scale
        age = asking[:, None] - jnp.arange(t)[None]
        see = (age >= 0) & (asking >= 0)[:, None]
        see = see if window is None else see & (age < window)
        p = jax.nn.softmax(jnp.where(see[None, None], logits, -1e30), -1)
        p = jnp.where(see[None, None], p, 0)[..., : n * select.unit].reshape(h, g, select.rows + 1, n, select.unit)
        # Per page the largest attention over G and its tokens.
        most = p.max((1, 4))
        ends = jnp.arange(1, n + 1) * select.unit
        use = (ends <= at - RECENT) & (ends > select.sinks)
        return Moments(
            x=most[:, :-1].swapaxes(1, 2),
            y=most[:, -1],
            mass=p[:, :, -1].mean(1).sum(-1),
            use=jnp.broadcast_to(use[None], (h, n)),
        )

    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(one)(at))


@partial(jax.jit, static_argnames=("select", "scale", "window"))
def others(q: Array, k: Array, at: Array, select: Forecast, scale: float, window: int | None) -> dict[str, Array]:
    """Rank the pages f[N,n] of the same moments by what other methods know.

    "h2o": attention of all earlier queries to the page's tokens, averaged over G and summed (2306.14048). "quest": the
    bound on the next query's logits, the largest over G (2406.10774).
    """
    h, _, t, d = q.shape
    n = t // select.unit
    pos = jnp.arange(t)

    def sums(q: Array, k: Array) -> Array:
        def paid(one: tuple[Array, Array]) -> Array:
            asked, i = one
            logits = jnp.einsum("gd,td->gt", asked, k, preferred_element_type=jnp.float32) * scale
            see = (pos <= i) if window is None else (pos <= i) & (i - pos < window)
            p = jax.nn.softmax(jnp.where(see, logits, -1e30), -1).mean(0)
            return p[: n * select.unit].reshape(n, select.unit).sum(-1)

        each = jax.lax.map(paid, (q.swapaxes(0, 1), pos), batch_size=128)
        return (pos[None] < at[:, None]).astype(jnp.float32) @ each

    pages = k[:, : n * select.unit].astype(jnp.float32).reshape(h, n, select.unit, d)
    limits = pages.min(2)[None], pages.max(2)[None]
    bound = jax.vmap(lambda i: PageBound().bounds(jnp.take(q, i, axis=2)[None].astype(jnp.float32), limits)[0].max(1))(
        at
    )
    ranks = {"h2o": jax.lax.map(lambda head: sums(*head), (q, k)).swapaxes(0, 1), "quest": bound}
    return {name: x.reshape(-1, n) for name, x in ranks.items()}


def earliest(select: Forecast) -> int:
    """Return the first position with three pages to choose from."""
    return select.sinks + 3 * select.unit + RECENT


def check(params: Params, texts: Batch, select: Forecast, recipe: Recipe) -> None:
    """Raise ValueError if no layer selects, or a text is too short to select from."""
    first, size, layers = earliest(select), int((texts.pos >= 0).sum(1).min()), params.config.layers
    if size <= first:
        raise ValueError(f"a text of {size} tokens leaves no page to choose: give a length above {first}")
    if recipe.dense_layers >= layers:
        raise ValueError(f"dense_layers={recipe.dense_layers}: fewer than the model's {layers} layers, or none selects")


def collect(
    params: Params, texts: Batch, select: Forecast, recipe: Recipe, read: Callable[..., Any] = moments
) -> Iterator[Any]:
    """Yield read(...) of random moments of every text and layer, on the host; the moments depend on the seed only."""
    c, rng = params.config, np.random.default_rng(recipe.seed)
    kinds = list(zip(c.ropes, c.windows, strict=True))
    for row in range(texts.ids.shape[0]):
        ids, pos = texts.ids[row : row + 1], texts.pos[row : row + 1]
        size = int((pos >= 0).sum())
        x = family(c).embed(params, jnp.maximum(ids, 0))
        for i in range(c.layers):
            kind = kinds.index(kinds[i])
            x, seen = through(replace(params, layers=(params.layers[i],)), x, pos, kind)
            if i >= recipe.dense_layers:
                at = jnp.asarray(rng.integers(earliest(select), size, recipe.moments), jnp.int32)
                yield jax.device_get(read(seen.q[0], seen.k[0], at, select, c.scale, c.windows[i]))


def error(net: Predictor, some: Moments) -> Array:
    """Compute the loss, averaged over moments."""
    ahead = jnp.where(some.use, jnp.maximum(forecast(net, some.x, some.use), 0) + LEAST, 0)
    told, said = (x / jnp.maximum(x.sum(1, keepdims=True), 1e-30) for x in (jnp.where(some.use, some.y, 0), ahead))
    some_of = told > 0
    gap = jnp.log(jnp.where(some_of, told, 1)) - jnp.log(jnp.where(some_of, said, 1))
    return (told * gap).sum(1).mean()


def least_squares(every: Moments) -> Linear:
    """Fit the baseline's three weights by least squares, with each moment scaled to unit norm."""
    y = np.where(every.use, every.y, 0).astype(np.float64)
    size = np.sqrt(np.square(y).sum(1, keepdims=True) + 1e-6)
    seen = np.stack([every.x[..., -1], every.x[..., -2], every.x.mean(-1)], -1) / size[..., None]
    use = np.asarray(every.use)
    found = np.linalg.lstsq(seen[use], (y / size)[use], rcond=None)[0]
    return Linear(weights=jnp.asarray(found, jnp.float32))


@partial(jax.jit, static_argnames=("pages",))
def recovered(rank: Array, some: Moments, pages: int) -> Array:
    """Compute the share of the next query's attention to selectable pages in the `pages` highest by rank f[N,n]."""
    best = jax.lax.top_k(jnp.where(some.use, rank, -jnp.inf), min(pages, rank.shape[1]))[1]
    mass = jnp.where(some.use, some.mass, 0)
    return (jnp.take_along_axis(mass, best, 1).sum(1) / mass.sum(1)).mean()


@jax.jit
def train_step(state: TrainState, some: Moments) -> tuple[TrainState, Array]:
    """Take one step, and return the state and the loss before the step."""
    loss, grads = jax.value_and_grad(error)(state.score, some)
    return state.apply_gradients(grads={"score": grads}), loss


@dataclass
class Training:
    """A training run that resumes from its folder.

    Attributes:
        every: All moments.
        line: The linear baseline.
        recipe: The recipe.
        folder: Folder of checkpoints and metrics.
        say: Progress callback.
    """

    every: Moments
    line: Linear
    recipe: Recipe
    folder: Folder
    say: Callable[[str], None] = lambda _: None

    def run(self) -> Convolution:
        """Train and return the network.

        Raises ValueError if the loss or a weight is not finite; the last good state is then checkpointed.
        """
        recipe = self.recipe
        net = start(self.line, self.every.x.shape[2], jax.random.key(recipe.seed))
        state = create(net, adamw(cosine(recipe.rate, recipe.steps // 20 + 1, recipe.steps)))
        if (found := self.folder.last(state)) is not None:
            state = jax.tree.map(jnp.asarray, found)
            for _ in range(state.number):
                self.say("done before")
        total = self.every.x.shape[0]
        with self.folder.keeping(lambda: (state.number, state)):
            for step in range(state.number, recipe.steps):
                which = np.random.default_rng((recipe.seed, step)).integers(0, total, recipe.batch)
                made, loss = train_step(state, jax.tree.map(lambda x, i=which: x[i], self.every))
                if not finite((loss, made.score)):
                    raise ValueError(
                        f"the error, or a weight, is not finite at step {step + 1}; the state after {step} steps is "
                        f"kept in {self.folder.path}: train into another --out with a lower --rate"
                    )
                state = made
                self.folder.add({"number": step + 1, "error": float(loss)})
                self.say(f"step {step + 1}: error {float(loss):.3g}")
                if (step + 1) % recipe.every == 0:
                    self.folder.save(step + 1, state)
        return state.score
