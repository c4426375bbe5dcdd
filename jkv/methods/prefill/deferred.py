"""Ways to read a prompt that are more than one pass over all of its tokens in all layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jax import Array
from numpy.lib.stride_tricks import sliding_window_view

from jkv.arrays.pytree import part
from jkv.cache.spec import Pruning
from jkv.methods.compatibility import alone
from jkv.methods.config import CacheConfig
from jkv.methods.eviction.probes import LateOrProbed
from jkv.methods.prefill.probes import Drafted
from jkv.protocols import Prefill, Probe, Reading

if TYPE_CHECKING:
    from jkv.models import ModelConfig


@part
class TokenPruning(Prefill):
    """Token pruning between layers: above `layer` (None: the last of the lower half) go the `size` best by its ranks.

    size: tokens of a row (int), or a share of them (float). Later text goes through all layers whole. Source: FastKV
    (2502.01068).
    """

    size: int | float
    layer: int | None = None

    splits: ClassVar[bool] = False

    def after(self, model: ModelConfig) -> int:
        """The layer."""
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
        alone(config, "a prompt that goes on with fewer of its tokens (token pruning) does", others)


@part
class Coded(Prefill):
    """In one pass, whose queries see keys and values as they will be stored: decode(encode(k)), decode(encode(v)).

    The newest tokens, which stay exact, are seen exact. So the error of a code adds up from layer to layer over a whole
    prompt, as papers measure it, and one forward pass of a text tells what a codec costs (`jkv eval codecs`).
    """

    splits: ClassVar[bool] = False
    coded: ClassVar[bool] = True

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        several = len(config.tiers) > 1 and config.pupils != [0]  # which has all that a prompt brings
        others = {
            "several tiers, of which it is not known where a token will be": several,
            "a merge, which changes what is stored": config.merge is not None and config.merge.changes != "none",
            "a codec that the last queries of the prompt teach": any(x.needs.queries for x in config.all_codecs),
        }
        alone(config, "a prompt that attends to what will be stored (coded) does", others)


@part
class Deferred(Prefill):
    """Deferred compression: all of a prompt stays until its probe was read and its layers were asked, then one flush.

    A budget that wants a statistic of the layers is divided by it. The price is a dense prompt in memory once.
    """

    probe: Probe | None = None

    splits: ClassVar[bool] = False
    defers: ClassVar[bool] = True

    @property
    def beside(self) -> str:
        return "reads texts after the prompt" if self.probe else "asks every layer about the prompt"

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
                f"{config} {self.beside}, which stays whole until then, and chunk={chunk} would cut it; prefill in one "
                "piece (chunk=0)"
            )

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        texts = reading.texts(self.probe) if self.probe else []  # refused before the prompt is read
        empty = reading.empty()
        dense, logits = reading.dense()
        if self.probe:
            dense = reading.probe(dense, self.probe, texts)
        return reading.compress(empty, dense), logits


@part
class PromptCompression(Prefill):
    """Prompt compression: of a longer prompt `tokens` tokens are read, those that a draft finds; `then` reads them.

    They stand next to each other, at positions of their own. The draft is the model up to its first `layers` that
    attend (None: half of them, if nothing else is said). It sees the prompt whole.
    """

    tokens: int
    layers: int | None = None
    then: Prefill = Prefill()

    splits: ClassVar[bool] = False
    skips: ClassVar[bool] = True

    @property
    def defers(self) -> bool:
        return self.then.defers

    @property
    def probe(self) -> Probe | None:
        return self.then.probe

    @property
    def coded(self) -> bool:
        return self.then.coded

    @property
    def beside(self) -> str:
        return self.then.beside or "has a draft read the prompt first"

    def pruning(self, model: ModelConfig, layer: int) -> Pruning | None:
        return self.then.pruning(model, layer)

    def depth(self, model: ModelConfig) -> int:
        """Layers of the draft that attend."""
        return max(model.layers // 2, 1) if self.layers is None else self.layers

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        self.then.check(config, model, chunk)
        depth = self.depth(model)
        if depth > model.layers:
            raise ValueError(
                f"{config}: layers={self.layers}: a draft of {depth} blocks, of which {min(depth, model.layers)} "
                f"attend, and the model has {model.layers}; take no more"
            )

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        return self.then(reading.of(self.shortened(reading)))

    def shortened(self, reading: Reading) -> list[list[int]]:
        """The token ids of the prompts as they are read."""
        if max(map(len, reading.rows)) <= self.tokens:
            return reading.rows
        return [self.row(row, told) for row, told in zip(reading.rows, self.told(reading), strict=True)]

    def row(self, ids: list[int], score: np.ndarray) -> list[int]:
        """The token ids of a prompt as they are read, for what the draft says of each, f[n]."""
        return ids if len(ids) <= self.tokens else [ids[i] for i in self.kept(score)]

    def told(self, reading: Reading) -> list[np.ndarray]:
        """What the draft says of the tokens of each prompt, f[n]."""
        raise NotImplementedError  # its own in every prompt compression

    def kept(self, score: np.ndarray) -> list[int]:
        """Indices, rising, of those that are read."""
        raise NotImplementedError  # its own in every prompt compression


@part
class Attended(PromptCompression):
    """Of a longer prompt the tokens that a draft's layers look at most, with their neighbours.

    Of the draft's layers those from `first` on count (None: the upper half); it says `drafted` tokens, and its last
    `window` queries of the prompt count more the later they are. Source: SpecPC (2506.08373), where the draft is a
    smaller model of its own.
    """

    drafted: int = 1
    window: int = 64
    around: int = 32
    first: int | None = None

    def counting(self, model: ModelConfig) -> range:
        """The layers of the draft that count; it ends where they do."""
        layers = self.depth(model)
        return range(layers // 2 if self.first is None else self.first, layers)

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        super().check(config, model, chunk)
        if not self.counting(model):
            raise ValueError(
                f"{config}: first={self.first}: the draft has {self.depth(model)} layers that attend; take a first= "
                "below what attends"
            )

    def told(self, reading: Reading) -> list[np.ndarray]:
        counting = self.counting(reading.params.config)
        small = reading.params.first(counting.stop)
        score, probe = LateOrProbed(queries=self.window), Drafted(tokens=self.drafted, layers=small.config.layers)
        config = CacheConfig(score=score, prefill=Deferred(probe=probe))
        draft = reading.draft(small, config)
        texts = draft.texts(probe)
        dense = draft.probe(draft.dense()[0], probe, texts)
        told = draft.statistic(dense)[counting.start :].max(0)
        live = np.asarray(dense.layers[0].recent.pos) >= 0
        return [x[at] for x, at in zip(told, live, strict=True)]

    def kept(self, score: np.ndarray) -> list[int]:
        return chosen(score, self.tokens, self.window, self.around)


@part
class Recalled(PromptCompression):
    """Of a longer prompt the tokens whose states are like those of its last `window` tokens, with their neighbours.

    s_j = max_i mean over states of cos(e_i, e_j), i of the window; then the largest within `pool` tokens. The first and
    the last `ends` tokens are read in any case. states: (layer, kv head, "k" or "v"), keys before their rotation; of
    none given the values of all kv heads of the draft's last layer; the draft ends with the last of them. Source:
    REFORM (2506.01215), from notes of the paper, where the draft evicts as it reads and queries may be states too. The
    draft is a sixth of the model by default: there values find needles best in SmolLM2-135M.
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
        """The states, by number."""
        return self.states or tuple((self.depth(model) - 1, head, "v") for head in range(model.heads))

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        super().check(config, model, chunk)
        for layer, head, of in self.among(model):
            if not (0 <= layer < model.layers and 0 <= head < model.heads and of in ("k", "v")):
                raise ValueError(
                    f"{config}: states={self.states}: a layer, a head and 'k' or 'v' each, of {model.layers} layers "
                    f"and {model.heads} kv heads"
                )

    def told(self, reading: Reading) -> list[np.ndarray]:
        model = reading.params.config
        draft = reading.draft(reading.params.first(self.depth(model)), CacheConfig())
        layers, like = draft.dense()[0].layers, []
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
    """f[last,n] of the last of x f[n,D] and all."""
    unit = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    return unit[-last:] @ unit.T


