"""Budgets divided among layers, by fixed weights or by a statistic of the prompt, or among the heads of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part
from jkv.io import trained_weights
from jkv.methods.budgets.sizes import Size, between
from jkv.protocols import Budget, Counts, Demand, Layer, LayerSize, Sizes

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


def rounded(exact: Sequence[Fraction]) -> tuple[int, ...]:
    """Round to integers with the same integer sum, by largest remainder; ties go to the first.

    >>> rounded([Fraction(5, 3), Fraction(4, 3), Fraction(2)])
    (2, 1, 2)
    """
    out = [int(x) for x in exact]
    by_rest = sorted(range(len(out)), key=lambda i: exact[i] - out[i], reverse=True)
    for i in by_rest[: int(sum(exact)) - sum(out)]:
        out[i] += 1
    return tuple(out)


def handed_on(parts: Sequence[int], total: int, most: int) -> tuple[int, ...]:
    """Cap parts of `total` at `most` and spread the excess evenly, one more to the first parts.

    If every part has reached `most`, the excess is spread over all parts.

    >>> handed_on((8, 2, 2), 12, 6), handed_on((4, 4), 9, 2)
    ((6, 3, 3), (5, 4))
    """
    out, open_to = list(parts), list(range(len(parts)))
    while over := total - sum(min(x, most) for x in out):
        out = [min(x, most) for x in out]
        open_to = [i for i, x in enumerate(out) if x < most]
        if not open_to:
            open_to, most = list(range(len(out))), total
        for n, i in enumerate(open_to):
            out[i] += over // len(open_to) + (n < over % len(open_to))
    return tuple(out)


def proportional(total: int, weights: Sequence[float], most: int) -> tuple[int, ...]:
    """Divide `total` in proportion to weights, no part above `most`; `handed_on` spreads the excess.

    Source: CAKE (2503.12491), which clips once.

    >>> proportional(12, [4, 1, 1], 6), proportional(8, [3, 1], 5)
    ((6, 3, 3), (5, 3))
    """
    return handed_on([int(total * x / sum(weights)) for x in weights], total, most)


@part
class Division(Budget):
    """A size divided among the layers; the mean over layers is the size."""

    size: Size

    @property
    def bounded(self) -> bool:
        return self.size.bounded

    def of(self, change: Callable[[Size], Any]) -> Budget:
        return replace(self, size=change(self.size))

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        return self.size.sizes(model, demand)

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        return self.size.limit(layer, counts, share)


@part
class Above(Division):
    """A size in every layer from `layer` on (None: the upper half), and every token in the layers below."""

    layer: int | None

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        first = max(model.layers // 2, 1) if self.layer is None else self.layer
        whole = (LayerSize(tokens=demand.longest, whole=(1, 1)),) * first
        return Sizes(layers=(*whole, *super().sizes(model, demand).layers)[: model.layers])

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        whole, every = layer.size.whole
        return jnp.full_like(counts.seen, layer.size.tokens) if whole == every else super().limit(layer, counts, share)


@part
class Fixed(Division):
    """A size divided in the same way for all texts."""

    def shares(self, tokens: int, most: int, top: int, layers: int) -> tuple[int, ...]:
        """Tokens of each layer.

        Args:
            tokens: Mean over the layers.
            most: Tokens that a layer can hold.
            top: The mean for the longest row.
        """
        raise NotImplementedError

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        return self.size.divided_by(lambda *n: _shares(self, *n, model.layers), model, demand.longest)

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        mean = super().limit(layer, counts, share)
        return between(layer.size.points, mean) if layer.size.points else mean


@lru_cache(1024)
def _shares(budget: Fixed, tokens: int, most: int, top: int, layers: int) -> tuple[int, ...]:
    return budget.shares(tokens, most, top, layers)


def pyramid(mean: int, layers: int, beta: int, group: int = 1, most: int | None = None) -> tuple[int, ...]:
    """Tokens per layer, falling by equal steps, that sum to layers * mean exactly (largest remainder).

    low = group mean // beta, high = 2 mean - low; every `group` layers are one step. No layer gets more than `most`:
    otherwise high = most and low = 2 mean - most, so upper layers get what lower ones cannot fill.

    Sources: PyramidKV (2406.02069) and WindowKV (2503.17922), which round down each step and so overspend, and whose
    code divides evenly where a text is shorter than 2 mean; the shape is the same, the sum is not.

    >>> pyramid(120, 32, 20)[0], pyramid(120, 32, 20)[-1], sum(pyramid(120, 32, 20)) == 32 * 120
    (234, 6, True)
    >>> pyramid(40, 3, 20), pyramid(40, 3, 20, most=60), pyramid(40, 3, 20, most=30)
    ((78, 40, 2), (60, 40, 20), (40, 40, 40))
    """
    most = 2 * mean if most is None else max(most, mean)
    high = min(2 * mean - mean * group // beta, most)
    low, steps = 2 * mean - high, max(-(-layers // group) - 1, 1)
    exact = [high - Fraction((high - low) * (i // group), steps) for i in range(layers)]
    exact = [x * mean * layers / sum(exact) for x in exact]  # the last group may be smaller
    return handed_on(rounded(exact), mean * layers, most)


@part
class Pyramid(Fixed):
    """PyramidKV: a size on average, more in the lower layers.

    Upper layers get what a cache is too short to fill in the lower ones. See `pyramid`.

    Attributes:
        window: Tokens of the observation window, which every layer keeps beside the pyramid.
        beta: Steepness: the last step gets about group / beta of the mean.
        group: Neighbouring layers with the same share, up to one token.
    """

    window: int
    beta: int = 20
    group: int = 1

    def shares(self, tokens: int, most: int, top: int, layers: int) -> tuple[int, ...]:
        if tokens <= self.window:
            return (tokens,) * layers
        free = pyramid(tokens - self.window, layers, self.beta, self.group, most - self.window)
        return tuple(self.window + n for n in free)


def weighted(tokens: int, weights: Sequence[float], least: int, most: int, step: int = 1) -> tuple[int, ...]:
    """Tokens per layer that sum to tokens * layers: `least`, plus a share of the rest by weight; `most` at most.

    Shares are rounded to steps of `step` tokens. Missing or excess steps are taken one by one to or from the heaviest
    layers that allow it, and a remainder of less than a step goes to the heaviest. Source: CompressKV (2508.02401),
    whose step is one token.

    >>> weighted(64, [0.75, 0.25], least=32, most=192), weighted(64, [1.0, 0.0, 0.0], least=32, most=100)
    ((80, 48), (100, 46, 46))
    >>> weighted(64, [0.75, 0.25], least=32, most=192, step=12)
    (84, 44)
    """
    free, rest = divmod((tokens - least) * len(weights), step)
    top = (most - least) // step
    out = [min(round(w / sum(weights) * free), top) for w in weights]
    heavy = sorted(range(len(weights)), key=lambda i: -weights[i])
    while gap := free - sum(out):
        one = 1 if gap > 0 else -1
        able = [i for i in heavy if 0 <= out[i] + one <= top]
        if not able:
            break  # all layers are full
        for i in able[: abs(gap)]:
            out[i] += one
    sizes = [least + step * n for n in out]
    sizes[next((i for i in heavy if sizes[i] + rest <= most), heavy[0])] += rest
    return handed_on(sizes, tokens * len(weights), most)


@part
class Weighted(Fixed):
    """CompressKV: a size on average, more in layers of larger weight; at most 3 times the size. See `weighted`.

    Attributes:
        method: Method of the folder that holds the weights.
        window: Tokens of the observation window; `least` is above it.
        least: Tokens of every layer. None: 32, or half of the size if that is below 64.
        steps: Steps that the size is divided into; 0: a step is one token. Layers of equal size share their programs,
            so few steps save compile time.
        weights: Weight of each layer. None: shipped with jkv for the model; layers are equal until then.
    """

    method: str
    window: int = 0
    least: int | None = None
    steps: int = 0
    weights: tuple[float, ...] | None = None

    def from_folder(self, folder: str) -> Weighted:
        arrays, _ = trained_weights.read(folder, self.method)
        found = arrays.get("layers", np.zeros(0))
        if found.ndim != 1 or not (found >= 0).all() or not found.sum() > 0:
            raise trained_weights.unlike(folder, arrays, self.method)
        return replace(self, weights=tuple(found.astype(float).tolist()))

    def bound(self, params: Params) -> Weighted:
        return self if self.weights else self.from_folder(trained_weights.shipped(self.method, params, str))

    def shares(self, tokens: int, most: int, top: int, layers: int) -> tuple[int, ...]:
        least = min(32, max(top // 2, 1)) if self.least is None else self.least
        least, most = max(least, self.window + 1), min(3 * tokens, most)
        if not least < tokens < most:
            return (tokens,) * layers
        step = max(top // self.steps, 1) if self.steps else 1
        return weighted(tokens, self.weights or (1.0,) * layers, least, most, step)


@part
class Measured(Division):
    """A size divided by a statistic of each layer's prompt.

    Attributes:
        window: Tokens that every layer keeps.
        step: Slots are multiples of this, so that few prompts need programs of their own. None: a quarter of the size.
    """

    window: int
    step: int | None = None

    statistic = "layer"

    def sizes(self, model: ModelConfig, demand: Demand) -> Sizes:
        return super().sizes(model, demand) if demand.statistic is None else self.divided(demand, demand.statistic)

    def divided(self, demand: Demand, statistic: np.ndarray) -> Sizes:
        """Divide the budget by the layers' statistic f[L,B,...]. `Sizes.rows` i[L,B] holds the share of each row."""
        raise NotImplementedError

    def slots(self, tokens: int, longest: int) -> int:
        """Round tokens up to whole steps."""
        step = max(self.size.count(longest) // 4, 1) if self.step is None else self.step
        return -(-tokens // step) * step


@part
class Proportional(Measured):
    """CAKE: a size on average, divided among the layers in proportion to their statistic, row by row.

    A layer has slots for the largest share of any row, and for the growth after the prompt if the size is a fraction,
    which is the same in every layer. Source: CAKE (2503.12491).
    """

    def shares(self, statistic: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """i[L,B]: tokens of each layer beyond its window.

        Args:
            statistic: f[L,B].
            lengths: Tokens of each prompt.
        """
        rows, out = np.maximum(statistic, 1e-30).T.tolist(), []
        for row, n in zip(rows, lengths, strict=True):
            total = max(self.size.count(n) - self.window, 0) * len(row)
            out.append(proportional(total, row, max(n - self.window, 1)))
        return np.array(out).T

    def divided(self, demand: Demand, statistic: np.ndarray) -> Sizes:
        shares, longest = self.shares(statistic, demand.lengths), demand.longest
        later = np.array([self.size.count(longest) - self.size.count(n) for n in demand.lengths])
        most = (shares + later).max(1) + self.window
        return Sizes(layers=tuple(LayerSize(tokens=self.slots(int(n), longest)) for n in most), rows=shares)

    def limit(self, layer: Layer, counts: Counts, share: Array | None) -> Array:
        now, then = (self.size.limit(layer, replace(counts, seen=n), None) for n in (counts.seen, counts.prompt))
        return (0 if share is None else share) + self.window + now - then


@part
class Won(Proportional):
    """Make Each Token Count: all tokens of a prompt compete, and a layer gets the slots that its tokens win.

    The statistic is the rank of each token of each kv head, f[L,B,H,S], -inf for none. A layer's slots are divided by
    its heads; if the prompt has fewer tokens than there are slots, the rest is spread evenly. Source: Make Each Token
    Count (2605.09649).

    >>> from jkv.methods.budgets.sizes import Tokens
    >>> ranks = np.array([[-1.0, -2.0, -3.0], [-0.1, -0.2, -0.3]])[:, None, None]
    >>> Won(size=Tokens(tokens=2), window=0).shares(ranks, [3]).tolist()
    [[1], [3]]
    """

    statistic = "ranks"

    def shares(self, statistic: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        layers, rows, heads, _ = statistic.shape
        out = []
        for ranks, n in zip(statistic.swapaxes(0, 1).reshape(rows, layers, -1), lengths, strict=True):
            total = max(self.size.count(n) - self.window, 0) * layers * heads
            best = np.argsort(-ranks, axis=None, kind="stable")[: min(total, int((ranks > -np.inf).sum()))]
            won = np.bincount(best // ranks.shape[1], minlength=layers)
            spare = Fraction(total - len(best), layers)
            out.append(rounded([(int(x) + spare) / heads for x in won]))
        return np.array(out).T


@part
class Inside(Measured):
    """The same size in every layer, or every token; a layer's statistic sizes its first tier, row by row.

    With a size, the first tier of a layer gets round(a / max a (tokens - window)) tokens, a the layer's statistic and
    max a that of all layers; without, it gets a tokens. The first tier has slots for the row with the most, the next
    tier for what the row with the least leaves, in steps. Sources: ARKV; ZipVL (2410.08584).

    >>> from jkv.methods.budgets.sizes import Tokens
    >>> Inside(size=Tokens(tokens=410), window=10).shares(np.array([[1.0], [2.0], [4.0]]), [1000]).tolist()
    [[100], [200], [400]]
    """

    def shares(self, statistic: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """i[L,B]: tokens of each layer's first tier.

        Args:
            statistic: f[L,B].
            lengths: Tokens of each prompt.
        """
        old = np.maximum(np.array(lengths) - self.window, 0)
        if self.bounded:
            free = np.maximum([self.size.count(n) - self.window for n in lengths], 0)
            old = np.minimum(old, free)
            statistic = statistic / np.maximum(statistic.max(0), 1e-30) * free
        return np.minimum(np.round(statistic).astype(int), old)

    def divided(self, demand: Demand, statistic: np.ndarray) -> Sizes:
        shares, longest = self.shares(statistic, demand.lengths), demand.longest
        step, whole = self.slots(1, longest), self.size.capacity(longest)
        most, least = (x(1).tolist() for x in (shares.max, shares.min))
        first = [(max(self.slots(a, longest), step), b // step * step) for a, b in zip(most, least, strict=True)]
        return Sizes(layers=tuple(LayerSize(tokens=whole, first=x) for x in first), rows=shares)
