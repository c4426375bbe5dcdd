"""Scores made of other scores: whatever the inner one declares and does is still there, for every pair of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.arrays.pytree import part
from jkv.attention.evidence import evidence as seen
from jkv.cache.cache import Counts, LayerCache, Observation, Queries, Window
from jkv.cache.empty import empty_layer
from jkv.cache.spec import LayerConfig
from jkv.core import decode_loop, deferred_prefill
from jkv.core.flush import flush
from jkv.io import trained_weights
from jkv.methods.base import Newest, RankBy, Wrapper, rank_by, window_attention
from jkv.methods.budgets.sizes import Tokens
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig, resolve
from jkv.methods.eviction.chunkkv import Groups
from jkv.methods.eviction.compresskv import Lasting
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.position import oldest
from jkv.methods.eviction.queries import Queried
from jkv.methods.eviction.trained_gates import Trained
from jkv.methods.eviction.wrappers import ByPhase, Plus, Several
from jkv.methods.merging.smallkv import Assisted
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.prefill.probes import Probed, Pseudo
from jkv.prompts.allocation import CacheShape
from jkv.protocols import PROBED, Born, Needs, Prefill, Score
from support import rig
from support.rig import MODEL, D, G, H, L
from support.scenes import attending, evidence


def below(kind: type) -> Iterator[type]:
    """Its classes in jkv.methods, bases of several of them aside."""
    for sub in kind.__subclasses__():
        if sub.__module__.startswith("jkv.methods.") and sub not in (Wrapper, Several, Trained, Queried):
            yield sub
        yield from below(sub)


def unique(kinds: Iterator[type]) -> list[type]:
    return sorted(dict.fromkeys(kinds), key=lambda kind: kind.__name__)


def parts(x: Any) -> Iterator[Score]:
    """Every score in a tree of settings."""
    if isinstance(x, Score):
        yield x
    inner = x if isinstance(x, tuple) else [getattr(x, f.name) for f in fields(x)] if is_dataclass(x) else []
    for y in inner:
        yield from parts(y)


@cache
def leaves() -> dict[str, Score]:
    """One of every score that is not made of others: as a composition has it, with its weights, or as it is."""
    known = [s for config in rig.compositions() for s in parts(config.score)]
    functions = {s.fn.__name__: s for s in known if isinstance(s, RankBy)}
    classes = {type(s): s for s in known}
    kinds = [k for k in unique(below(Score)) if not issubclass(k, Wrapper | Several | RankBy)]
    return functions | {kind.__name__: classes[kind] if kind in classes else kind() for kind in kinds}


Make = Callable[[Score], Score]
COMPOSITES: dict[type, tuple[Make, ...]] = {
    Plus: (
        lambda s: Plus(scores=(s, Newest()), weights=(1.0, 0.5)),
        lambda s: Plus(scores=(rank_by(window_attention, queries=5), s), weights=(0.5, 1.0)),
    ),
    ByPhase: (lambda s: ByPhase(score=s, path=Newest()), lambda s: ByPhase(score=Newest(), path=s)),
}
_ROLES = np.random.default_rng(0).uniform(size=(L, H, G)).astype(np.float32)
_ROLES[0, 0, 0] = 1  # the best of all
TABLES: dict[type, dict[str, Any]] = {
    Lasting: {"heads": jnp.asarray(_ROLES), "models": trained_weights.identities(rig.PARAMS)}
}
WRAPPERS = unique(below(Wrapper))
MADE: dict[str, Make] = {kind.__name__: lambda s, kind=kind: kind(score=s, **TABLES.get(kind, {})) for kind in WRAPPERS}
MADE |= {f"{kind.__name__}-{i}": make for kind, makes in COMPOSITES.items() for i, make in enumerate(makes)}
SWITCHES = ("uniform",)
every = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def test_tables_cover_all_scores():
    assert set(unique(below(Several))) == set(COMPOSITES)
    assert {"Protect", "Pool", "AcrossHeads", "Sticky", "Remembered", "Contest"} <= set(MADE)
    assert {"Assisted", "Delayed", "Gated", "Probed", "Ladder", "Keepers", "Salience", "Follower"} <= set(leaves())
    assert {"window_attention", "even_attention", "oldest", "unit_outliers"} <= set(leaves())


def declared() -> set[str]:
    return {name for name in {**vars(Score), **Score.__annotations__} if not name.startswith("_")}


def test_wrapper_bases_forward_every_score_attribute():
    assert declared() - set(vars(Wrapper)) == {"rank"}
    assert declared() - set(vars(Several)) == {"rank", "statistic"}
    for kind in COMPOSITES:
        assert {"rank", "statistic"} <= set(vars(kind))


def test_overrides_keep_signatures_of_score():
    for kind in unique(below(Score)):
        for name in declared() & set(vars(kind)):
            own, base = vars(kind)[name], vars(Score).get(name)
            if inspect.isfunction(base):
                assert inspect.signature(own).parameters.keys() == inspect.signature(base).parameters.keys(), (
                    kind,
                    name,
                )
            else:
                assert not inspect.isfunction(own), (kind, name)


# ---------------------------------------------------------------------------------- a score that declares everything


@part
class Everything(Score):
    """All that a score can declare, at other than the defaults, and a mark of its own on all that it does."""

    asked: int = 3
    mark: float = 1.0

    uniform = False

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.asked, new=True, chunks="none", layer=0)

    def bound(self, params):
        return replace(self, mark=self.mark + 10)

    def for_layer(self, model, layer):
        return replace(self, mark=self.mark + 100)

    def statistic(self, ev):
        return ev.columns["given"][:, 0, 0] * self.mark

    def birth(self, new):
        return {"given": jnp.full(new.k.shape[:3], self.mark)}

    def expires(self, columns, pos, slots=0):
        return jnp.broadcast_to(pos + 7 + slots, columns["given"].shape)

    def observe(self, ev):
        assert ev.kept.pos.shape[1] == self.asked
        return {**ev.columns, "given": ev.columns["given"] + 1}

    def rank(self, ev):
        return jnp.where(
            ev.pos % 5 == 3, -jnp.inf, jnp.where(ev.pos % 5 == 1, jnp.inf, -ev.columns["given"] - 0.1 * k_of(ev))
        )


def k_of(ev) -> jax.Array:
    return ev.window.k[..., 0]


def stubbed(make: Make) -> tuple[Score, Any, np.ndarray]:
    """A score made of Everything, evidence of one kv head and 24 tokens as it would see it, and its inner column."""
    score, n = jax.tree.map(lambda x: x[0, :1], make(Everything()).for_layer(MODEL, 0)), 24
    rng = np.random.default_rng(0)
    at = Born(
        x=jnp.zeros((1, n, 4)),
        k=jnp.zeros((1, 1, n, 4)),
        v=jnp.zeros((1, 1, n, 4)),
        pos=jnp.arange(n)[None],
        ids=jnp.arange(n)[None],
        out=jnp.eye(4),
    )
    ev = evidence(rng.standard_normal((n, 4)), q=rng.standard_normal((1, score.needs.queries, 4)), stay=4)
    ev = replace(ev, limit=jnp.full(1, 12), columns=score.birth(at))
    return score, ev, at


def inner(columns: Any) -> jax.Array:
    return next(x for name, x in columns.items() if name.endswith("given"))


@every
def test_wrappers_forward_declarations(make: Make):
    own, score, at = Everything(), make(Everything()), stubbed(make)[2]
    assert score.needs | own.needs == score.needs
    assert inner(score.bound(rig.PARAMS).birth(at))[0, 0, 0] == 11
    assert inner(score.for_layer(MODEL, 0).birth(at))[0, 0, 0] == 101


@every
def test_wrappers_forward_observe_and_expires(make: Make):
    score, ev, at = stubbed(make)
    after = score.observe(ev)
    assert (inner(after) == 102).all() and after.keys() == ev.columns.keys()
    assert (score.expires(ev.columns, at.pos[:, None], 3) == at.pos[:, None] + 10).all()


@every
def test_wrappers_preserve_infinite_ranks(make: Make):
    score, ev, _ = stubbed(make)
    rank = np.asarray(score.rank(replace(ev, columns=score.observe(ev))))[0, 0]
    assert not np.isnan(rank).any()
    if make not in COMPOSITES[ByPhase][1:]:
        pos, goes = np.arange(24), np.arange(24) < 20
        np.testing.assert_array_equal((rank == -np.inf)[goes], (pos % 5 == 3)[goes])
        assert (rank == np.inf)[goes & (pos % 5 == 1)].all()


# -------------------------------------------------------------------------------------- every wrapper, every score


def test_wrappers_keep_flags_of_every_score():
    for name, make in MADE.items():
        for leaf, own in leaves().items():
            score = make(own)
            assert score.needs | own.needs == score.needs, (name, leaf)
            for switch in SWITCHES:
                assert getattr(score, switch) >= getattr(own, switch), (name, leaf, switch)


def queries_of(plan: LayerConfig, new: int, prompt: bool) -> Observation:
    def some(n: int) -> Queries:
        lse = jnp.zeros((1, H, G, n))
        return Queries(q=jnp.zeros((1, H, G, n, D)), pos=jnp.zeros((1, n), jnp.int32), lse=lse)

    asked = plan.needs.new or (plan.needs.prompt and prompt)
    kept = some(plan.needs.queries) if plan.needs.queries else None
    return Observation(kept=kept, new=some(new) if asked else None)


def window_of(plan: LayerConfig, n: int) -> Window:
    columns = {name: jnp.zeros((1, H, n)) for name in plan.columns}
    return Window(
        k=jnp.zeros((1, H, n, D)), v=jnp.zeros((1, H, n, D)), pos=jnp.zeros((1, n), jnp.int32), columns=columns
    )


def plans(score: Score) -> tuple[LayerConfig, ...]:
    """Of the tiny model; ValueError for what is refused."""
    probed = any(isinstance(x, Probed) for x in parts(score))
    prefill = Deferred(probe=Pseudo()) if probed else Prefill()
    recent = max(8, score.needs.recent)
    config = CacheConfig(score=score, budget=Tokens(tokens=24), recent=recent, block=8, prefill=prefill)
    check(config, MODEL)
    return resolve(config, MODEL, 64, 16)


def at_a_flush(plan: LayerConfig, layers: tuple[LayerCache, ...], prompt: bool) -> jax.Array:
    """What a flush asks of a score of the second layer; below are those before it."""
    n, one = 40 if prompt else plan.recent_size, jnp.full(1, 40, jnp.int32)
    window, asked = window_of(plan, n), queries_of(plan, n if prompt else plan.block, prompt)
    lower = plan.lower(layers[:1])
    counts = Counts(seen=one, prompt=one, later=0 * one)
    ev = seen(layers[1], window, asked, counts, plan, MODEL.attending(1), one, one, prompt, lower)
    assert ev.generating != prompt
    columns = plan.score.observe(ev)
    assert columns.keys() == ev.columns.keys()
    ev = replace(ev, columns=columns)
    return plan.score.rank(ev)


@pytest.mark.parametrize("leaf", leaves(), ids=str)
def test_every_accepted_pair_traces(leaf: str):
    """Traced and not run: an assertion or a shape that does not fit ends it."""
    own = leaves()[leaf]
    for name, make in MADE.items():
        plan = plans(make(own))
        layers = jax.eval_shape(lambda plan=plan: tuple(empty_layer(x, 1, MODEL, jnp.float32) for x in plan))
        for prompt in (True, False) if name in ("ByPhase-0", "ByPhase-1", "Plus-0") else (False,):
            rank = jax.eval_shape(lambda x, plan=plan, prompt=prompt: at_a_flush(plan[1], x, prompt), layers)
            total = sum(t.pos.shape[2] for t in layers[1].tiers) * (not prompt) + (
                40 if prompt else plan[1].recent_size
            )
            heads = (1,) if plan[1].uniform else (H,)
            assert rank.shape == (1, *heads, total) and rank.dtype == jnp.float32, (name, rank)


@every
def test_flush_accepts_every_wrapper(make: Make):
    plan = plans(make(rank_by(window_attention, queries=4)))[0]

    def run(prompt: bool) -> LayerCache:
        layer, one = empty_layer(plan, 1, MODEL, jnp.float32), jnp.full(1, 40, jnp.int32)
        n = 40 if prompt else plan.recent_size
        asked = queries_of(plan, n if prompt else plan.block, prompt)
        counts = Counts(seen=one, prompt=one, later=0 * one)
        return flush(layer, window_of(plan, n), asked, counts, plan, MODEL, prompt)

    for prompt in (True, False):
        jax.eval_shape(lambda prompt=prompt: run(prompt))


# ------------------------------------------------------------------------------------------------------------ several


def test_equal_scores_have_separate_columns():
    score = Plus(
        scores=(Accumulated(), Plus(scores=(Accumulated(decay=0.5), Newest()), weights=(1.0, 0.0))), weights=(1, 1)
    )
    ev = evidence(np.eye(4), q=attending(np.full((4, 4), 0.25)), score=score)
    assert set(ev.columns) == {"0.mass", "1.0.mass"}
    after = score.observe(ev)
    np.testing.assert_allclose(
        after["0.mass"], Accumulated().observe(replace(ev, columns={"mass": jnp.zeros((1, 1, 4))}))["mass"]
    )
    np.testing.assert_allclose(after["1.0.mass"][0, 0], [0.25 * sum(0.5**i for i in range(n)) for n in (4, 3, 2, 1)])


def test_by_phase_uses_score_of_phase():
    ev = evidence(np.eye(6))
    made = [
        ByPhase(score=Newest(), path=rank_by(oldest, uniform=True, newest=1)),
        ByPhase(score=rank_by(oldest, uniform=True, newest=1), path=Newest()),
    ]

    class Late(type(ev)):
        generating = True

    late = Late(**{f.name: getattr(ev, f.name) for f in fields(ev)})
    for x, ranks in ((ev, [0, 4]), (late, [4, 0])):
        assert [int(score.rank(x)[0, 0].argmin()) for score in made] == ranks


def test_layer_below_is_read_under_same_column_name():
    """One of several scores reads what the same one of the layer below remembers."""
    score = Plus(scores=(Newest(), Assisted(queries=4)), weights=(0.0, 1.0))
    plan = plans(score)
    assert [p.columns for p in plan] == [("1.looked",), ("1.looked",)]
    assert plan[0].needs.layer is None and plan[1].needs.layer == 0


def test_probed_score_without_probe_is_refused():
    """Whatever it is part of: without, all of its ranks would be 0."""
    for make in MADE.values():
        config = CacheConfig(score=make(Probed()), budget=Tokens(tokens=24))
        with pytest.raises(ValueError, match="its score reads what a probe finds out, and its prefill has none"):
            resolve(config, MODEL, 64, 16)


def test_probe_fills_column_of_nested_score():
    score = MADE["Plus-1"](MADE["ByPhase-1"](MADE["Counted"](Probed())))
    config = CacheConfig(score=score, budget=Tokens(tokens=24), prefill=Deferred(probe=Pseudo()))
    cache, rows = (
        CacheShape(config.uncompressed(40), MODEL, 1, 40, 0, jnp.float32).empty(),
        jnp.asarray(rig.PROMPT[:1, -40:]),
    )
    cache, _ = decode_loop.prefill(rig.PARAMS, cache, rows, fresh=True)
    cache = deferred_prefill.probe(rig.PARAMS, cache, rows[:, :8], jnp.asarray([[0, 40]]), config.prefill.probe)
    for layer in cache.layers:
        looked, live = np.asarray(layer.recent.columns[f"1.1.{PROBED}"])[0], np.asarray(layer.recent.pos)[0] >= 0
        assert live.sum() == 40 and ((looked > 0) == live).all()


def test_uniform_term_makes_sum_uniform():
    """The heads' own ranks are then averaged: slots of one set hold the same tokens for all."""
    ranks = jnp.asarray(np.random.default_rng(4).standard_normal((1, 2, 6)), jnp.float32)

    @part
    class Two(Score):
        def rank(self, ev):
            return ranks

    ev = evidence(np.eye(6))
    score = Plus(scores=(Newest(), Two()), weights=(0.0, 1.0))
    assert score.uniform and ByPhase(score=Two(), path=Newest()).uniform
    np.testing.assert_allclose(score.rank(ev), ranks.mean(1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(ByPhase(score=Two(), path=Newest()).rank(ev), ranks.mean(1, keepdims=True), atol=1e-6)


def test_followers_follow_same_head_below():
    """Of a group of layers whose heads choose for themselves, every head keeps what it keeps in the layer below."""
    rng = np.random.default_rng(2)
    score = Groups(score=rank_by(window_attention, queries=2), width=2)
    first, second = plans(score)
    assert not second.uniform and second.needs.layer == -1
    layer = empty_layer(first, 1, MODEL, jnp.float32)
    pos = np.stack([rng.permutation(40)[: layer.tiers[0].pos.shape[2]] for _ in range(H)])[None]
    layer = replace(layer, tiers=(replace(layer.tiers[0], pos=jnp.asarray(pos, jnp.int32)),))
    one = jnp.full(1, 40, jnp.int32)
    window = replace(window_of(second, 40), pos=jnp.arange(40)[None])
    above = empty_layer(second, 1, MODEL, jnp.float32)
    counts = Counts(seen=one, prompt=one, later=0 * one)
    ev = seen(above, window, Observation(), counts, second, MODEL.attending(1), one, one, lower=layer)
    rank = np.asarray(second.score.rank(ev))[0]
    for head in range(H):
        np.testing.assert_array_equal(np.flatnonzero(rank[head]), np.sort(pos[0, head]))
