"""Codes in the memory of the host: the cache of the device bit for bit, and none of it in the device's memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import methods, models
from jkv.cache.cache import Cache, device_bytes, host_bytes
from jkv.cache.offload import Pages, near, settled
from jkv.cache.padding import pad
from jkv.cache.resident_pages import RANKS, Hot
from jkv.core import decode_loop, sampling
from jkv.core.compilation import Compiled
from jkv.generation.receipt import moved_bytes, pages_asked
from jkv.methods.compatibility import check
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Code
from support import rig

ONE = models.random(dict(models.TINY, num_hidden_layers=1), 0, jnp.float32)
MODEL = ONE.config
ROWS = [row[row >= 0].tolist()[:n] for row, n in zip(rig.PROMPT, (50, 44), strict=True)]
NEW = 20
QUEST = "quest(pages=3, page=8, dense_layers=0"


def empty(text: str, longest: int = 70, new: int = NEW) -> Cache:
    config = methods.parse(text)
    check(config, MODEL)
    return CacheShape(config, MODEL, len(ROWS), longest, new, jnp.float32).empty()


@jax.jit
def generated(cache: Cache, ids: Any, forced: Any) -> tuple[Any, Cache]:
    """The logits that forced tokens were drawn from, and the cache after them."""
    cache, logits = decode_loop.prefill(ONE, cache, ids, fresh=True)
    state = decode_loop.Decoding.start(cache, logits, NEW, traced=True, forced=forced)
    settings = sampling.make(len(ROWS), MODEL.vocab, seeds=range(len(ROWS)), stop_ids=())
    state = decode_loop.run_blocks.whole(ONE, state, settings, jnp.int32(NEW))
    return state.trace, settled(state.cache)


@cache
def ran(text: str) -> tuple[np.ndarray, Cache]:
    trace, after = generated(empty(text), pad(ROWS, 50), jnp.asarray(rig.FORCED[:, :NEW] % MODEL.vocab))
    return np.asarray(trace), after


def same(text: str, host: str, more: str = "") -> Cache:
    """The cache on the host, once it is seen to be that of the device."""
    (logits, own), (found, far) = ran(text), ran(f"{text[:-1]}, host={host!r}{more})")
    np.testing.assert_array_equal(found, logits)
    for a, b in zip(own.layers, far.layers, strict=True):
        for x, y in zip(a.tiers, b.tiers, strict=True):
            assert isinstance(y.v, Pages) and y.v.lines.data.sharding.memory_kind == "pinned_host"
            assert isinstance(y.k, Pages) == (host == "all") or not jax.tree.leaves(x.k)
            live = (np.asarray(x.pos) >= 0).reshape(-1)
            for p, q in zip(jax.tree.leaves((x.k, x.v)), jax.tree.leaves((near(y.k), near(y.v))), strict=True):
                slots = live.size // (p.shape[0] * p.shape[2])
                shown = np.broadcast_to(live.reshape(p.shape[0], 1, p.shape[2], slots).any(-1), p.shape[:3])
                np.testing.assert_array_equal(np.asarray(p)[shown], np.asarray(q)[shown])
    return far


LEARNS = pytest.param("lrqk(tokens=16, page=8, rank=4)", marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("text", [LEARNS, "icecache(pages=3, page=8, sinks=8)"])
def test_learned_and_arranged_pages_equal_on_host(text: str):
    (logits, _), (found, far) = ran(text), ran(f"{text[:-1]}, host='all', hot=3)")
    np.testing.assert_array_equal(found, logits)
    assert sum(pages_asked(far)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("host", ["values", "all"])
def test_host_codes_equal_device_codes(host: str):
    same(f"int4 | {QUEST})", host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"full | {QUEST})",
        "kivi(group=16, recent=0)",
        f"kivi(group=8, recent=0) | {QUEST})",
        f"fp8 | {QUEST})",
        "gear(group=16, recent=0)",
        f"attentionpredictor(pages=3, {rig.PREDICTOR_TEXT})",
        "alisa(tokens=16, page=8, window=8, recent=16)",
    ],
)
def test_host_codes_of_other_methods_equal_device_codes(text: str):
    same(text, "all")


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["lru", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fifo", "uses"))])
def test_resident_pages_keep_logits_and_are_counted(rank: str):
    far = same(f"int4 | {QUEST})", "all", f", hot=5, hot_by={rank!r}")
    hits, misses = pages_asked(far)
    assert hits > misses > 0 and hits + misses == 2 * NEW * 3 * MODEL.heads * len(ROWS)  # of keys, and of values
    assert 0 < moved_bytes(far, ran=True) < moved_bytes(far)


@pytest.mark.parametrize("rank", RANKS)
def test_resident_page_of_lowest_rank_is_evicted(rank: str):
    """As a list of pages does that a person keeps by hand; what is read are the pages that were asked for."""
    rng, (b, h, slots, pages) = np.random.default_rng(0), (2, 2, 5, 12)
    host = jnp.asarray(rng.integers(0, 256, (b * h, pages, 4)), jnp.uint8)
    bring = jax.jit(lambda hot, asked, alive: hot.bring(asked, alive, lambda head, page: host[head, page]))
    hot, table = Hot.of((b, h, 4), slots, rank), [{} for _ in range(b * h)]  # page: (worth, when it came)
    hits = misses = 0
    for step in range(30):
        asked = np.stack([rng.permutation(pages)[:3] for _ in range(b * h)])
        asked[rng.random(asked.shape) < 0.2] = -1
        alive = np.array([True, step % 7 != 3])
        hot = bring(hot, jnp.asarray(asked.reshape(b, h, 3), jnp.int32), jnp.asarray(alive))
        read = np.asarray(hot.read(jnp.asarray(asked.reshape(b, h, 3), jnp.int32))).reshape(b * h, 3, 4)
        for head, mine in enumerate(table):
            wanted = [x for x in asked[head].tolist() if x >= 0]
            if not alive[head // h]:
                continue
            for page in [x for x in wanted if x in mine]:
                hits += 1
                mine[page] = {"lru": step, "fifo": mine[page], "uses": mine[page] + 1}[rank]
            for page in [x for x in wanted if x not in mine]:
                misses += 1
                if len(mine) == slots:
                    least = min(y for x, y in mine.items() if x not in wanted)
                    assert (gone := set(mine) - set(np.asarray(hot.units).reshape(b * h, -1)[head].tolist()))
                    lost = next(x for x in gone if mine[x] == least)
                    del mine[lost]
                mine[page] = 1 if rank == "uses" else step
            for i, page in enumerate(asked[head]):
                if page >= 0:
                    np.testing.assert_array_equal(read[head, i], host[head, page])
            assert set(mine) == set(np.asarray(hot.units).reshape(b * h, -1)[head].tolist()) - {-1}
    assert (int(hot.hits.sum()), int(hot.misses.sum())) == (hits, misses)


def test_step_and_flush_never_hold_tier_on_device():
    """What a program makes beside its arguments is the index, turned for a product, and what it reads."""
    cache = empty("full | quest(pages=3, page=16, dense_layers=0, host='all')", 2048)
    state = decode_loop.Decoding.start(cache, jnp.zeros((len(ROWS), MODEL.vocab)), NEW)
    settings = sampling.make(len(ROWS), MODEL.vocab, seeds=range(len(ROWS)), stop_ids=())
    step = decode_loop.steps.lower(
        ONE, decode_loop.views(cache), replace(state, cache=cache.bare), settings, jnp.int32(9)
    )
    plan, due = cache.plan[0], jnp.bool_(True)
    flush = decode_loop.flushed_due.lower(cache.layers[0], due, plan, cache.counts, None, model=MODEL)
    for program in (step, flush):
        assert Compiled(program, free=False).made < host_bytes(cache) / 8


def test_dropped_page_is_neither_written_nor_read():
    rng, (b, h, units, unit) = np.random.default_rng(0), (2, 3, 5, 4)
    slots = (rng.integers(0, 256, (b, h, units * unit, 6)), rng.standard_normal((b, h, units * unit, 3)))
    grains = rng.standard_normal((b, h, units * unit // 2, 7))
    code = Code(
        slots=(jnp.asarray(slots[0], jnp.uint8), jnp.asarray(slots[1], jnp.bfloat16)),
        grains=(jnp.asarray(grains, jnp.float32),),
    )
    order = np.stack([rng.permutation(units) for _ in range(b)])[:, None]
    order[1, 0, -1] = units  # this one is dropped

    @jax.jit
    def both(code: Code) -> tuple[Code, Code]:
        pages = Pages.of(code, units).write(jnp.asarray(order), code)
        return near(pages), pages.read(jnp.asarray(order[:, :, :2].repeat(h, 1)))

    whole, two = both(code)
    for leaves in zip(*map(jax.tree.leaves, (code, whole, two)), strict=True):
        own, all_of, some = (np.asarray(x, np.float32) for x in leaves)
        n = own.shape[2] // units
        for row in range(b):
            for i, at in enumerate(order[row, 0]):
                piece = own[row, :, i * n : (i + 1) * n]
                if at < units:
                    np.testing.assert_array_equal(all_of[row, :, at * n : (at + 1) * n], piece)
                if i < 2 and at < units:
                    np.testing.assert_array_equal(some[row, :, i * n : (i + 1) * n], piece)
        (left,) = set(range(units)) - set(order[1, 0].tolist())
        assert not all_of[1, :, left * n : (left + 1) * n].any()


def test_unsupported_host_caches_are_refused():
    def refused(text: str, why: str, model: Any = MODEL) -> None:
        with pytest.raises(ValueError, match=why):
            check(methods.parse(text), model)

    refused("snapkv(budget=32, host='all')", "evicts writes anywhere")
    refused("full(host='disk')", "none, values, all or auto")
    refused("full(host='auto')", "give device_bytes=")
    refused("full(device_bytes=0)", "1 or more")
    refused(f"kivi(group=16, recent=0) | {QUEST}, host='all')", "take page=16")
    refused("full(host='all', hot=4)", "where a selector picks")
    refused(f"int4 | {QUEST}, host='all', hot=4, hot_by='rank')", "lru, fifo, uses")
    with pytest.raises(ValueError, match="a step reads 3 pages"):
        empty(f"int4 | {QUEST}, host='all', hot=2)")
    refused("xkv(layers=1, host='all')", "host do not go with")


def test_missing_host_memory_is_refused_unless_device_fits(monkeypatch):
    monkeypatch.setattr("jkv.methods.compatibility.reachable", lambda: False)
    monkeypatch.setattr("jkv.prompts.allocation.reachable", lambda: False)
    with pytest.raises(ValueError, match="no memory of the host"):
        empty("full(host='all')")
    cache = empty("full(host='auto', device_bytes=10000000)")
    assert not host_bytes(cache)
    with pytest.raises(ValueError, match="device_bytes=1,000;"):
        empty("full(host='auto', device_bytes=1000)")


def test_device_bytes_limit_moves_rest_to_host():
    def on_device(text: str) -> int:
        cache = empty(text)
        return device_bytes((cache.layers, cache.states))

    whole = on_device(f"full | {QUEST})")
    took = []
    for most in (whole, whole - 1, on_device(f"full | {QUEST}, host='all')")):
        cache = empty(f"full | {QUEST}, host='auto', device_bytes={most})")
        assert device_bytes((cache.layers, cache.states)) <= most
        took.append(host_bytes(cache) > 0)
    assert took == [False, True, True]
    with pytest.raises(ValueError, match="recent windows, queries and states"):
        empty(f"full | {QUEST}, host='auto', device_bytes={most - 1000})")
    with pytest.raises(ValueError, match="host='auto'"):
        empty(f"snapkv(budget=48, device_bytes={most // 100})")


def test_pick_put_and_save_keep_host_pages(tmp_path):
    (_, own), (_, far) = ran(f"int4 | {QUEST})"), ran(f"int4 | {QUEST}, host='all')")
    jkv.save_cache(far, tmp_path / "cache", ONE)
    again = jkv.load_cache(tmp_path / "cache", ONE)
    assert again.layers[0].tiers[0].v.lines.data.sharding.memory_kind == "pinned_host"

    @jax.jit
    def swapped(cache: Cache) -> Any:
        cache = cache.put(jnp.array([1, 2]), cache.pick(jnp.array([0, 1])))
        return [(near(x.k), near(x.v)) for x in cache.layers[0].tiers]

    for p, q in zip(*map(jax.tree.leaves, (swapped(own), swapped(again))), strict=True):
        np.testing.assert_array_equal(np.asarray(p)[:, :, :32], np.asarray(q)[:, :, :32])


@pytest.mark.slow
def test_host_cache_of_eight_device_sizes_is_exact():
    rows = [np.random.default_rng(1).integers(0, MODEL.vocab, 440).tolist()]
    most = CacheShape(methods.parse("full"), MODEL, 1, 504, 64, jnp.float32).shapes().nbytes // 8
    own, far = (
        jkv.generate(ONE, text, rows, max_new_tokens=20)
        for text in ("full(recent=0)", f"full(recent=0, block=8, host='auto', device_bytes={most})")
    )
    assert far.tokens == own.tokens
    assert far.receipt.bytes_kept - far.receipt.bytes_host <= most < own.receipt.bytes_kept / 7.9
    assert far.receipt.bytes_host > far.receipt.bytes_moved > 0 and "on the host" in str(far.receipt)
