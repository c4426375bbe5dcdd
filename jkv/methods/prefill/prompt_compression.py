"""Prompt compression: a draft selects the tokens that are read; SpecPC, REFORM."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jkv.arrays.pytree import part
from jkv.cache.spec import Pruning
from jkv.methods.config import CacheConfig
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.prefill.probes import Drafted, LateOrProbed
from jkv.methods.registry import Axes, Positive, around, method
from jkv.protocols import DraftRunner, Prefill, PrefillTraits, Probe

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class PromptCompression(Prefill):
    """Base of prompt compression: of a longer prompt read only the `tokens` tokens that a draft selects.

    The selected tokens get contiguous positions. The draft is the model truncated to its first layers, and reads the
    whole prompt.

    Attributes:
        tokens: Tokens to read.
        layers: Attention layers of the draft; None: half of them, unless a subclass has its own default.
        then: Prefill that reads the selected tokens.
    """

    tokens: int
    layers: int | None = None
    then: Prefill = Prefill()

    @property
    def traits(self) -> PrefillTraits:
        then = self.then.traits
        return replace(then, splits=False, skips=True, beside=then.beside or "has a draft read the prompt first")

    @property
    def probe(self) -> Probe | None:
        return self.then.probe

    def pruning(self, model: ModelConfig, layer: int) -> Pruning | None:
        return self.then.pruning(model, layer)

    def depth(self, model: ModelConfig) -> int:
        """Attention layers of the draft."""
        return max(model.layers // 2, 1) if self.layers is None else self.layers

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        self.then.check(config, model, chunk)
        depth = self.depth(model)
        if depth > model.layers:
            raise ValueError(
                f"{config}: layers={self.layers}: a draft of {depth} blocks, of which {min(depth, model.layers)} "
                f"attend, and the model has {model.layers}; take no more"
            )

    def shorten(self, params: Params, rows: list[list[int]], runner: DraftRunner) -> list[list[int]]:
        if max(map(len, rows)) <= self.tokens:
            return rows
        scores = self.scores(params, rows, runner)
        return [self.row(row, score) for row, score in zip(rows, scores, strict=True)]

    def row(self, ids: list[int], score: np.ndarray) -> list[int]:
        """Token ids of one compressed prompt, by the draft's scores f[n]."""
        return ids if len(ids) <= self.tokens else [ids[i] for i in self.kept(score)]

    def scores(self, params: Params, rows: list[list[int]], runner: DraftRunner) -> list[np.ndarray]:
        """The draft's scores of the tokens of each prompt, f[n]."""
        raise NotImplementedError

    def kept(self, score: np.ndarray) -> list[int]:
        """Indices, ascending, of the tokens to read."""
        raise NotImplementedError


@around("compression", "prefill")
def compressed(prefill: Prefill, given: PromptCompression) -> PromptCompression:
    """Apply a prompt compression before another prefill."""
    return replace(given, then=prefill)


