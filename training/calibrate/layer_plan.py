"""The budget and the codecs of each layer: measured one by one, then chosen within so many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from jkv.cache.cache import tree_bytes
from jkv.eval.layer_cost import Alone
from jkv.eval.results import digest
from jkv.io.fingerprint import fingerprint
from jkv.methods import layer_plan
from jkv.methods.config import CacheConfig
from jkv.methods.layer_plan import Plan
from jkv.models import Params
from jkv.prompts.allocation import layout
from jkv.training.calibrate.heads import Found, Say
from jkv.training.calibrate.moments import SOURCES
from jkv.training.resumable_search import Measured
from jkv.utils.json_results import versions

CANDIDATES = ("full", "int8", "turboquant(bits=4)", "turboquant(bits=3)", "turboquant(bits=2)")
AFTER = 128  # tokens of a text that count, or half of it
Choice = tuple[int, ...]  # the three candidates that give a budget, the keys' codec and the values'


class Search:
    """The plan of at most `most` bytes for a text of `length` tokens, everything counted.

    It begins with the same in all layers, a budget and the codecs of one candidate: the one of least KL that fits. From
    there each budget, codec of keys and codec of values is measured in each layer alone; what they change is taken to
    add up, and `divided` chooses. If the whole plan then has no less KL than the uniform cache, that is the plan.
    ValueError for candidates that `plans.alike` refuses, of which none is so small, and for a model of latents.
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
        """What `run` has to say."""
        return len(self.fits) + self.params.config.layers * sum(len(axis) - 1 for axis in self.options) + 1

    def config(self, choice: Choice) -> CacheConfig:
        """The same in all layers."""
        return Plan.uniform(self.texts, self.params.config.layers, *choice).config

    def what(self, ids: np.ndarray) -> dict[str, object]:
        """What measurements of texts i32[n,T] depend on, for `Measured`."""
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
        """Arrays and card of the plan, by texts i32[n,T]; what `kept` has is not measured again."""
        alone = Alone(self.params, ids, ids.shape[1] - min(ids.shape[1] // 2, AFTER))
        measured: dict[Choice, np.ndarray] = {}
        for choice in self.fits:
            measured[choice] = kept(f"{choice}", partial(alone, self.config(choice)))
            say(self._said(choice))
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
        """Of each axis i[L]: what layers have where changes f64[L,C] add up; the bytes, and the sum of the changes."""
        b, k, v = changes
        costs = (b[:, :, None, None] + k[:, None, :, None] + v[:, None, None, :]).reshape(len(b), -1)
        sizes, rows = self.sizes.reshape(len(costs), -1), np.arange(len(costs))
        which = divided(costs, sizes, self.most - self.fixed)
        places = np.unravel_index(which, self.sizes.shape[1:])
        axes = [np.array(options)[place] for options, place in zip(self.options, places, strict=True)]
        return axes, self.fixed + int(sizes[rows, which].sum()), float(costs[rows, which].sum())

    def _changes(self, alone: Alone, base: Choice, kl: np.ndarray, say: Say, kept: Measured) -> list[np.ndarray]:
        """Of each axis f64[L,C]: what the base's KL changes by if a layer has another candidate's."""
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
        """f64[L,B,K,V]: bytes of a layer, for each of the options; and what all layers have beside them."""
        model, dtype = self.params.config, self.params.embed.dtype
        sizes = np.zeros((model.layers, *map(len, self.options)))
        fixed = 0
        for choice in product(*self.options):
            config = self.config(choice).bound(self.params)
            layers, states = layout(config, model, 1, self.length, 0, dtype)[1]
            sizes[:, *self._at(choice)], fixed = [tree_bytes(layer) for layer in layers], tree_bytes(states)
        return sizes, fixed

    def _at(self, choice: Choice) -> tuple[int, ...]:
        return tuple(options.index(i) for options, i in zip(self.options, choice, strict=True))

    def _said(self, choice: Choice) -> str:
        """A candidate, or the budget of one with the codes of another."""
        if choice in self.same:
            return self.texts[self.same.index(choice)]
        codes = next(text for text, own in zip(self.texts, self.same, strict=True) if own[1:] == choice[1:])
        return f"{self.texts[choice[0]]}, codes of {codes}"

    def _row(self, choice: Choice, kl: np.ndarray) -> dict[str, object]:
        return {"cache": self._said(choice), "bytes": self.bytes[choice], "kl": _rounded(kl)}


def _parts(config: CacheConfig) -> tuple[object, object, object]:
    """What a plan chooses of a config: its budget, and the codecs of keys and of values in all tiers."""
    keys, values = ((config.codec[i], *(tier[i] for tier in map(config.codecs, config.tiers))) for i in range(2))
    return config.budget, keys, values


def _alike(parts: Sequence[object]) -> list[int]:
    """Of each the first that is the same."""
    return [next(i for i, other in enumerate(parts) if layer_plan.same(part, other)) for part in parts]


def _saying(say: Say, name: str, layer: str) -> None:
    say(f"{name}, {layer}")


def _rounded(kl: np.ndarray | float) -> float:
    return round(float(np.mean(kl)), 6)


def divided(costs: np.ndarray, sizes: np.ndarray, most: float) -> np.ndarray:
    """Of each row of f64[n,C] one choice, i[n]: together no larger than `most`, and as cheap as steps find it.

    Every row begins with its smallest choice and climbs the lower convex hull of its costs over sizes, the step that
    gains most for its size first; a choice that is the same in all rows wins where it is cheaper.

    >>> costs, sizes = np.array([[9.0, 1, 0], [2, 1, 0]]), np.array([[1.0, 2, 4], [1, 2, 4]])
    >>> divided(costs, sizes, 5).tolist(), divided(costs, np.ones((2, 3)), 2).tolist()
    ([1, 1], [2, 2])
    """
    n, rows = len(costs), np.arange(len(costs))
    which = np.lexsort((costs, sizes))[:, 0]  # of the smallest the cheapest
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
    """Steps of the lower convex hull from the smallest choice: what a unit of size gains, from where, and to where."""
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
