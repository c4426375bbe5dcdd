"""Prefills: token pruning, quantized prefill, deferred compression and prompt compression."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jkv.arrays.pytree import part
from jkv.cache.spec import Pruning
from jkv.methods.compatibility import refuse_first
from jkv.methods.config import CacheConfig
from jkv.methods.eviction.probes import LateOrProbed
from jkv.methods.prefill.probes import Drafted
from jkv.protocols import DraftRunner, Prefill, PrefillTraits, Probe

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class TokenPruning(Prefill):
    """FastKV: token pruning between layers; only the `size` best tokens by rank go on to the layers above `layer`.

    Text after the prompt goes through all layers whole. Source: FastKV (2502.01068).

    Attributes:
        size: Tokens of a row (int), or a share of them (float).
        layer: Layer whose score ranks them; None: the last layer of the lower half.
    """

    size: int | float
    layer: int | None = None

    traits: ClassVar = PrefillTraits(splits=False, chunks=False)

    def after(self, model: ModelConfig) -> int:
        """Index of the layer after which tokens are pruned."""
        return max(model.layers // 2 - 1, 0) if self.layer is None else self.layer

    def pruning(self, model: ModelConfig, layer: int) -> Pruning | None:
        return Pruning(size=self.size) if layer == self.after(model) else None

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        if not 0 <= self.after(model) < model.layers:
            raise ValueError(f"{config}: layer={self.layer}, and the model has layers 0 to {model.layers - 1}")
        others = {
            f"chunk={chunk}": bool(chunk),
            "positions within the cache": config.relative,
            "blocks that recur, which read every token": model.mixers is not None,
        }
        refuse_first(config, "a prompt that goes on with fewer of its tokens (token pruning) does", others)


@part
class Coded(Prefill):
    """Quantized prefill in one pass: queries attend to decode(encode(k)), decode(encode(v)), as they will be stored.

    The newest tokens, which stay exact, are read exactly. So quantization error accumulates from layer to layer over a
    whole prompt, as papers measure it, and one forward pass of a text measures what a codec costs (`jkv eval codecs`).
    """

    traits: ClassVar = PrefillTraits(splits=False, coded=True)

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        several = len(config.tiers) > 1 and config.pupils != [0]  # the fitted tier holds all of a prompt
        others = {
            "several tiers, of which it is not known where a token will be": several,
            "a merge, which changes what is stored": config.merge is not None and config.merge.changes != "none",
            "a codec that the last queries of the prompt teach": any(x.needs.queries for x in config.all_codecs),
        }
        refuse_first(config, "a prompt that attends to what will be stored (coded) does", others)


@part
class Deferred(Prefill):
    """Deferred compression: keep the whole prompt until probe and layer statistics are read, then flush once.

    A budget that needs a statistic of the layers is divided by it. This holds one dense prompt in memory.
    """

    probe: Probe | None = None

    @property
    def traits(self) -> PrefillTraits:
        beside = "reads texts after the prompt" if self.probe else "asks every layer about the prompt"
        return PrefillTraits(splits=False, chunks=False, defers=True, beside=beside)

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        if self.probe:
            self.probe.check(config, model)
        needs = config.needs
        if needs.new or needs.prompt:
            raise ValueError(
                f"{config}: a prompt that stays whole is ranked by texts that are read after it and by its last "
                "queries, and this score wants all of them; take one such as snapkv's"
            )
        if chunk:
            raise ValueError(
                f"{config} {self.traits.beside}, which stays whole until then, and chunk={chunk} would cut it; prefill "
                "in one piece (chunk=0)"
            )


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


def compressed(prefill: Prefill, given: PromptCompression) -> PromptCompression:
    """Apply a prompt compression before another prefill."""
    return replace(given, then=prefill)


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
