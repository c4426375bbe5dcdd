"""MiKV, ARKV and ZipVL: two precisions by who is looked at, against plain float64 numpy."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.codec_map import decode
from jkv.methods.quantization.mixed_precision import Reaching
from support import rig
from support.rig import CASES, LENGTHS, PARAMS, PROMPT, H, L
from support.scenes import Given, evidence
from support.selections import best, prompt_taps

ROWS = [row[row >= 0].tolist() for row in PROMPT]


def heavy(p: np.ndarray, n: int) -> np.ndarray:
    return p.sum((1, 2))[:, : n - 16]


def indicated(p: np.ndarray, n: int) -> np.ndarray:
    late = p[:, :, -8:, : n - 8]
    score = np.pad((late.mean(2) + 263.81 * late.var(2, ddof=1)).mean(1), ((0, 0), (2, 2)))
    return np.stack([score[:, i : i + n - 8] for i in range(5)]).mean(0)


def looked_at(p: np.ndarray, n: int) -> np.ndarray:
    return np.tile(p[:, :, -16:, : n - 16].sum(2).mean((0, 1)), (H, 1))


def original(layer: int, row: int, n: int) -> tuple[int, int]:
    """ARKV: round(a / max a 40) of 40 tokens, for a = E^(1/7.774) V^(1/5.407) K^(1/5.528) of each layer."""
    asked = []
    for i in range(L):
        p = prompt_taps(i, row)[3].astype(np.float64)[:, :, -8:, :-8]
        off = p - p.mean(2, keepdims=True)
        tails = ((off**4).mean(2) / np.maximum((off**2).mean(2), 1e-8) ** 2).sum()
        entropy, variance = -(p * np.log(p + 1e-10)).sum(), p.var(2, ddof=1).sum()
        asked.append(entropy ** (1 / 7.774) * variance ** (1 / 5.407) * tails ** (1 / 5.528))
    return round(asked[layer] / max(asked) * 40), 40


def fewest(layer: int, row: int, n: int) -> tuple[int, int]:
    """ZipVL: the fewest of n tokens that have 0.6 of what all get."""
    mass = np.sort(looked_at(prompt_taps(layer, row)[3].astype(np.float64), n + 16)[0])[::-1]
    return int(np.searchsorted(np.cumsum(mass), 0.6 * mass.sum())) + 1, n


TIERS = {  # score, bits of the lower tier, tokens of the upper one and of both of n that are no longer recent
    "mikv(keep=0.25, recent=16, bits=2, sinks=0)": (heavy, 2, lambda layer, row, n: (-(-n // 4), n)),
    "arkv(budget=48, window=8, sinks=0)": (indicated, 8, original),
    CASES["zipvl"][0].tight[:-1] + ", sinks=0)": (looked_at, 0, fewest),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", TIERS)
def test_best_tokens_stay_exact_and_next_ones_use_few_bits(text: str):
    score, bits, sizes = TIERS[text]
    cache = rig.prompted(text)
    assert not text.startswith("arkv") or cache.plan[0].block == 13  # a third of 40
    for layer, row in np.ndindex(L, 2):
        n, plan = LENGTHS[row], cache.plan[layer].tiers
        _, k, v, p = prompt_taps(layer, row)
        rank = score(p.astype(np.float64), n)
        exact, held = (best(rank, np.zeros(rank.shape[1], bool), size) for size in sizes(layer, row, rank.shape[1]))
        assert exact.sum() <= held.sum()
        for h in range(H):
            wanted = exact[h], held[h] & ~exact[h]
            for tier, config, want in zip(cache.layers[layer].tiers, plan, wanted, strict=True):
                pos = np.asarray(tier.pos)[row, h % tier.pos.shape[1]]
                assert sorted(pos[pos >= 0]) == np.flatnonzero(want).tolist()
                for codec, code, x in ((config.k, tier.k, k), (config.v, tier.v, v)):
                    got = np.asarray(decode(codec, code))[row, h][pos >= 0]
                    x = x[h, pos[pos >= 0]]
                    low = config is plan[1] and bits > 0
                    step = np.ptp(x, axis=1, keepdims=True) / (2**bits - 1) if low else 0 * x[:, :1]
                    assert (np.abs(got - x) <= step * 0.6 + 0.02 * low + 1e-5).all()


@pytest.mark.parametrize("mass, share, count", [([5, 3, 1, 0.6, 0.4], 0.9, 3), ([1] * 8, 0.5, 4), ([1, 9, 2], 1, 3)])
def test_fewest_tokens_reaching_share_are_requested(mass: list[float], share: float, count: int):
    ev = evidence(np.eye(len(mass) + 1), stay=1)
    given = jnp.asarray([[[*mass, 50.0]]], jnp.float32)  # the recent window counts for nothing
    ev = replace(ev, columns={"given": given})
    assert Reaching(score=Given(), share=share, newest=1).statistic(ev).tolist() == [count]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mikv(keep=0)", "above 0 and at most 1"),
        ("arkv(budget=64, step=0)", "1 or more"),
        ("zipvl(mass=0)", "above 0 and at most 1"),
        ("arkv(budget=64, share=0)", "above 0 and at most 1"),
        ("mikv | int4(group=3)", "does not divide"),
    ],
)
def test_invalid_compositions_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        jkv.prefill(PARAMS, text, ROWS, reserve=16)
