"""Laws of reading and writing tiers, over every tier that compositions of the catalogue make."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.attention import tier_attention
from jkv.attention.mask import causal
from jkv.attention.selection import look, picked
from jkv.attention.tier_attention import attend_tier, gathered, tier_dot
from jkv.attention.tier_index import reach
from jkv.cache.cache import Tier
from jkv.cache.codec_map import decode, encode, fit
from jkv.cache.empty import empty_tier
from jkv.cache.spec import LayerConfig, TierConfig
from jkv.core.merge import Newcomers
from jkv.core.slot_writes import admit
from jkv.methods import METHODS, parse
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig, resolve
from jkv.methods.eviction.keys import KeyNorm
from jkv.methods.quantization.calibrated import Centered, Principal, Sorted
from jkv.methods.quantization.float4 import Float4
from jkv.methods.quantization.float8 import Float
from jkv.methods.quantization.gear import Gear
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.ksort import Bfp
from jkv.methods.quantization.kvquant import Sensitive
from jkv.methods.quantization.kvtc import Transformed
from jkv.methods.quantization.lowrank import LowRank
from jkv.methods.quantization.nsnquant import Nsn
from jkv.methods.quantization.per_channel_scale import Separable
from jkv.methods.quantization.per_prompt import OfPrompt
from jkv.methods.quantization.polar import Polar
from jkv.methods.quantization.rotation import Rotated
from jkv.methods.quantization.sparse import Sparse
from jkv.methods.quantization.think import Thinned
from jkv.methods.quantization.vidkv import Mixed, Ternary
from jkv.methods.selection.proxy_keys import Proxies
from jkv.methods.selection.quest import PageBound
from jkv.methods.selection.sentences import ENDS, START
from jkv.protocols import Codec, Queries, Selector
from support import rig
from support.looks import entered
from support.rig import CASES, LONGEST, MODEL, STEPS, D, G, H, L

PAGES = (1, 12)  # of slots that share a scale: one, and a part that ends inside another one's
ROPE, ROWS = replace(MODEL.ropes[0], longest=1 << 16), 2  # a tier of two whole units is longer than the context
ROOMY = replace(MODEL, context=1 << 16)  # for the budgets and windows of all rows
SELECTORS = [parse(CASES[method.name][0].tight).select for method in METHODS.values() if "select" in method.axes]
SELECTORS = [getattr(x, "select", x) for x in SELECTORS]  # without what is around one
SELECTORS = list({type(x): x for x in SELECTORS if not x.arranges}.values())  # one of each kind that any codec takes
KNOWN = ("mass", START, ENDS)  # columns that selectors ask for
Kind = tuple[Codec, Codec, str]  # of keys, of values, and when keys are rotated


def form(*codecs: Codec) -> Any:
    """Codecs but for what their arrays hold."""
    return jax.tree.structure(codecs)


@cache
def picked_from() -> tuple[list[tuple[Kind, list[TierConfig]]], list[tuple[CacheConfig, str]]]:
    """Tiers that may be read by pages: their codecs, with every selector and page; and what is refused, and why.

    Keys are stored rotated and, in every codec, of values too, before the rotation.
    """
    found: dict[Any, tuple[Kind, dict[tuple[str, int], TierConfig]]] = {}
    refused = []
    for config in rig.compositions():
        check(replace(config, select=None), ROOMY)
        for select in (replace(x, unit=page, pages=10_000) for x in SELECTORS for page in PAGES):
            picks = replace(config, select=select)
            try:
                check(picks, ROOMY)
            except ValueError as error:
                refused.append((picks, str(error)))
                continue
            for k, v in map(picks.codecs, picks.tiers):
                k, v = (jax.tree.map(lambda x: x[:1], x).for_layer(MODEL, 0) for x in (k, v))  # of one layer
                # one codec of values will do
                known = {form(of_k): of_v for (of_k, of_v, rope), _ in found.values() if rope == "read"}
                for kind in (k, v, "write"), (k, known.get(form(k), v), "read"), (v, known.get(form(v), v), "read"):
                    tier = tier_of(kind, lcm(*(x.grain for x in kind[:2]), select.unit), select)
                    tiers = found.setdefault((form(*kind[:2]), kind[2]), (kind, {}))[1]
                    tiers[type(select).__name__, select.unit] = tier
    return [(kind, list(tiers.values())) for kind, tiers in found.values()], refused


def tier_of(kind: Kind, unit: int, select: Selector | None) -> TierConfig:
    k, v, rope = kind
    select = select and select.for_layer(MODEL, L - 1)
    sized = dict(capacity=unit, most=unit, share=None, unit=unit, evicts=True, kernels="xla", lender=0, together=1)
    return TierConfig(k=k, v=v, rope=rope, select=select, **sized)  # type: ignore[arg-type]


def filled(config: TierConfig, plan: LayerConfig, seed: int = 0) -> Tier:
    """A tier of random tokens in random slots, some of them dead."""
    rng, c = np.random.default_rng(seed), config.capacity
    pos = np.stack([rng.permutation(c) for _ in range(ROWS * H)]).reshape(ROWS, H, c).astype(np.int32)
    pos[rng.random(pos.shape) < 0.2] = -1
    pos[:, :, : config.unit] = -1

    @jax.jit
    def written(k: jax.Array, v: jax.Array, pos: jax.Array) -> Tier:
        stored = k if not config.pre_rope else ROPE.rotate(k, pos, inverse=True)
        tier = empty_tier(config, plan, ROWS, MODEL, jnp.float32)
        tier = replace(tier, taught=(fit(config.k, stored, pos >= 0), fit(config.v, v, pos >= 0)))
        own = config.of(tier)
        return replace(tier, k=encode(own.k, stored), v=encode(own.v, v), pos=pos, columns={})

    return written(*rng.standard_normal((2, ROWS, H, c, D)).astype(np.float32), pos)


def plain(config: TierConfig) -> LayerConfig:
    plan = resolve(CacheConfig(score=KeyNorm()), MODEL, LONGEST, STEPS)[0]
    return replace(plan, columns=KNOWN, tiers=(config,))


KINDS = picked_from()[0]


def named(i: int) -> str:
    k, v, rope = KINDS[i][0]
    return "-".join(map(str, (*jax.tree.map(lambda _: "array", (k, v)), rope)))


def each() -> list[Any]:
    """All kinds; those whose types of codecs were there before, with other numbers, are slow."""
    out, seen = [], set()
    for i, (kind, _) in enumerate(KINDS):
        types = tuple((type(x), type(getattr(x, "inner", None))) for x in kind[:2])
        out.append(pytest.param(i, marks=[pytest.mark.slow] * (types in seen), id=named(i)))
        seen.add(types)
    return out


def in_turn(kind: int) -> list[TierConfig]:
    """The tiers of a kind, with pages of both sizes, by one of the selectors; the next kind's are by the next one."""
    configs = KINDS[kind][1]
    assert len(configs) == len(SELECTORS) * len(PAGES)
    turn = type(SELECTORS[kind % len(SELECTORS)])
    return [x for x in configs if type(x.select) is turn]


