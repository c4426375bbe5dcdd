"""How many tokens a layer keeps: host integers for shapes, a limit per row for what is used of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.io import learned
from jkv.protocols import Budget
from jkv.scores import heads
from jkv.tree import leaf, part

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class All(Budget):
    """Every token."""

    bounded = False

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return longest


@part
class From(Budget):
    """A budget of the layers from `layer` on; those below it keep every token."""

    budget: Budget = leaf()
    layer: int

    def for_layer(self, model: ModelConfig, layer: int) -> Budget:
        return All() if layer < self.layer else self.budget.for_layer(model, layer)

    def fit(self, cost: Callable[[Budget], int], longest: int) -> Budget:
        return replace(self, budget=self.budget.fit(lambda budget: cost(replace(self, budget=budget)), longest))

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return self.for_layer(model, layer).capacity(model, layer, longest)


@part
class Tokens(Budget):
    """The same number of tokens in every layer and head, recent window included."""

    tokens: int

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return self.tokens


@part
class Bytes(Budget):
    """As many tokens as fit into so many bytes, everything counted; the same in every layer and head."""

    bytes: int

    def fit(self, cost: Callable[[Budget], int], longest: int) -> Budget:
        """`Tokens` of the largest number whose cache is no larger; ValueError if not even one fits."""
        low, high = 0, longest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(Tokens(tokens=middle)) <= self.bytes else (low, middle - 1)
        if low < 1:
            raise ValueError(
                f"bytes={self.bytes}: a cache of one token takes {cost(Tokens(tokens=1))} bytes here; "
                "give more bytes, fewer rows, or a smaller recent= and block="
            )
        return Tokens(tokens=low)

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return longest  # until `fit` has said how many


def read_bytes(text: str | int) -> int:
    """Bytes of "2GiB", "300 MB", "4096" or 4096; ValueError for anything else.

    >>> read_bytes("2GiB"), read_bytes("1.5 kB")
    (2147483648, 1500)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kKMGT]?)(i?)B?\s*", str(text))
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is None or number <= 0:
        raise ValueError(f"bytes={text!r}: give a number with a unit, such as bytes='2GiB' or bytes='300MB'")
    power = "kMGT".find(match[2].replace("K", "k")) + 1 if match[2] else 0
    return int(number * (1024 if match[3] else 1000) ** power)


@part
class Keep(Budget):
    """A fraction of the tokens that a row has seen: floor(keep * seen), row by row, but no fewer than `least`."""

    keep: float
    least: int = 0

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return max(ceil(self.keep * longest), min(self.least, longest))

    def limit(self, capacity: int, seen: Array) -> Array:
        return jnp.maximum(jnp.floor(self.keep * seen.astype(jnp.float32)).astype(jnp.int32), self.least)


def rounded(exact: Sequence[Fraction]) -> tuple[int, ...]:
    """Whole numbers of the same whole sum: each rounded down, and one more for those that lose most, the first first.

    >>> rounded([Fraction(5, 3), Fraction(4, 3), Fraction(2)])
    (2, 1, 2)
    """
    out = [int(x) for x in exact]
    by_rest = sorted(range(len(out)), key=lambda i: exact[i] - out[i], reverse=True)
    for i in by_rest[: int(sum(exact)) - sum(out)]:
        out[i] += 1
    return tuple(out)