@part
class Attended(PromptCompression):
    """SpecPC: of a longer prompt read the tokens that a draft's layers attend to most, with their neighbours.

    Source: SpecPC (2506.08373), where the draft is a smaller model of its own.

    Attributes:
        drafted: Draft tokens whose queries count too.
        window: Last queries of the prompt that count, later ones more.
        around: Tokens about each chosen one that are read with it.
        first: First layer of the draft that counts; None: the upper half of its layers.
    """

    drafted: int = 1
    window: int = 64
    around: int = 32
    first: int | None = None

    def counting(self, model: ModelConfig) -> range:
        """Layers of the draft that count. The draft ends with the last of them."""
        layers = self.depth(model)
        return range(layers // 2 if self.first is None else self.first, layers)

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        super().check(config, model, chunk)
        if not self.counting(model):
            raise ValueError(
                f"{config}: first={self.first}: the draft has {self.depth(model)} layers that attend; take a first= "
                "below what attends"
            )

    def scores(self, params: Params, rows: list[list[int]], runner: DraftRunner) -> list[np.ndarray]:
        counting = self.counting(params.config)
        small = params.first(counting.stop)
        score, probe = LateOrProbed(queries=self.window), Drafted(tokens=self.drafted, layers=small.config.layers)
        dense = runner.draft(small, CacheConfig(score=score, prefill=Deferred(probe=probe)))
        found = runner.statistic(dense)[counting.start :].max(0)
        live = np.asarray(dense.layers[0].recent.pos) >= 0
        return [x[at] for x, at in zip(found, live, strict=True)]

    def kept(self, score: np.ndarray) -> list[int]:
        return chosen(score, self.tokens, self.window, self.around)


def chosen(score: np.ndarray, most: int, last: int, around: int) -> list[int]:
    """Indices, ascending, of `most` tokens by score f[n]: the last `last`, then the best, each with its neighbours.

    A score is the maximum over the `around` tokens about its own, with one more after it than before if that is even.
    These neighbours are read too, the nearest first and the older of two, while room remains. Source: SpecPC
    (2506.08373).

    >>> chosen(np.array([0, 0, 0, 9, 0, 0, 0, 0, 1, 0]), most=4, last=1, around=0), chosen(np.arange(9), 4, 1, 2)
    ([0, 3, 8, 9], [5, 6, 7, 8])
    >>> chosen(np.array([0, 0, 0, 9, 0, 0, 0, 0]), most=6, last=1, around=4)
    [0, 1, 2, 3, 4, 7]
    """
    n, before = len(score), max(around - 1, 0) // 2
    after = max(around - 1, 0) - before
    padded = np.pad(score.astype(float), (before, after), constant_values=-np.inf)
    best = np.argsort(-sliding_window_view(padded, before + after + 1).max(1), kind="stable")
    taken = dict.fromkeys(range(max(n - last, 0), n))
    steps = sorted(range(-before, after + 1), key=abs)
    for i in best[:most].tolist():
        taken.update(dict.fromkeys(i + step for step in steps if 0 <= i + step < n))
        if len(taken) >= most:
            break
    return sorted(islice(taken, most))


@method(
    "2506.08373",
    "reconstruction: the draft is the model's own first layers; the others are never read",
    "more accurate than others in the same memory and time (no figure in the abstract)",
)
def specpc(
    *,
    tokens: int = 2048,
    drafted: int = 1,
    layers: int | None = None,
    first: int | None = None,
    window: Positive = 64,
    around: int = 32,
) -> Axes:
    """SpecPC: only `tokens` of a longer prompt are read, those that the first `layers` (default: half) attend to.

    As in the paper only prompts longer than 2048 tokens are cut by default.
    """
    if tokens <= window:
        raise ValueError(f"specpc: tokens={tokens} must exceed its newest tokens of {window}")
    least = {"drafted": drafted, "around": around, "layers": layers or 0, "first": first or 0}
    if min(least.values()) < 0 or layers == 0:
        raise ValueError(f"specpc: {least}: 0 or more, and layers 1 or more")
    return dict(
        compression=Attended(tokens=tokens, drafted=drafted, window=window, around=around, layers=layers, first=first)
    )


@part
class Recalled(PromptCompression):
    """REFORM: of a longer prompt read the tokens with states similar to its last `window` tokens', and neighbours.

    s_j = max_i mean over states of cos(e_i, e_j), i in the window; then the maximum within `pool` tokens. The draft
    ends with the last layer of `states`; by default it is a sixth of the model, where values find needles best in
    SmolLM2-135M. Source: REFORM (2506.01215), from notes of the paper, where the draft evicts as it reads and queries
    may be states too.

    Attributes:
        window: Last tokens whose states are compared.
        pool: Tokens of the maximum.
        ends: First and last tokens, which are always read.
        states: (layer, kv head, "k" or "v"), keys un-rotated. Empty: the values of all kv heads of the draft's last
            layer.
    """

    window: int = 64
    pool: int = 129
    ends: int = 256
    states: tuple[tuple[int, int, str], ...] = ()

    def depth(self, model: ModelConfig) -> int:
        if self.states:
            return max(layer for layer, *_ in self.states) + 1
        return max(model.layers // 6, 1) if self.layers is None else self.layers

    def among(self, model: ModelConfig) -> tuple[tuple[int, int, str], ...]:
        """The states, with the default filled in."""
        return self.states or tuple((self.depth(model) - 1, head, "v") for head in range(model.heads))

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        super().check(config, model, chunk)
        for layer, head, of in self.among(model):
            if not (0 <= layer < model.layers and 0 <= head < model.heads and of in ("k", "v")):
                raise ValueError(
                    f"{config}: states={self.states}: a layer, a head and 'k' or 'v' each, of {model.layers} layers "
                    f"and {model.heads} kv heads"
                )

    def scores(self, params: Params, rows: list[list[int]], runner: DraftRunner) -> list[np.ndarray]:
        model = params.config
        layers, like = runner.draft(params.first(self.depth(model)), CacheConfig()).layers, []
        for layer, head, of in self.among(model):
            held = layers[layer].recent
            x = model.ropes[layer].rotate(held.k, held.pos[:, None], inverse=True) if of == "k" else held.v
            like.append(np.asarray(x[:, head], np.float32))
        live = np.asarray(layers[0].recent.pos) >= 0
        each = [[_cosines(x[row, at], self.window) for x in like] for row, at in enumerate(live)]
        return [np.mean(of_states, 0).max(0, initial=-1) for of_states in each]  # a row may have no token

    def kept(self, score: np.ndarray) -> list[int]:
        return smoothed(score, self.tokens, self.ends, self.pool)


def _cosines(x: np.ndarray, last: int) -> np.ndarray:
    """f[last,n]: cosines of the last of x f[n,D] with all."""
    unit = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    return unit[-last:] @ unit.T


def smoothed(score: np.ndarray, most: int, ends: int, pool: int) -> list[int]:
    """Indices, ascending, of `most` tokens by score f[n]: the first and the last `ends`, then the best.

    A score is the maximum within `pool` tokens centred at its own. Source: REFORM (2506.01215).

    >>> smoothed(np.array([0, 0, 0, 0, 9, 0, 0, 0, 0, 1, 0]), most=6, ends=1, pool=3)
    [0, 3, 4, 5, 8, 10]
    """
    padded = np.pad(score.astype(float), (pool // 2, pool - 1 - pool // 2), constant_values=-np.inf)
    best = sliding_window_view(padded, pool).max(1)
    best[:ends] = best[len(best) - ends :] = np.inf
    return sorted(np.argsort(-best, kind="stable")[:most].tolist())


@method(
    "2506.01215",
    "reconstruction from notes of the paper: the draft keeps all it reads; states are keys or values, not queries",
    "52% better on RULER and 34% on BABILong at 1M tokens than others, with 30% less time and 5% less memory",
)
def reform(
    *,
    tokens: int = 8192,
    window: Positive = 64,
    pool: Positive = 129,
    ends: int = 256,
    layers: int | None = None,
    states: tuple[tuple[int, int, str], ...] = (),
) -> Axes:
    """REFORM: only `tokens` of a longer prompt are read, those whose states are most like those of its last `window`.

    As in the paper only prompts longer than 8192 tokens are cut by default. The first and the last `ends` tokens are
    read in any case, and `pool` tokens about one that is alike. states: a layer, a kv head and "k" or "v" each; by
    default the values of all heads of the last of the first `layers` (default: a sixth).
    """
    if tokens <= 2 * ends or layers == 0:
        raise ValueError(f"reform: tokens={tokens}, ends={ends}, layers={layers}: more than both ends, and 1 or more")
    if layers is not None and states:
        raise ValueError(
            f"reform: layers={layers}, states={states}: the draft ends with the last of its states; give one"
        )
    if any(not isinstance(x, tuple | list) or len(x) != 3 for x in states):
        raise ValueError(
            f"reform: states={states}: a layer, a kv head and 'k' or 'v' each, as ((3, 0, 'v'), (5, 1, 'k'))"
        )
    given = tuple((layer, head, of) for layer, head, of in states)
    return dict(compression=Recalled(tokens=tokens, window=window, pool=pool, ends=ends, layers=layers, states=given))
