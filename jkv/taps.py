"""Taps of attention between two blocks of generation: when a text would gain from what is not in it, and about what.

A token is judged by those that came after it, `LAG` of them: no earlier one can look at it. Source: ATLAS (2504.01281),
where every formula is of the newest token; the lag, and that hidden states do not count, are a reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache import Cache
from jkv.evidence import evidence

LAG = 8


@dataclass(frozen=True, kw_only=True)
class Taps:
    """What the token of each row got from those after it; 0 in a row of fewer tokens.

    level f64[L,B]: in each layer, over the most that a token before or itself got, summed over heads; heads f64[B,N]:
    in the last layer, a mean over queries; share f64[B,N]: of the entropies of these heads' attention.
    """

    level: np.ndarray
    heads: np.ndarray
    share: np.ndarray


@jax.jit
def _received(cache: Cache, lag: Array) -> tuple[list[tuple[Array, Array]], Array]:
    """Per layer, what the newest `lag` queries paid, f32[B,N,S], and to which positions i32[B,N,S]; entropies f32[B,N]
    of the last layer."""
    nobody, out, entropy = jnp.zeros_like(cache.seen), [], jnp.zeros(0)
    for layer, plan, rope in zip(cache.layers, cache.plan, cache.model.ropes, strict=True):
        asked = (None, layer.queries)
        ev = evidence(
            layer, layer.recent, nobody, asked, cache.seen, cache.prompt, nobody, plan, rope, cache.model, False
        )
        assert ev.new is not None
        new = replace(ev.new, pos=jnp.where(ev.new.pos >= cache.seen[:, None] - lag, ev.new.pos, -1))
        if plan.tiers and plan.tiers[0].select:
            new = ev.complete(new)
        b, _, groups, _, _ = new.q.shape
        got = ev.fold(lambda p, *_, n=groups: tuple(p.sum(3)[:, :, g] for g in range(n)), new)
        pos = jnp.repeat(ev.pos, groups, 1)
        out.append((jnp.stack(got, 2).reshape(pos.shape), pos))
        spread = ev.over_keys(lambda p, *_: -(p * jnp.log(jnp.maximum(p, 1e-30))).sum(-1), new)
        entropy = jnp.where((new.pos >= 0)[:, None, None], spread, 0).sum(-1).reshape(b, -1)
    return out, entropy


def received(cache: Cache, lag: int) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """f64[N,seen] of each layer and row: what the newest `lag` queries paid to each position; entropies f64[B,N].

    ValueError for a cache whose score keeps fewer queries.
    """
    if not cache.plan or min(plan.queries for plan in cache.plan) < lag:
        raise ValueError(
            f"{cache.name or 'the cache'} keeps fewer than {lag} queries, and attention is theirs: take a score that "
            "keeps them in every layer, such as snapkv's"
        )
    layers, entropy = _received(cache, jnp.int32(lag))
    out, seen = [], np.asarray(cache.seen)
    for got, pos in (map(np.asarray, pair) for pair in layers):
        rows = [np.zeros((got.shape[1], n + 1)) for n in seen]
        for row, x, at in zip(rows, got, pos, strict=True):
            np.put_along_axis(row, np.where(at < 0, row.shape[1] - 1, at), x, 1)  # the dead into a place cut off below
        out.append([row[:, :-1] for row in rows])
    return out, np.asarray(entropy, float)


def taps(cache: Cache) -> Taps:
    """The taps of a cache; ValueError where its score keeps too few queries."""
    layers, entropy = received(cache, LAG)
    level, heads = np.zeros((len(layers), cache.rows)), np.zeros(entropy.shape)
    for i, rows in enumerate(layers):
        for b, got in enumerate(rows):
            at = got.shape[1] - 1 - LAG
            if at >= 0:
                total = got.sum(0)
                level[i, b], heads[b] = total[at] / max(total[: at + 1].max(), 1e-30), got[:, at] / LAG
    return Taps(level=level, heads=heads, share=entropy / np.maximum(entropy.sum(1, keepdims=True), 1e-30))


def need(taps: Taps, probability: np.ndarray, words: np.ndarray, load: float = 0.0) -> np.ndarray:
    """f64[B]: how much each row needs what it does not have, a exp(-4 load) G D, or 0 where it is sure of its words.

    G = sum_j j / (L - 1) |level_(j+1) - level_j|, j from 1; D = (1 - p) sum over heads of share * heads; a = 0.85. p is
    the `probability` f[B] of a row's token, `words` bool[B] whether it means something (no number, stop word or mark),
    `load` of the device from 0 to 1. A row with p of 0.5 or more needs nothing. Source: ATLAS (2504.01281).
    """
    layers = len(taps.level)
    weight = np.arange(1, layers)[:, None] / max(layers - 1, 1)
    moved = (weight * np.abs(np.diff(taps.level, axis=0))).sum(0)
    doubt = (1 - probability) * (taps.share * taps.heads).sum(1)
    return np.where((probability < 0.5) & words, 0.85 * np.exp(-4 * load) * moved * doubt, 0)


def layer_weights(layers: int) -> np.ndarray:
    """f64[L]: what attention of each layer counts, for layers 1 to L in thirds.

    >>> layer_weights(12).round(3).tolist()
    [0.05, 0.1, 0.15, 0.0, 0.125, 0.25, 0.375, 0.3, 0.225, 0.15, 0.075, 0.0]
    """
    at, third = np.arange(1, layers + 1), layers / 3
    middle = np.where(at < 2 * third, 0.5 * (at - third), 0.3 * (layers - at))
    return np.where(at < third, 0.2 * at, middle) / third


def about(cache: Cache, most: int = 6) -> list[list[int]]:
    """The positions, rising, of the `most` tokens of each row that its newest token looks at: words of a query.

    By the sum over layers of `layer_weights` times the mean over heads. Source: ATLAS (2504.01281), without its
    similarity of hidden states.
    """
    layers, _ = received(cache, 1)
    weights, out = layer_weights(len(layers)), []
    for rows in zip(*layers, strict=True):
        score = np.stack([w * x.mean(0) for w, x in zip(weights, rows, strict=True)]).sum(0)[:-1]
        out.append(sorted(np.argsort(-score, kind="stable")[:most].tolist()))
    return out