@pytest.mark.parametrize("kind", each())
def test_attention_over_all_pages_equals_whole_tier(kind: int):
    """By the selectors in turn: what all pages are does not depend on who names them."""
    configs = in_turn(kind)
    capacity = 2 * lcm(*(config.unit for config in configs))
    configs = [replace(config, capacity=capacity) for config in configs]
    q = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, H, G, 1, D)), jnp.float32)
    q_pos = jnp.full((ROWS, 1), capacity // 2, jnp.int32)  # half of the tokens are yet to come
    tier = filled(replace(configs[0], select=None, unit=capacity // 2), plain(configs[0]))

    @jax.jit
    def read(tier: Tier) -> list[jax.Array]:
        blank = [empty_tier(config, plain(config), ROWS, MODEL, jnp.float32) for config in configs]
        every = [(tier, replace(configs[0], select=None))]
        every += [
            (replace(tier, summary=x.summary, memo=x.memo), config) for x, config in zip(blank, configs, strict=True)
        ]
        columns = {name: jnp.zeros((ROWS, H)) for name in KNOWN}
        pages = [picked(q, q_pos, columns, *one, ROPE)[0] for one in every]
        both = zip(every, pages, strict=True)
        return [attend_tier(q, causal(q_pos, None), *one, ROPE, D**-0.5, x).finish() for one, x in both]

    whole, *paged = read(tier)
    for config, got in zip(configs, paged, strict=True):
        np.testing.assert_allclose(got, whole, atol=1e-5, err_msg=str(config.select))


def test_unsupported_page_selection_is_refused_with_reason():
    found, refused = picked_from()
    keys = {rope: {type(k) for (k, _, of_k), _ in found if of_k == rope} for rope in ("write", "read")}
    both = {Affine, Centered, Dense, Float, Float4, Gear, LowRank, Mixed, Nsn, OfPrompt}
    both |= {Polar, Principal, Rotated, Sensitive, Sorted, Sparse, Thinned, Transformed}
    assert keys == {"write": both, "read": both | {Bfp, Separable, Ternary}}
    for config, why in refused:
        select = type(config.select).__name__
        assert ("leave out" in why and select in why) or "selection of pages" in why, why


def newcomers(config: TierConfig, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random keys and values f32[B,H,C,D], and their positions i32[B,H or 1,C], the first unit dead.

    Positions are far from slots: what is said of keys must not depend on where they lie.
    """
    rng, c = np.random.default_rng(seed), config.capacity
    pos = np.stack([rng.permutation(4 * c)[:c] for _ in range(ROWS * H)]).reshape(ROWS, H, c).astype(np.int32)
    k, v = rng.standard_normal((2, ROWS, H, c, D)).astype(np.float32)
    heads = 1 if max(config.k.heads, config.v.heads) > 1 else H
    return k, v, np.where(np.arange(c) < config.unit, -1, pos)[:, :heads]


def admitted(config: TierConfig, k: jax.Array, v: jax.Array, pos: jax.Array) -> tuple[Tier, jax.Array]:
    """A tier into which newcomers have come, and their rotated keys by slot."""
    c, u = config.capacity, config.unit
    k, index = ROPE.rotate(k, pos), jnp.broadcast_to(jnp.arange(c), pos.shape)
    columns = {name: jnp.zeros(k.shape[:3]) for name in plain(config).columns}
    new = Newcomers(k=k, v=v, pos=pos, rank=jnp.zeros(pos.shape), columns=columns, index=index)
    units = jnp.broadcast_to(jnp.arange(1, c // u), (*pos.shape[:2], c // u - 1))
    tier = empty_tier(config, plain(config), ROWS, MODEL, jnp.float32)
    asked = Queries(q=k[:, :, None], pos=jnp.broadcast_to(jnp.arange(c), (ROWS, c)), lse=jnp.zeros((ROWS, H, 1, c)))
    return admit(tier, new, units, index[:, :, u:], config, ROPE, queries=asked), k


@pytest.mark.parametrize("kind", each())
def test_page_summaries_are_of_rotated_keys(kind: int):
    """By the selectors in turn: what the keys are does not depend on who asks; of dense keys by all."""
    dense = isinstance(KINDS[kind][0][0], Dense)
    configs = [x for x in (KINDS[kind][1] if dense else in_turn(kind)) if x.select.unit == PAGES[-1]]
    configs = [replace(x, capacity=3 * x.unit) for x in configs]
    assert len(configs) == (len(SELECTORS) if dense else 1)

    @jax.jit
    def summaries(given: list[tuple[jax.Array, jax.Array, jax.Array]]) -> list[tuple[object, object]]:
        out = []
        for config, new in zip(configs, given, strict=True):
            tier, k = admitted(config, *new)
            pages = k.reshape(ROWS, H, -1, config.select.unit, D)
            new = entered(pages, memo=tier.memo, **{name: jnp.zeros(pages.shape[:4]) for name in KNOWN})
            out.append((tier.summary, config.select.summarize(new)))
        return out

    for config, (got, want) in zip(configs, summaries(list(map(newcomers, configs))), strict=True):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            live = slice(config.unit // config.select.unit, None)
            x, y = (np.asarray(z, np.float32)[:, :, live] for z in (x, y))
            # products of keys, which are kept in bfloat16, may round to either side
            kind = dict(rtol=2**-7, atol=0) if isinstance(config.select, Proxies) else dict(rtol=0, atol=0)
            np.testing.assert_allclose(x, y, err_msg=str(config.select), **kind)


@pytest.mark.parametrize("page", [1, 2])
@pytest.mark.parametrize("rope", ["write", "read"])
def test_page_bound_is_upper_bound_of_logits(rope: str, page: int):
    select = PageBound(unit=page, pages=2)
    config = replace(tier_of((Dense(), Dense(), rope), 4, select), capacity=48)
    tier = admitted(config, *map(jnp.asarray, newcomers(config)))[0]
    q = jnp.asarray(np.random.default_rng(5).standard_normal((ROWS, H, G, 1, D)), jnp.float32)
    q = ROPE.rotate(q, jnp.full((1, 1, 1, 1), 300))
    logits = np.asarray(tier_dot(q.reshape(ROWS, H, G, D), tier, config, ROPE, "k")).max(2)
    best = logits.reshape(ROWS, H, -1, page).max(-1)[:, :, 4 // page :]  # without the dead unit
    seen = look(q, jnp.full((ROWS, 1), 300), {}, tier, config, ROPE)
    bound = np.asarray(config.select.score(seen)).max(2)[:, :, 4 // page :] * D**0.5
    assert (bound >= best - 1e-5).all()
    if page == 1:
        np.testing.assert_allclose(bound, best, atol=1e-5)


MELTING = [CASES[method.name][-1].tight for method in METHODS.values() if method.filled.get("merge")]


@pytest.mark.slow
@pytest.mark.parametrize("text", MELTING, ids=lambda text: text.replace(rig.FOLDER.name, "tiny"))
def test_page_summaries_follow_merged_keys(text: str):
    """After flushes: no selector remembers keys that a merge has changed since."""
    text = f"{text} | quest(pages=3, page=4, dense_layers=0)"
    try:
        check(parse(text), ROOMY)
    except ValueError as error:
        assert "leave out one" in str(error)
        return
    cache = rig.run(text, forced=rig.FORCED[:, :34]).caches[-1]
    for layer, plan in zip(cache.layers, cache.plan, strict=True):
        (tier,), (config,) = layer.tiers, plan.tiers
        keys = decode(config.k, tier.k).reshape(ROWS, H, -1, config.select.unit, D)
        made = config.select.summarize(entered(keys))
        live = (np.broadcast_to(tier.pos, (ROWS, H, tier.pos.shape[2])).reshape(keys.shape[:4]) >= 0).all(-1)
        assert live.any()
        for got, want in zip(jax.tree.leaves(tier.summary), jax.tree.leaves(made), strict=True):
            np.testing.assert_allclose(np.asarray(got)[live], np.asarray(want)[live], atol=1e-6)


LONG = replace(tier_of((Affine(bits=4), Affine(bits=2), "write"), 1, None), capacity=5001, most=5001)


def attended(q: jax.Array, tier: Tier) -> jax.Array:
    return attend_tier(q, causal(jnp.full((ROWS, 1), 2500), None), tier, LONG, ROPE, 0.3).finish()


@pytest.mark.parametrize("size", [512, 2501])
def test_tiled_tier_attention_matches_reference(size: int, monkeypatch):
    """Ten of them, or the two of a GPU, the last moved back; beside softmax over the decoded tier, in float64."""
    monkeypatch.setattr(tier_attention, "tile_sizes", lambda *_: (size, size))
    tier = filled(LONG, plain(LONG))
    q = np.random.default_rng(1).standard_normal((ROWS, H, G, 1, D)).astype(np.float32)
    got = jax.jit(lambda q, t: attended(q, t))  # of its own: another size is another program
    k, v = (np.asarray(decode(codec, x), np.float64) for codec, x in ((LONG.k, tier.k), (LONG.v, tier.v)))
    logits = np.einsum("bhgtd,bhnd->bhgtn", q, k) * 0.3
    pos = np.asarray(tier.pos)[:, :, None, None]
    p = np.where((pos >= 0) & (pos <= 2500), np.exp(logits - logits.max(-1, keepdims=True)), 0)
    want = np.einsum("bhgtn,bhnd->bhgtd", p / p.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got(jnp.asarray(q), tier), want, atol=1e-5)


@pytest.mark.parametrize(("platform", "size"), [("cpu", 512), ("tpu", 512), ("cuda", 2501), ("rocm", 2501)])
def test_tier_tiles_are_larger_on_gpu(platform: str, size: int):
    """Each turn of the loop is a dozen launches there; a CPU's caches hold a small one."""
    tier = jax.eval_shape(lambda: filled(LONG, plain(LONG)))
    q = jax.ShapeDtypeStruct((ROWS, H, G, 1, D), jnp.float32)
    text = jax.jit(attended).trace(q, tier).lower(lowering_platforms=(platform,)).as_text()
    assert {n for n in (512, 2501) if f"tensor<{ROWS}x{H}x{n}x" in text} == {size}


def test_last_page_may_be_partial():
    """Of 11 slots in pages of 4; what is missing is dead, and what is there is as it was."""
    (tier,) = resolve(CacheConfig(select=PageBound(unit=4, pages=2)), MODEL, 27, 0)[0].tiers
    k, pos = np.random.default_rng(0).normal(0, 1, (1, H, 11, D)).astype(np.float32), np.arange(11)[None, None]
    code = encode(tier.k, jnp.asarray(k))
    held = Tier(k=code, v=code, pos=jnp.asarray(pos, jnp.int32), columns={}, at=None, head=None, summary=None)
    np.testing.assert_array_equal(np.stack(reach(held, 4, H))[:, 0, 0], [[0, 4, 8], [3, 7, 10]])
    copy, at = gathered(jnp.broadcast_to(jnp.asarray([2, 0]), (1, H, 2)), held, held.pos, tier)
    np.testing.assert_array_equal(copy.pos[0, 0], [8, 9, 10, -1, 0, 1, 2, 3])
    there = np.asarray(copy.pos[0, 0]) >= 0
    np.testing.assert_array_equal(decode(tier.k, copy.k)[:, :, there], k[:, :, [8, 9, 10, 0, 1, 2, 3]])
