"""Layer plan search: measure each budget and codec in one layer alone, then divide a number of bytes among layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from jkv.cache.cache import tree_bytes
from jkv.eval.layer_cost import LayerTexts
from jkv.eval.results import digest
from jkv.io.fingerprint import fingerprint
from jkv.methods import layer_plan
from jkv.methods.config import CacheConfig
from jkv.methods.layer_plan import Plan
from jkv.models import Params
from jkv.prompts.allocation import CacheShape
from jkv.training.calibrate.heads import Found, Say
from jkv.training.calibrate.moments import SOURCES
from jkv.training.resumable_search import Measured
from jkv.utils.json_results import versions

CANDIDATES = ("full", "int8", "turboquant(bits=4)", "turboquant(bits=3)", "turboquant(bits=2)")
AFTER = 128  # scored tokens of a text, at most half of it
Choice = tuple[int, ...]  # indices of the candidates whose budget, key codec and value codec are used


class Search:
    """Search for the plan of at most `most` bytes for a text of `length` tokens, with all arrays counted.

    The search starts from a uniform cache, one budget and one pair of codecs in all layers: the one with the least KL
    that fits. Then each budget, key codec and value codec is measured in each layer alone. These changes are assumed to
    add up, and `divided` chooses. If the resulting plan has no lower KL than the uniform cache, the uniform cache is
    the plan.

    Args:
        params: The model.
        candidates: Caches, as text, whose budgets and codecs are combined.
        length: Tokens of the text.
        most: Bytes available.

    Raises:
        ValueError: `layer_plan.alike` rejects the candidates, none of them fits, one selects or has exact layers, or
            the model caches latents.
    """

    def __init__(self, params: Params, candidates: Sequence[str], length: int, most: int) -> None:
        if params.config.latent:
            raise ValueError("calibrate layers: this model caches latents, whose values are a part of their keys")
        configs = layer_plan.alike(candidates)
        if configs[0].exact_layers:
            raise ValueError(
                "calibrate layers: exact_layers= goes with the plan, as in planned(plan=..., exact_layers=[0]); a plan "
                "chooses such layers itself if a candidate keeps floats"
            )
        if configs[0].select is not None:
            raise ValueError("calibrate layers: a selector reads a part of each layer, and KL is measured of all of it")
        self.params, self.texts, self.length, self.most = params, tuple(candidates), length, most
        self.same: tuple[Choice, ...] = tuple(zip(*map(_alike, zip(*map(_parts, configs), strict=True)), strict=True))
        self.options = tuple(sorted({*axis}) for axis in zip(*self.same, strict=True))
        pairs = sorted({(k, v) for _, k, v in self.same})
        self.uniform: list[Choice] = [(b, k, v) for b in self.options[0] for k, v in pairs]
        self.sizes, self.fixed = self._sizes()
        self.bytes = {x: self.fixed + int(self.sizes[:, *self._at(x)].sum()) for x in self.uniform}
        self.fits = [x for x in self.uniform if self.bytes[x] <= most]
        if not self.fits:
            raise ValueError(
                f"bytes={most}: a cache of {length} tokens takes {min(self.bytes.values())} bytes or more with these "
                "candidates; give more, or candidates that keep less"
            )

    @property
    def steps(self) -> int:
        """The number of progress messages of `run`."""
        return len(self.fits) + self.params.config.layers * sum(len(axis) - 1 for axis in self.options) + 1

    def config(self, choice: Choice) -> CacheConfig:
        """Return the uniform cache of a choice."""
        return Plan.uniform(self.texts, self.params.config.layers, *choice).config

    def what(self, ids: np.ndarray) -> dict[str, object]:
        """Return what measurements on texts i32[n,T] depend on, for `Measured`."""
        model = fingerprint(self.params)
        texts = digest([np.asarray(ids, np.int32).tobytes()])
        return {
            "model": model,
            "candidates": [*self.texts],
            "texts": texts,
            "after": AFTER,
            "jkv": versions(["jkv"]).get("jkv"),
        }

    def run(self, ids: np.ndarray, say: Say, kept: Measured) -> Found:
        """Search on texts i32[n,T] and return the plan's arrays and card; measurements in `kept` are reused."""
        alone = LayerTexts(self.params, ids, ids.shape[1] - min(ids.shape[1] // 2, AFTER))
        measured: dict[Choice, np.ndarray] = {}
        for choice in self.fits:
            measured[choice] = kept(f"{choice}", partial(alone, self.config(choice)))
            say(self._said(choice))
        # Measure changes from the best uniform cache, divide the bytes, measure the whole plan.
        base = min(self.fits, key=lambda x: measured[x].mean())
        kl, changes = measured[base], self._changes(alone, base, measured[base], say, kept)
        axes, size, sum_up = self._chosen(changes)
        own = alone(Plan(self.texts, *(tuple(x.tolist()) for x in axes)).config)
        say("the plan")
        card = {
            "candidates": list(self.texts),
            "chosen": {"bytes": size, "kl": _rounded(own)},
            "chosen_if_changes_add_up": _rounded(kl.mean() + sum_up),
            "uniform": [self._row(x, measured[x]) for x in self.fits],
            "base": list(base),
            "changes": {
                axis: [{"candidate": i, "kl": x.round(6).tolist()} for i, x in zip(options, change.T, strict=True)]
                for axis, options, change in zip(layer_plan.AXES, self.options, changes, strict=True)
            },
            "sources": list(SOURCES),
        }
        if own.mean() >= kl.mean():
            axes, own, size = [np.full(len(x), i) for x, i in zip(axes, base, strict=True)], kl, self.bytes[base]
        card |= {"bytes": size, "kl": _rounded(own), "kl_by_text": own.round(6).tolist()}
        return dict(zip(layer_plan.AXES, axes, strict=True)), card

    def _chosen(self, changes: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int, float]:
        """Choose the options of each layer from changes f64[L,C] per axis that are assumed to add up.

        Returns:
            Per axis i[L], the bytes in total, and the sum of the changes.
        """
        b, k, v = changes
        costs = (b[:, :, None, None] + k[:, None, :, None] + v[:, None, None, :]).reshape(len(b), -1)
        sizes, rows = self.sizes.reshape(len(costs), -1), np.arange(len(costs))
        which = divided(costs, sizes, self.most - self.fixed)
        places = np.unravel_index(which, self.sizes.shape[1:])
        axes = [np.array(options)[place] for options, place in zip(self.options, places, strict=True)]
        return axes, self.fixed + int(sizes[rows, which].sum()), float(costs[rows, which].sum())

    def _changes(self, alone: LayerTexts, base: Choice, kl: np.ndarray, say: Say, kept: Measured) -> list[np.ndarray]:
        """Measure the change of the base's KL if one layer has another candidate's option, f64[L,C] per axis."""
        found = []
        for axis, options in enumerate(self.options):
            change = np.zeros((self.params.config.layers, len(options)))
            for place, option in enumerate(options):
                if option == base[axis]:
                    continue
                other = (*base[:axis], option, *base[axis + 1 :])
                told = partial(_saying, say, f"{layer_plan.AXES[axis]} of {self.texts[option]}")
                name, pair = f"{base} in one layer {other}", (self.config(base), self.config(other))
                for layer in range(len(change)) if name in kept else ():
                    told(f"layer {layer + 1}")
                change[:, place] = (kept(name, partial(alone.swapped, *pair, told)) - kl).mean(1)
            found.append(change)
        return found

    def _sizes(self) -> tuple[np.ndarray, int]:
        """Compute the bytes f64[L,B,K,V] of a layer for all options, and the bytes that do not depend on them."""
        model, dtype = self.params.config, self.params.embed.dtype
        sizes = np.zeros((model.layers, *map(len, self.options)))
        fixed = 0
        for choice in product(*self.options):
            config = self.config(choice).bound(self.params)
            layers, states = CacheShape(config, model, 1, self.length, 0, dtype).layout()[1]
            sizes[:, *self._at(choice)], fixed = [tree_bytes(layer) for layer in layers], tree_bytes(states)
        return sizes, fixed

    def _at(self, choice: Choice) -> tuple[int, ...]:
        return tuple(options.index(i) for options, i in zip(self.options, choice, strict=True))

    def _said(self, choice: Choice) -> str:
        """Describe a choice: a candidate, or the budget of one with the codecs of another."""
        if choice in self.same:
            return self.texts[self.same.index(choice)]
        codes = next(text for text, own in zip(self.texts, self.same, strict=True) if own[1:] == choice[1:])
        return f"{self.texts[choice[0]]}, codes of {codes}"

    def _row(self, choice: Choice, kl: np.ndarray) -> dict[str, object]:
        return {"cache": self._said(choice), "bytes": self.bytes[choice], "kl": _rounded(kl)}


def _parts(config: CacheConfig) -> tuple[object, object, object]:
    """Return the three parts that a plan chooses: budget, key codecs and value codecs of all tiers."""
    keys, values = ((config.codec[i], *(tier[i] for tier in map(config.codecs, config.tiers))) for i in range(2))
    return config.budget, keys, values


def _alike(parts: Sequence[object]) -> list[int]:
    """Return for each part the index of the first equal one."""
    return [next(i for i, other in enumerate(parts) if layer_plan.same(part, other)) for part in parts]


def _saying(say: Say, name: str, layer: str) -> None:
    say(f"{name}, {layer}")


def _rounded(kl: np.ndarray | float) -> float:
    return round(float(np.mean(kl)), 6)


def divided(costs: np.ndarray, sizes: np.ndarray, most: float) -> np.ndarray:
    """Choose one option per row of f64[n,C] with total size at most `most` and low total cost, i[n].

    Greedy: each row starts with its smallest option and climbs the lower convex hull of costs over sizes, the step with
    the largest gain per size first. If the best single option for all rows is cheaper, it is returned instead.

    Args:
        costs: f64[n,C], cost of each option.
        sizes: f64[n,C], size of each option.
        most: Total size available.

    >>> costs, sizes = np.array([[9.0, 1, 0], [2, 1, 0]]), np.array([[1.0, 2, 4], [1, 2, 4]])
    >>> divided(costs, sizes, 5).tolist(), divided(costs, np.ones((2, 3)), 2).tolist()
    ([1, 1], [2, 2])
    """
    n, rows = len(costs), np.arange(len(costs))
    which = np.lexsort((costs, sizes))[:, 0]  # the smallest, ties to the cheapest
    left = most - sizes[rows, which].sum() + 1e-9
    steps = [(gain, row, a, b) for row in range(n) for gain, a, b in _hull(costs[row], sizes[row])]
    for _, row, a, b in sorted(steps, key=lambda step: -step[0]):
        more = sizes[row, b] - sizes[row, a]
        if which[row] == a and more <= left:
            which[row], left = b, left - more
    same = [i for i in range(costs.shape[1]) if sizes[:, i].sum() <= most + 1e-9]
    best = min(same, key=lambda i: costs[:, i].sum(), default=None)
    if best is not None and costs[:, best].sum() < costs[rows, which].sum():
        return np.full(n, best)
    return which


def _hull(costs: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[float, int, int]]:
    """Yield the steps of the lower convex hull from the smallest option: (gain per size, from, to)."""
    at = int(np.lexsort((costs, sizes))[0])
    while True:
        gains = [
            ((costs[at] - costs[i]) / (sizes[i] - sizes[at]), -sizes[i], i)
            for i in range(len(costs))
            if sizes[i] > sizes[at] and costs[i] < costs[at]
        ]
        if not gains:
            return
        gain, _, to = max(gains)
        yield gain, at, to
        at = to
