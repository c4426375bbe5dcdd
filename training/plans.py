"""Which codec keeps the keys and the values of each layer: measured one by one, then chosen within so many bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jkv.eval.codecs import SIDES, Codecs, only
from jkv.methods import plans
from jkv.models import Params
from jkv.training import data
from jkv.training.heads import Found, Say
from jkv.training.moments import SOURCES

CANDIDATES = ("int8", "turboquant(bits=4)", "turboquant(bits=3)", "turboquant(bits=2)")


def layers(
    params: Params, texts: int, length: int, seed: int, say: Say, candidates: Sequence[str], bits: float
) -> Found:
    """Arrays and card of a `plans.Plan` of at most `bits` a number, metadata included, over all layers.

    The cost of a codec is the KL to the full cache if it keeps the keys, or the values, of one layer alone, over the
    second half of each text; costs of layers and sides are taken to add up. Raises ValueError for candidates that
    differ in more than their codecs, or of which none has so few bits, and for a model of latents.
    """
    if params.config.latent:
        raise ValueError("calibrate layers: this model caches latents, whose values are a part of their keys")
    configs = [config.bound(params) for config in plans.alike(candidates)]
    if configs[0].exact_layers:
        raise ValueError(
            "calibrate layers: exact_layers= goes with the plan, as in planned(plan=..., exact_layers=[0])"
        )
    model, ids = params.config, np.asarray(data.texts(params, SOURCES, length, texts, seed).ids)
    dims = (model.head_dim, model.value_dim)
    pairs = [config.codecs(config.tiers[-1]) for config in configs]  # tiers before it keep the first tokens
    sizes = np.array([[pair[i].rate(dim) * dim for pair in pairs] for i, dim in enumerate(dims)])
    wide, most = np.repeat(sizes, model.layers, 0), bits * sum(dims) * model.layers
    if wide.min(1).sum() > most:
        least = wide.min(1).sum() / (sum(dims) * model.layers)
        raise ValueError(
            f"bits={bits}: the smallest candidates have {least:.4g} a number; give more bits, or a smaller one"
        )
    codecs = Codecs(params, ids, length // 2)
    measured = codecs.alone([only(config, side) for side in SIDES for config in configs], say).mean(2)
    costs = measured.reshape(len(SIDES), len(configs), -1).swapaxes(1, 2)  # [sides, layers, candidates]
    flat = costs.reshape(-1, len(configs))
    which = divided(flat, wide, most)
    rows, (keys, values) = np.arange(len(wide)), which.reshape(len(SIDES), -1)
    arrays = {"keys": keys, "values": values}
    plan = plans.Plan(tuple(candidates), tuple(keys.tolist()), tuple(values.tolist()))
    found = codecs(plan.config)
    told = {
        "candidates": list(candidates),
        "bits": round(float(bits * wide[rows, which].sum() / most), 4),
        "kl": found["kl"],
        "kl_if_costs_add_up": round(float(flat[rows, which].sum()), 6),
        "uniform": {text: codecs(config)["kl"] for text, config in zip(candidates, configs, strict=True)},
        "costs": {side: cost.round(6).tolist() for side, cost in zip(SIDES, costs, strict=True)},
        "sources": list(SOURCES),
    }
    return arrays, told


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
