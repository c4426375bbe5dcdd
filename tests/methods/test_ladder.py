"""Rules of place among the kept: the ladder across layers and the contests of a cursor, one step at a time by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.attention.evidence import Evidence
from jkv.methods.base import Protect
from jkv.methods.config import resolve
from jkv.methods.eviction.layered import Contest, Ladder
from jkv.methods.eviction.wrappers import PerQuery
from support.rig import MODEL, L
from support.scenes import Given, evidence


def placed(score, pos: list[int], columns: dict[str, np.ndarray], limit: int, seen: int, width: int):
    """Who stays of the tokens pos (rising) once `limit` may, and their columns; the arrays are `width` wide."""
    pad = lambda x, fill: np.concatenate([x, np.full(width - len(x), fill, np.float32)])  # noqa: E731
    ev = evidence(np.zeros((width, 2)))
    at = jnp.asarray(pad(pos, -1), jnp.int32)[None]
    ev = replace(
        ev, pos=at[:, None], may_go=jnp.ones((1, 1, width), bool), seen=jnp.array([seen]), limit=jnp.array([limit]),
        window=replace(ev.window, pos=at), plan=replace(LADDER, score=score, recent=0),
        columns={name: jnp.asarray(pad(x, np.nan), jnp.float32)[None, None] for name, x in columns.items()},
    )  # fmt: skip
    columns, rank = observed_and_ranked(ev)
    rank = np.where(np.arange(width) < len(pos), np.asarray(rank)[0, 0], -np.inf)
    kept = np.sort(np.argsort(-rank, kind="stable")[: min(limit, len(pos))])
    return [pos[i] for i in kept], {name: np.asarray(x)[0, 0, kept] for name, x in columns.items()}


LADDER = resolve(methods.parse("lacache(budget=48)"), MODEL, 64, 0)[0]


@jax.jit
def observed_and_ranked(ev: Evidence):
    ev = replace(ev, columns=ev.plan.score.observe(ev))
    return ev.columns, ev.plan.score.rank(ev)


def test_ladder_matches_spec():
    after = {}
    for layer in range(2):
        score = Protect(score=Ladder(span=2, sinks=2, layer=layer, layers=4), sinks=2)
        pos, columns = [], {"round": np.zeros(0)}
        for token in range(40):
            pos, columns = [*pos, token], {"round": np.append(columns["round"], 0)}
            pos, columns = placed(score, pos, columns, 16, token + 1, 17)
            after[layer, token] = pos
            assert len(pos) == min(16, token + 1)
    assert after[0, 16] == [0, 1, 2, *range(4, 17)] and after[1, 16] == [0, 1, 3, *range(4, 17)]
    assert after[0, 39] == [0, 1, 2, 10, 18, 24, 28, 30, *range(32, 40)]
    assert after[1, 39] == [0, 1, 9, 17, 23, 27, 29, 31, *range(32, 40)]
    assert len({*after[0, 39], *after[1, 39]}) == 22


def thinned(tokens: list[int], layer: int, size: int, keep: int, gap: int, blocks: int) -> list[int]:
    """The first `blocks` blocks of `size` tokens keep `keep` each, `gap` apart."""
    shift = layer % (size - (keep - 1) * gap)
    chosen = [b * size + shift + gap * i for b in range(blocks) for i in range(keep)]
    return [tokens[i] for i in chosen] + tokens[blocks * size :]


@pytest.mark.parametrize("span, overlap, size, keep", [(2, 0, 2, 1), (2, 1, 3, 2), (1, 0, 4, 1)])
def test_long_prompt_is_thinned_in_one_round(span: int, overlap: int, size: int, keep: int):
    """100 tokens into 16, four layers: what is left over behind the first pass is thinned in `times` rounds at once."""
    for layer in (1, 3):
        score = Protect(score=Ladder(span=span, overlap=overlap, sinks=2, layer=layer, layers=4), sinks=2)
        got, columns = placed(score, list(range(100)), {"round": np.zeros(100)}, 16, 100, 100)
        room, less = 16 - 2 - 4, size - keep
        first = room // keep
        left = thinned(list(range(2, 100)), layer, size, keep, 1, first)
        over = len(left) + 2 - 16
        times = -(-over // (room // keep * less))
        large = size + (times - 1) * (size - 1)
        left = thinned(left, layer, large, keep, times, -(-over // (large - keep)))
        marked = columns["round"][2:] < 0
        assert [x for x, m in zip(got[2:], marked, strict=True) if not m] == left and got[:2] == [0, 1]
        assert len(got) == 16 and times > 1


@pytest.mark.parametrize("c, n, kept", [(4, 12, [3, 7, 9, 11]), (8, 64, [39, 47, 51, 55, 57, 59, 61, 63])])
def test_contest_won_by_newer_tokens_is_a_tree(c: int, n: int, kept: list[int]):
    score = Contest(score=Given(), sinks=0, share=1.0)
    assert placed(score, list(range(n)), {"given": np.zeros(n)}, c, n, n)[0] == kept


def contested(tokens: list[int], value: dict[int, float], sinks: int, c: int, cursor: int, most: int) -> list[int]:
    """One contest at a time, in a list."""
    tokens = list(tokens)
    while len(tokens) > most:
        i = sinks + cursor
        a, b = tokens[i], tokens[i + 1]
        tokens.remove(a if value[a] <= value[b] else b)
        cursor = (cursor + 1) % c
    return tokens


def test_per_query_turns_sum_into_mean():
    ev = replace(evidence(np.eye(4)), columns={"given": jnp.array([[[1.8, 1.3, 0.5, 0.4]]])})
    np.testing.assert_allclose(PerQuery(score=Given()).rank(ev)[0, 0], [0.45, 1.3 / 3, 0.25, 0.4], atol=1e-6)
    local = replace(ev, plan=replace(LADDER, window=2))
    np.testing.assert_allclose(PerQuery(score=Given()).rank(local)[0, 0], [0.9, 0.65, 0.25, 0.4], atol=1e-6)


def test_contests_equal_sequential_reference():
    rng, score = np.random.default_rng(0), Contest(score=Given(), sinks=2, share=0.5)
    for gone in (0, 3, 29):
        for n in (13, 21, 40):
            pos = [0, 1, *np.sort(rng.choice(np.arange(2, n + gone), n - 2, replace=False)).tolist()]
            mass = rng.integers(0, 9, n).astype(np.float32)  # some are equal
            got, _ = placed(score, pos, {"given": mass}, 12, n + gone, 40)
            value = dict(zip(pos, mass, strict=True))
            assert got == contested(pos, value, 2, 6, gone % 6, 12)


def test_ladder_is_bound_to_layer_and_must_evict():
    plans = resolve(methods.parse("lacache(budget=48)"), MODEL, 64, 0)
    assert [p.score.score.layer for p in plans] == [0, 1] and plans[0].score.score.layers == L
    with pytest.raises(ValueError, match="span=2 and overlap=0 in a model of 2 layers leave nothing out"):
        resolve(methods.parse("lacache(budget=48, span=2)"), MODEL, 64, 0)
