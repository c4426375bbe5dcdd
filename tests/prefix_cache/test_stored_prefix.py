"""Prompts that are read through a store end as those that are read whole: the same tokens kept, the same logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.attention.dequantization import dequantize
from jkv.batch.job import Job
from jkv.batch.run import run
from jkv.cache.cache import Cache
from jkv.io import load as loading
from jkv.methods import parse
from jkv.prefix_cache.prefix import refusal
from jkv.prefix_cache.stored_prefix import StoredPrefixes
from jkv.prompts.allocation import CacheShape
from support import commands, rig
from support.speaking import TINY, byte_tokenizer

PARAMS = jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32)
OTHER = jkv.models.random(TINY | dict(num_hidden_layers=1), 1, jnp.float32)
RNG = np.random.default_rng(3)
LONG = RNG.integers(0, 256, 250).tolist()
SHORT, FORKED = LONG[:196], [*LONG[:140], *RNG.integers(0, 256, 80).tolist()]
SNAP, NOTED = "snapkv(budget=48, window=8) | int4", "keydiff(budget=48)"


def positions(cache: Cache) -> list[list[int]]:
    tiers = [tier for layer in cache.layers for tier in layer.tiers]
    return [np.sort(np.asarray(tier.pos)).ravel().tolist() for tier in tiers]


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("full", NOTED)]  # a compilation each


@pytest.mark.parametrize("cache", [SNAP, *SLOW])
def test_prefix_cache_hit_equals_cold_prefill(tmp_path: Path, cache: str):
    """A new one, one that was there, a shorter one, whose last queries a score may need, and one that leaves it."""
    store, short = jkv.PrefixCache(tmp_path), 128 if cache == SNAP else 192
    for prompt, there in ((LONG, 0), (LONG, 192), (SHORT, short), (FORKED, 128)):
        want, logits = jkv.prefill(PARAMS, cache, [prompt], reserve=16, chunk=0)
        before = store.reused
        got, same = jkv.prefill(PARAMS, cache, [prompt], reserve=16, chunk=0, prefix_cache=store)
        assert store.reused - before == there
        assert positions(got) == positions(want) and got.seen.tolist() == got.prompt.tolist() == [len(prompt)]
        np.testing.assert_allclose(same, logits, atol=1e-4)


def found(store: jkv.PrefixCache, cache: str, prompt: list[int]) -> int:
    """Tokens of a prompt that a store had, whose cache and logits are those of one that is read."""
    want, logits = jkv.prefill(PARAMS, cache, [prompt], reserve=16, chunk=0)
    before = store.reused
    got, same = jkv.prefill(PARAMS, cache, [prompt], reserve=16, chunk=0, prefix_cache=store)
    assert positions(got) == positions(want)
    np.testing.assert_allclose(same, logits, atol=1e-5)
    return store.reused - before


@pytest.mark.parametrize(("cache", "there"), [("full", 224), pytest.param(SNAP, 64, marks=pytest.mark.slow)])
def test_next_turn_reuses_uncompressed_answer(tmp_path: Path, cache: str, there: int):
    """129 tokens and 100 of an answer, for every cache; a turn that leaves the answer has what is before that."""
    store, how = jkv.PrefixCache(tmp_path), dict(max_new_tokens=100, stop_ids=())
    said = jkv.generate(PARAMS, cache, LONG[:129], prefix_cache=store, **how).tokens
    assert said == jkv.generate(PARAMS, cache, LONG[:129], **how).tokens
    assert found(store, "full", [*LONG[:129], *said, 7, 8, 9]) == there
    if there == 224:
        assert found(store, SNAP, [*LONG[:129], *said, *LONG[:9]]) == 192 + 32
        assert found(store, "full", [*LONG[:129], *said[:80], 7, 8, 9]) == 192


def kept(case: rig.Case) -> bool:
    config = case.config.bound(case.params)
    return not refusal(config, CacheShape(config, case.params.config, 1, 64, 0, jnp.float32).shapes())


@pytest.mark.slow
@pytest.mark.parametrize("case", rig.ALL, ids=str)
def test_every_composition_with_store_equals_cold_prefill(tmp_path: Path, case: rig.Case):
    """The same tokens kept, and the same logits, of a prompt whose beginning another had; what is refused reads it."""
    store, rng = jkv.PrefixCache(tmp_path), np.random.default_rng(8)
    first, other = rng.integers(0, 100, 150).tolist(), rng.integers(0, 100, 60).tolist()
    jkv.prefill(case.params, case.tight, [first], reserve=16, chunk=0, prefix_cache=store)
    prompt = [*first[:100], *other]
    want, logits = jkv.prefill(case.params, case.tight, [prompt], reserve=16, chunk=0)
    got, same = jkv.prefill(case.params, case.tight, [prompt], reserve=16, chunk=0, prefix_cache=store)
    assert store.reused == (64 if kept(case) else 0)
    for a, b in zip(dequantize(got), dequantize(want), strict=True):
        np.testing.assert_array_equal(a.here, b.here)
    np.testing.assert_allclose(same, logits, atol=1e-5)


def test_prefixes_are_shared_across_rows_and_caches(tmp_path: Path):
    """Ragged rows, one of them too short for a block; what a method notes of a token is not another's."""
    store, rows = jkv.PrefixCache(tmp_path), [LONG, FORKED, LONG[:20]]
    want = jkv.generate(PARAMS, SNAP, rows, max_new_tokens=6)
    jkv.prefill(PARAMS, "full", [LONG], prefix_cache=store)
    got = jkv.generate(PARAMS, SNAP, rows, max_new_tokens=6, prefix_cache=store)
    assert got.tokens == want.tokens and got.receipt.tokens_stored == 192 + 128 and want.receipt.tokens_stored is None
    assert "store        320 of 490 prompt tokens were there" in str(got.receipt)
    salted = jkv.PrefixCache(tmp_path, salt="a tenant")
    for params, other, cache in ((PARAMS, salted, "full"), (OTHER, store, "full"), (PARAMS, store, NOTED)):
        before = other.reused
        jkv.prefill(params, cache, [LONG], prefix_cache=other)
        assert other.reused == before
    files = len(list(tmp_path.iterdir()))
    refused = jkv.prefill(PARAMS, "h2o(budget=48)", [LONG], prefix_cache=store)
    np.testing.assert_array_equal(refused[1], jkv.prefill(PARAMS, "h2o(budget=48)", [LONG])[1])
    assert len(list(tmp_path.iterdir())) == files
    with pytest.raises(TypeError, match="give a jkv.PrefixCache"):
        jkv.prefill(PARAMS, "full", [LONG], prefix_cache="folder")  # type: ignore[arg-type]


