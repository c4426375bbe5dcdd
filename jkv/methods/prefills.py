"""Ways to read a prompt that are more than one pass over all of its tokens in all layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jax import Array
from numpy.lib.stride_tricks import sliding_window_view

from jkv.arrays.tree import part
from jkv.memory.layer import Pruning
from jkv.methods.checks import alone
from jkv.methods.config import CacheConfig
from jkv.methods.probes import Drafted
from jkv.methods.scores.probes import LateOrProbed
from jkv.protocols import Prefill, Probe, Reading, needs_of

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
        first = config.tiers[0].first and all(codec.exact for codec in config.codecs(config.tiers[0]))
        several = len(config.tiers) > 1 + first and not config.taught  # all that a prompt brings is then in the first
        others = {
            "several tiers, of which it is not known where a token will be": several,
            "a merge, which changes what is stored": config.merge is not None and config.merge.changes != "none",
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
        needs = needs_of(config.score, config.merge, config.select)
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
        empty = reading.empty()
        dense, logits = reading.dense()
        if self.probe:
            dense = reading.probe(dense, self.probe)
        return reading.compress(empty, dense), logits


@part
class PromptCompression(Prefill):
    """Prompt compression: of a longer prompt `tokens` tokens are read, those that a draft's layers look at most.

    They stand next to each other, at positions of their own; `then` reads them. The draft is the model up to its first
    `layers` that attend, of which those from `first` on count (None: half of the model, and the upper half of that); it
    says `drafted` tokens, and its last `window` queries of the prompt count more the later they are. The draft sees the
    prompt whole. Source: SpecPC (2506.08373), where it is a smaller model of its own.
    """

    tokens: int
    drafted: int = 1
    window: int = 64
    around: int = 32
    layers: int | None = None
    first: int | None = None
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

    def counting(self, model: ModelConfig) -> range:
        """The layers of the draft that count; it ends where they do."""
        layers = max(model.layers // 2, 1) if self.layers is None else self.layers
        return range(layers // 2 if self.first is None else self.first, layers)

    def check(self, config: CacheConfig, model: ModelConfig, chunk: int) -> None:
        self.then.check(config, model, chunk)
        counting = self.counting(model)
        if counting.stop > model.layers or not counting:
            raise ValueError(
                f"{config}: layers={self.layers}, first={self.first}: a draft of {counting.stop} blocks, of which "
                f"{min(counting.stop, model.layers)} attend, and the model has {model.layers}; take no more, and a "
                "first= below what attends"
            )

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        return self.then(reading.of(self.shortened(reading)))

    def shortened(self, reading: Reading) -> list[list[int]]:
        """The token ids of the prompts as they are read."""
        rows = reading.rows
        if max(map(len, rows)) <= self.tokens:
            return rows
        counting = self.counting(reading.params.config)
        score, probe = LateOrProbed(queries=self.window), Drafted(tokens=self.drafted)
        config = CacheConfig(score=score, prefill=Deferred(probe=probe))
        draft = reading.draft(reading.params.first(counting.stop), config)
        dense = draft.probe(draft.dense()[0], probe)
        told = draft.statistic(dense)[counting.start :].max(0)
        live = np.asarray(dense.layers[0].recent.pos) >= 0
        return [self.row(row, x[at]) for row, x, at in zip(rows, told, live, strict=True)]

    def row(self, ids: list[int], score: np.ndarray) -> list[int]:
        """The token ids of a prompt as they are read, for what the draft says of each, f[n]."""
        if len(ids) <= self.tokens:
            return ids
        return [ids[i] for i in chosen(score, self.tokens, self.window, self.around)]


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
