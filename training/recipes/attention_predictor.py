"""Training a forecast of attention, from the attention of a full model to each page, step after step.

Nothing goes through the model but its texts, once. From every layer that selects, and from every kv head, some moments
are drawn: the `rows` queries up to then, as the selector would have seen them had it read everything, and the query
after them, which is to be forecast. One network for all layers and heads begins as its baseline of three numbers, and
learns which shares of their sum the pages to choose from will have:

    loss = KL(y / sum y || f / sum f), f = max(forecast, 0) + 1e-5

A squared error is that of the few heads that look far and at little; this one counts every head alike, as a choice of
pages does. Source: AttentionPredictor (2502.04077), whose training is not public: a reconstruction.
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
from jkv.training.optimizer import adamw, advance, cosine, sound

RECENT = 64  # the newest tokens, which a step reads in any case
BASELINE = "linear"
LEAST = 1e-5  # a forecast that is not 0


@part
class Recipe:
    """steps: of `batch` moments each; rate: the largest learning rate; moments: drawn of each text, layer and kv head;
    dense_layers: that do not select; every: steps between checkpoints."""

    steps: int = 1000
    batch: int = 32
    rate: float = 5e-4
    moments: int = 3
    dense_layers: int = 2
    every: int = 100
    seed: int = 0


@value
class Moments:
    """N moments: x f[N,n,rows] the history of each page, oldest first; y, mass f[N,n] of the query after it, the most
    that a token of the page gets and what all of them get; use bool[N,n]: pages to choose from."""

    x: Array
    y: Array
    mass: Array
    use: Array


def start(line: Linear, rows: int, key: Array) -> Convolution:
    """A network that forecasts what its baseline does, and has channels left to do better.

    Channel 0 carries a history on. Channel 1 is 1 on every row, and 0 below the last, where the padding is: as no
    attention is above 1, taking away what is below leaves the newest row in channel 1 of the second convolution, the
    one before it in channel 2, and nothing else. The other channels are random, as large as keep a signal's size
    through relu, and nothing is made of them yet.
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
    """What a layer's kv heads see before, and pay at, positions i32[m] of one text: q f[H,G,T,D], k f[H,T,D] rotated.

    m moments of H heads are m * H moments.
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
    """Other ranks f[N,n] of the pages at the same moments, by all that a method can know.

    "h2o": the sum, a mean over G, of what every query before paid to a page's tokens (2306.14048); "quest": the bound
    on the logits of the query that is to come, the largest over G (2406.10774).
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
    """The first position with three pages to choose from."""
    return select.sinks + 3 * select.unit + RECENT


def check(params: Params, texts: Batch, select: Forecast, recipe: Recipe) -> None:
    """ValueError if no layer selects, or a text is too short to choose from."""
    first, size, layers = earliest(select), int((texts.pos >= 0).sum(1).min()), params.config.layers
    if size <= first:
        raise ValueError(f"a text of {size} tokens leaves no page to choose: give a length above {first}")
    if recipe.dense_layers >= layers:
        raise ValueError(f"dense_layers={recipe.dense_layers}: fewer than the model's {layers} layers, or none selects")


def collect(
    params: Params, texts: Batch, select: Forecast, recipe: Recipe, read: Callable[..., Any] = moments
) -> Iterator[Any]:
    """What `read` says of the moments of every text and layer, on the host; the same ones for the same seed."""
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
    """The loss, a mean over moments."""
    ahead = jnp.where(some.use, jnp.maximum(forecast(net, some.x, some.use), 0) + LEAST, 0)
    told, said = (x / jnp.maximum(x.sum(1, keepdims=True), 1e-30) for x in (jnp.where(some.use, some.y, 0), ahead))
    some_of = told > 0
    gap = jnp.log(jnp.where(some_of, told, 1)) - jnp.log(jnp.where(some_of, said, 1))
    return (told * gap).sum(1).mean()


def least_squares(every: Moments) -> Linear:
    """The baseline's three numbers: the least squares of what pages get, as parts of the root of a moment's squares."""
    y = np.where(every.use, every.y, 0).astype(np.float64)
    size = np.sqrt(np.square(y).sum(1, keepdims=True) + 1e-6)
    seen = np.stack([every.x[..., -1], every.x[..., -2], every.x.mean(-1)], -1) / size[..., None]
    use = np.asarray(every.use)
    found = np.linalg.lstsq(seen[use], (y / size)[use], rcond=None)[0]
    return Linear(weights=jnp.asarray(found, jnp.float32))


@partial(jax.jit, static_argnames=("pages",))
def recovered(rank: Array, some: Moments, pages: int) -> Array:
    """Of the next query's attention to pages to choose from, the share of the `pages` highest by rank f[N,n]."""
    best = jax.lax.top_k(jnp.where(some.use, rank, -jnp.inf), min(pages, rank.shape[1]))[1]
    mass = jnp.where(some.use, some.mass, 0)
    return (jnp.take_along_axis(mass, best, 1).sum(1) / mass.sum(1)).mean()


@value
class State:
    """The network, the optimiser's moments, and steps done i32[]."""

    net: Convolution
    moments: Any
    steps: Array


@partial(jax.jit, static_argnames=("recipe",))
def update(state: State, some: Moments, recipe: Recipe) -> tuple[State, Array]:
    """The state after a step, and the error before it."""
    loss, slope = jax.value_and_grad(error)(state.net, some)
    net, moments = advance(_tune(recipe), slope, state.moments, state.net)
    return State(net=net, moments=moments, steps=state.steps + 1), loss


def _tune(recipe: Recipe) -> Any:
    return adamw(cosine(recipe.rate, recipe.steps // 20 + 1, recipe.steps))


@dataclass
class Training:
    """Moments, a recipe and a folder: `run` trains, and goes on where it was."""

    every: Moments
    line: Linear
    recipe: Recipe
    folder: Folder
    say: Callable[[str], None] = lambda _: None

    def run(self) -> Convolution:
        """The network at the end. ValueError if its error is not finite; the last good state is then a checkpoint."""
        recipe = self.recipe
        net = start(self.line, self.every.x.shape[2], jax.random.key(recipe.seed))
        state = State(net=net, moments=_tune(recipe).init(net), steps=jnp.int32(0))
        if (found := self.folder.last(state)) is not None:
            state = jax.tree.map(jnp.asarray, found)
            for _ in range(int(state.steps)):
                self.say("done before")
        total = self.every.x.shape[0]
        with self.folder.keeping(lambda: (int(state.steps), state)):
            for step in range(int(state.steps), recipe.steps):
                which = np.random.default_rng((recipe.seed, step)).integers(0, total, recipe.batch)
                made, loss = update(state, jax.tree.map(lambda x, i=which: x[i], self.every), recipe)
                if not (np.isfinite(loss) and sound(made.net)):
                    raise ValueError(
                        f"the error, or a weight, is not finite at step {step + 1}; the state after {step} steps is "
                        f"kept in {self.folder.path}: train into another --out with a lower --rate"
                    )
                state = made
                self.folder.add({"number": step + 1, "error": float(loss)})
                self.say(f"step {step + 1}: error {float(loss):.3g}")
                if (step + 1) % recipe.every == 0:
                    self.folder.save(step + 1, state)
        return state.net