def smoothed(score: np.ndarray, most: int, ends: int, pool: int) -> list[int]:
    """Indices, rising, of `most` of the tokens of score f[n]: the first and the last `ends`, then the best.

    A score is the largest within `pool` tokens, of which it is the middle one. Source: REFORM (2506.01215).

    >>> smoothed(np.array([0, 0, 0, 0, 9, 0, 0, 0, 0, 1, 0]), most=6, ends=1, pool=3)
    [0, 3, 4, 5, 8, 10]
    """
    padded = np.pad(score.astype(float), (pool // 2, pool - 1 - pool // 2), constant_values=-np.inf)
    best = sliding_window_view(padded, pool).max(1)
    best[:ends] = best[len(best) - ends :] = np.inf
    return sorted(np.argsort(-best, kind="stable")[:most].tolist())


def compressed(prefill: Prefill, given: PromptCompression) -> PromptCompression:
    """The prompt compression, and then the other prefill."""
    return replace(given, then=prefill)


def chosen(score: np.ndarray, most: int, last: int, around: int) -> list[int]:
    """Indices, rising, of `most` of the tokens of score f[n]: the `last`, then the best, each with its neighbours.

    A score is the largest of the `around` tokens about its own, one more after it than before if that is even; they
    come along, the nearest first and the older of two, as long as there is room. Source: SpecPC (2506.08373).

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