def test_lossy_hit_equals_codec_round_trip(tmp_path: Path):
    """A prompt that is found: as the codec coded it, and in a store of exact records that were rounded by it."""
    exact, rounded = jkv.PrefixCache(tmp_path / "a"), jkv.PrefixCache(tmp_path / "b")
    coded = jkv.PrefixCache(tmp_path / "c", codec="cachegen")
    for store in (exact, coded):
        jkv.prefill(PARAMS, SNAP, [LONG], prefix_cache=store)
    root, codec = StoredPrefixes(exact, PARAMS, parse(SNAP)).root, coded.codec
    held = exact.match(root, LONG[:192])
    rounded.put(root, LONG[:192], lambda i: codec.decode(codec.encode(held[i])))
    found = jkv.generate(PARAMS, SNAP, LONG, max_new_tokens=1, prefix_cache=coded)
    want = jkv.generate(PARAMS, SNAP, LONG, max_new_tokens=1, prefix_cache=rounded)
    np.testing.assert_array_equal(found.logits, want.logits)
    assert not np.array_equal(
        want.logits, jkv.generate(PARAMS, SNAP, LONG, max_new_tokens=1, prefix_cache=exact).logits
    )
    assert "store        192 of 250 prompt tokens were there, rounded by cachegen(level=2)" in str(found.receipt)
    assert found.receipt.exactness.endswith("; what was stored rounded by cachegen(level=2)")
    refused = jkv.generate(PARAMS, SNAP, LONG[:9], max_new_tokens=1, prefix_cache=coded).receipt
    assert (refused.tokens_stored, refused.store_codec, refused.exactness) == (0, "", want.receipt.exactness)
    assert str(want.receipt).endswith("192 of 250 prompt tokens were there")


def test_job_and_command_use_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"tokens": x, "max_new_tokens": 5}) + "\n" for x in (LONG, SHORT, FORKED)))
    store = jkv.PrefixCache(tmp_path / "store")
    job = Job(source=source, out=tmp_path / "out", params=PARAMS, config=parse("full"), batch=2, prefix_cache=store)
    report = run(job, lambda: False, lambda *_: None)
    want = jkv.generate(PARAMS, "full", [LONG, SHORT, FORKED], max_new_tokens=5).tokens
    (path,) = (tmp_path / "out").glob("rows-*.jsonl")
    got = {x["line"]: x["tokens"] for x in map(json.loads, path.read_text().splitlines())}
    assert [got[i] for i in (1, 2, 3)] == want and report.saved == store.reused == 192 + 128
    source.write_text(json.dumps({"tokens": [*LONG, *want[0], 7, 8], "max_new_tokens": 1}))
    assert run(replace(job, out=tmp_path / "next"), lambda: False, lambda *_: None).saved == 240  # of 250, and 5
    params = replace(PARAMS, tokenizer=byte_tokenizer())
    monkeypatch.setattr(loading, "load", lambda *_: params)
    command = ("generate", "a" * 150, "--no-chat", "--cache", "full", "--max-new-tokens", 2, "--json")
    said = [commands.call(*command, "--prefix-cache", tmp_path / "store") for _ in range(2)]
    assert [json.loads(x.stdout)["report"]["tokens_stored"] for x in said] == [0, 144]  # the answer too
    commands.refused(
        commands.call(*command, "--prefix-cache", tmp_path / "store", "--prefix-cache-bytes", "much"), "bytes='much'"
    )
    commands.refused(commands.call(*command, "--prefix-cache-codec", "cachegen"), "give --prefix-cache too")


def test_methods_updated_by_later_queries_are_refused():
    """Not where a prompt is compressed once it was read, or where its last queries alone are asked."""
    asked = ("criticalkv", "rkv", "utility", "simlayerkv", "h2o", "smallkv")
    assert [name for name in asked if not kept(rig.CASES[name][0])] == ["h2o", "smallkv"]