def pyramid(mean: int, layers: int, beta: int, group: int = 1) -> tuple[int, ...]:
    """Tokens per layer, falling by equal steps, that sum to layers * mean exactly (largest remainder).

    low = group mean // beta, high = 2 mean - low; every `group` layers are one step. Sources: PyramidKV (2406.02069)
    and WindowKV (2503.17922), which round down each step and so overspend; the shape is the same, the sum is not.

    >>> pyramid(120, 32, 20)[0], pyramid(120, 32, 20)[-1], sum(pyramid(120, 32, 20)) == 32 * 120
    (234, 6, True)
    """
    low = mean * group // beta
    high, steps = 2 * mean - low, max(-(-layers // group) - 1, 1)
    exact = [high - Fraction((high - low) * (i // group), steps) for i in range(layers)]
    return rounded([x * mean * layers / sum(exact) for x in exact])  # the last group may be smaller


@part
class Pyramid(Budget):
    """`tokens` on average, more in the lower layers; `window` of them are the observation window of every layer.

    `group` neighbouring layers get the same, but for the last token.
    """

    tokens: int
    window: int
    beta: int = 20
    group: int = 1

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        # A row shorter than its layer's share keeps everything anyway, so the pyramid never depends on the prompt.
        return self.window + pyramid(self.tokens - self.window, model.layers, self.beta, self.group)[layer]


@part
class Above(Budget):
    """`tokens` in every layer from `layer` on (None: the upper half), and every token in those below it."""

    tokens: int
    layer: int | None

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        first = max(model.layers // 2, 1) if self.layer is None else self.layer
        return longest if layer < first else self.tokens


def weighted(tokens: int, weights: Sequence[float], least: int, most: int, step: int = 1) -> tuple[int, ...]:
    """Tokens per layer that sum to tokens * layers: `least`, and of the others a share by weight; `most` at most.

    Shares are rounded to steps of `step` tokens; what that leaves or lacks goes step by step to or from the heaviest
    layers that may take it, and what is less than a step to the heaviest. Source: CompressKV (2508.02401), whose step
    is a token.

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
        for i in able[: abs(gap)]:
            out[i] += one
    sizes = [least + step * n for n in out]
    sizes[next(i for i in heavy if sizes[i] + rest <= most)] += rest
    return tuple(sizes)


@part
class Weighted(Budget):
    """`tokens` on average, more in layers that need more: `weighted` with `least`, most = 3 tokens and `step`.

    weights of the layers, as a folder of `method` has them; None: the folder that comes with jkv for the model; until
    it is known, layers are equal. Layers of one size share their programs: a coarse step spares the compiler.
    """

    tokens: int
    least: int
    method: str
    step: int = 1
    weights: tuple[float, ...] | None = None

    def of(self, folder: str) -> Weighted:
        arrays, _ = learned.read(folder, self.method)
        found = arrays.get("layers", np.zeros(0))
        if found.ndim != 1 or not (found >= 0).all() or not found.sum() > 0:
            raise learned.unlike(folder, arrays, self.method)
        return replace(self, weights=tuple(found.astype(float).tolist()))

    def bound(self, params: Params) -> Weighted:
        return self if self.weights else self.of(learned.shipped(self.method, params, str))

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        weights = self.weights or (1.0,) * model.layers
        return weighted(self.tokens, weights, self.least, 3 * self.tokens, self.step)[layer]


def asked_for(total: int, asked: Sequence[float], most: int) -> list[int]:
    """Parts of `total` by what each asks, none above `most`; what that leaves is spread evenly, the first get one more.

    Where all have `most`, the rest is spread over all. Source: CAKE (2503.12491), which clips once.

    >>> asked_for(12, [4, 1, 1], 6), asked_for(8, [3, 1], 5), asked_for(9, [1, 1], 2)
    ([6, 3, 3], [5, 3], [5, 4])
    """
    out, open_to = [int(total * x / sum(asked)) for x in asked], list(range(len(asked)))
    while over := total - sum(min(x, most) for x in out):
        out = [min(x, most) for x in out]
        open_to = [i for i, x in enumerate(out) if x < most]
        if not open_to:
            open_to, most = list(range(len(out))), total
        for n, i in enumerate(open_to):
            out[i] += over // len(open_to) + (n < over % len(open_to))
    return out


@part
class Measured(Budget):
    """Divided by what the layers ask for a prompt; `window` tokens are every layer's, and sizes are steps of `step`."""

    window: int
    step: int
    parts: tuple[tuple[int, int], ...] | None = None

    measures = True

    def with_parts(self, parts: Sequence[Sequence[int]]) -> Budget:
        return replace(self, parts=tuple((int(max(x)), int(min(x))) for x in parts))


@part
class Asked(Measured):
    """`tokens` on average, divided among the layers for each row by what they ask; `window` of them are every layer's.

    A layer has slots for the most that a row gets, in steps of `step` tokens: few prompts need programs of their own.
    Source: CAKE (2503.12491).
    """

    tokens: int

    def divided(self, asked: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        total = (self.tokens - self.window) * len(asked)
        rows = zip(np.maximum(asked, 1e-30).T.tolist(), lengths, strict=True)
        return np.array([asked_for(total, row, max(n - self.window, 1)) for row, n in rows]).T

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return -(-(self.parts[layer][0] + self.window) // self.step) * self.step if self.parts else self.tokens


@part
class Won(Asked):
    """`tokens` on average; all tokens of a prompt compete, and a layer gets the places of the best that are its own.

    What layers ask is the rank of each token of each kv head, f[L,B,H,S], -inf for none. A layer's places are divided
    by its heads; if the prompt has fewer tokens than there are places, the others are spread evenly. Source: Make
    Each Token Count (2605.09649).

    >>> ranks = np.array([[-1.0, -2.0, -3.0], [-0.1, -0.2, -0.3]])[:, None, None]
    >>> Won(tokens=2, window=0, step=1).divided(ranks, [3]).tolist()
    [[1], [3]]
    """

    def divided(self, asked: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        layers, rows, heads, _ = asked.shape
        total, out = (self.tokens - self.window) * layers * heads, []
        for ranks in asked.swapaxes(0, 1).reshape(rows, layers, -1):
            best = np.argsort(-ranks, axis=None, kind="stable")[: min(total, int(np.isfinite(ranks).sum()))]
            won = np.bincount(best // ranks.shape[1], minlength=layers)
            spare = Fraction(total - len(best), layers)
            out.append(rounded([(int(x) + spare) / heads for x in won]))
        return np.array(out).T


@part
class Inside(Measured):
    """`tokens` in every layer, or all; by what a layer asks, the best of them are in its first tier, row by row.

    With tokens, a layer gets round(a / max a (tokens - window)) for a, the most of all layers; else the a that it asks.
    A first tier has slots for the most of all rows, the next for what the least of them leaves, in steps of `step`
    tokens. Sources: ARKV; ZipVL (2410.08584).

    >>> Inside(tokens=410, window=10, step=1).divided(np.array([[1.0], [2.0], [4.0]]), [1000]).tolist()
    [[100], [200], [400]]
    """

    tokens: int | None

    inside = True

    @property
    def bounded(self) -> bool:
        return self.tokens is not None

    def divided(self, asked: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        old = np.maximum(np.array(lengths) - self.window, 0)
        if self.tokens is not None:
            old = np.minimum(old, self.tokens - self.window)
            asked = asked / np.maximum(asked.max(0), 1e-30) * (self.tokens - self.window)
        return np.minimum(np.round(asked).astype(int), old)

    def inner(self, layer: int) -> tuple[int, int] | None:
        if self.parts is None:
            return None
        most, least = self.parts[layer]
        return max(-(-most // self.step), 1) * self.step, least // self.step * self.step

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        return longest if self.tokens is None else self.tokens


@part
class Split(Budget):
    """Some kv heads of a layer hold every token; each of the others `first` tokens and `local`, or a `share` if more.

    The number is the mean over a layer's heads, rounded up. whole: how many heads of each layer hold everything, or
    None: those that come with jkv for the model. The share is of what a row has seen. Source: RazorAttention
    (2407.15891).
    """

    local: int
    share: float
    first: int
    induction: float
    echo: float
    whole: tuple[int, ...] | None = None
    mine: tuple[int, int] = (0, 1)  # of this layer: those that hold everything, and all

    def of(self, folder: str) -> Split:
        keep, _ = heads.retrieval(folder, self.induction, self.echo)
        return replace(self, whole=tuple(keep.sum(1).tolist()))

    def bound(self, params: Params) -> Split:
        return self if self.whole else self.of(learned.shipped(heads.SPLIT, params, str, how="calibrate"))

    def for_layer(self, model: ModelConfig, layer: int) -> Split:
        return replace(self, mine=(self.whole[layer] if self.whole else 0, model.heads))

    def capacity(self, model: ModelConfig, layer: int, longest: int) -> int:
        whole, every = self.for_layer(model, layer).mine
        few = min(max(self.local, ceil(self.share * longest)) + self.first, longest)
        return -(-(whole * longest + (every - whole) * few) // every)

    def limit(self, capacity: int, seen: Array) -> Array:
        whole, every = self.mine
        local = jnp.floor(self.share * seen.astype(jnp.float32)).astype(jnp.int32)
        few = jnp.minimum(jnp.maximum(local, self.local) + self.first, seen)
        return jnp.minimum(-(-(whole * seen + (every - whole) * few) // every), capacity)
