"""Measurements against plain attention, and answers through caches that hold everything, and through broken ones."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.attention.dequantization import dequantize
from jkv.cache.cache import Cache, LayerCache
from jkv.core.decode_loop import step
from jkv.eval import attention_recall, experiments, quality, tasks
from jkv.eval.quality import Fidelity, Texts
from jkv.eval.tasks import scbench
from jkv.generation.receipt import divergence
from jkv.io import trained_weights
from jkv.io.load import load
from jkv.methods import METHODS, parse
from jkv.prompts.allocation import CacheShape
from support import tiny
from support.speaking import PARAMS, byte_tokenizer

IDS = np.random.default_rng(0).integers(0, 256, (3, 200)).astype(np.int32)
PREFIX = 110


forward = jax.jit(models.forward)


def plain(ids):
    """Logits f32[n,N,V] that plain attention predicts what follows the prefix with."""
    pos = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    return np.asarray(forward(PARAMS, jnp.asarray(ids), pos))[:, PREFIX - 1 : -1]


def nll(logits, ids):
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(p, ids[:, PREFIX:, None], -1))[..., 0]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_full_cache_perplexity_equals_model(batch):
    found = quality.perplexity(PARAMS, parse("full"), Texts(IDS, PREFIX, batch=batch))
    by_text = nll(plain(IDS), IDS).mean(1)
    np.testing.assert_allclose(found["nll"], by_text.mean(), atol=2e-5)
    np.testing.assert_allclose(found["ppl"], np.exp(by_text.mean()), rtol=2e-5)
    np.testing.assert_allclose(found["nll_se"], by_text.std() / np.sqrt(3), atol=2e-5)
    assert found["kept"] == 1 and found["bytes_full"] == PREFIX * 2 * 2 * 2 * 16 * 4


def test_usage_counts_only_reachable_window_slots():
    """And not for the whole period of a method that cuts what it generates."""
    config = parse("rpc(window=3, period=1000)")
    cache, _ = jkv.prefill(PARAMS, config, IDS[:, :PREFIX].tolist(), reserve=16)
    found = quality.mean(quality.measure_usage(PARAMS, config, cache))
    assert found.kept == 1 and found.bytes < 1.5 * found.bytes_full


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_bytes_are_batch_invariant(batch, monkeypatch):
    config, lengths = parse("snapkv(keep=0.25)"), [200, 60, 120, 60, 330]

    def generate(params, config, rows, max_new_tokens):
        n = jnp.asarray([*map(len, rows)])
        cache = CacheShape(config, PARAMS.config, len(rows), int(n.max()), 16, jnp.float32).empty()
        return SimpleNamespace(text=[""] * len(rows), cache=replace(cache, counts=replace(cache.counts, seen=n)))

    monkeypatch.setattr(quality, "generate", generate)
    _, held = quality.answer(PARAMS, config, [([1] * n, []) for n in lengths], 16, True, batch)
    found = quality.mean(held)
    alone = [CacheShape(config, PARAMS.config, 1, n, 0, jnp.float32).empty().nbytes for n in lengths]
    assert (found.context, found.bytes, found.bytes_full) == (154, sum(alone) // 5, 154 * 2 * 2 * 2 * 16 * 4)


def test_fidelity_is_perfect_for_full_but_not_evicting_cache():
    beside = Fidelity(PARAMS, Texts(IDS, PREFIX, batch=2))
    full, own = (beside(parse(x), layers=True) for x in ("full", "snapkv(budget=48, window=8)"))
    assert abs(full["kl"]) < 1e-6 and full["agree"] == 1 and full["first"] == 90 and full["by_layer"] == [0, 0]
    assert np.min(full["mass"]) > 0.9999
    assert own["kl"] > 0.01 and own["agree"] < 1 and own["first"] < 90 and min(own["by_layer"]) > 1e-3
    assert 0 < np.min(own["mass"]) < np.max(own["mass"]) < 1
    same = quality.perplexity(PARAMS, parse("snapkv(budget=48, window=8)"), Texts(IDS, PREFIX, batch=2))
    assert same["ppl"] == own["ppl"]


def test_kept_attention_matches_sum_over_tokens():
    cache = Texts(IDS[:2], PREFIX).follow(PARAMS, parse("snapkv(budget=48, window=8)"), [0, 1]).cache
    found = attention_recall.mass(attention_recall.paid(PARAMS, jnp.asarray(IDS[:2]), PREFIX), cache)
    model, net = PARAMS.config, models.family(PARAMS.config)
    pos = jnp.arange(200)[None]
    p = jax.jit(lambda ids: net.project(PARAMS, 0, net.embed(PARAMS, ids), pos))(jnp.asarray(IDS[:1]))
    q = np.asarray(model.ropes[0].rotate(p.q, pos[:, None, None]), np.float64)
    k = np.asarray(model.ropes[0].rotate(p.k, pos[:, None]), np.float64)
    kept = [set(np.asarray(cache.layers[0].recent.pos[0]).tolist()) for _ in range(model.heads)]
    for h in range(model.heads):
        kept[h] |= set(np.asarray(cache.layers[0].tiers[0].pos[0, h]).tolist())
        part = whole = 0.0
        for g in range(model.groups):
            for t in range(PREFIX, 200):
                w = np.exp(k[0, h, : t + 1] @ q[0, h, g, t] * model.scale)
                w /= w.sum()
                whole += w[:PREFIX].sum()
                part += sum(w[i] for i in range(PREFIX) if i in kept[h])
        np.testing.assert_allclose(found[0, 0, h], part / whole, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    ["snapkv(budget=48, window=8)", "h2o(budget=48) | int8", "kivi(recent=0, group=16)", "streaming(budget=48)"],
)
def test_frozen_prefix_equals_dense_attention(text):
    """Two ways to the same numbers: the decode loop, and dense attention over the decoded prefix."""
    texts = Texts(IDS[:2], PREFIX, frozen=True)
    run = texts.follow(PARAMS, parse(text), [0, 1])
    held = dequantize(run.cache)
    own = np.concatenate([np.asarray(x) for x in run], 1)
    every = jnp.ones(PARAMS.config.layers, bool)
    seen = attention_recall.dense(PARAMS, jnp.asarray(IDS[:2]), held, every, PREFIX)
    np.testing.assert_allclose(own, seen, atol=2e-4)
    none = attention_recall.dense(PARAMS, jnp.asarray(IDS[:2]), held, ~every, PREFIX)
    np.testing.assert_allclose(none, plain(IDS[:2]), atol=2e-4)
    assert abs(own - plain(IDS[:2])).max() > 1e-2


def test_frozen_prefix_with_sinks_and_experts_equals_dense():
    ids = IDS[:2] % tiny.SUNK.config.vocab
    run = Texts(ids, PREFIX, frozen=True).follow(tiny.SUNK, parse("snapkv(budget=48, window=8)"), [0, 1])
    held, own = dequantize(run.cache), np.concatenate([np.asarray(x) for x in run], 1)
    every, ids = jnp.ones(tiny.SUNK.config.layers, bool), jnp.asarray(ids)
    np.testing.assert_allclose(own, attention_recall.dense(tiny.SUNK, ids, held, every, PREFIX), atol=2e-4)
    assert abs(own - attention_recall.dense(tiny.SUNK, ids, held, ~every, PREFIX)).max() > 1e-2
    # what a query pays to all keys is less than 1, by what it pays to its sink
    _, paid = attention_recall.dense_queries(tiny.SUNK, ids, jnp.arange(PREFIX, ids.shape[1]))
    assert all(0.5 < x.sum(-1).min() and x.sum(-1).max() < 1 - 1e-4 for x in paid)


def test_frozen_cache_evicts_nothing_after_prefix():
    config = parse("h2o(budget=48) | int8")
    caches = [Texts(IDS[:2], PREFIX, frozen=x).follow(PARAMS, config, [0, 1]) for x in (False, True)]
    for run in caches:
        list(run)
    kept = [int(run.cache.kept().max()) for run in caches]
    assert kept[0] < 48 + 32 and kept[1] == 48 + IDS.shape[1] - PREFIX


def test_kl_matches_definition():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 1, 4, 9)) * 2
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    kl, same = divergence(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(-1), atol=1e-5)
    assert np.asarray(same).tolist() == (a.argmax(-1) == b.argmax(-1)).tolist()


# ---------------------------------------------------------------------------------------------------------- answers


def session(name="kv", length=2000):
    return scbench.sessions(name, length, 1, 0, lambda text: len(text.encode()))[0]


@pytest.mark.slow
def test_full_cache_answers_equal_for_rebuilt_and_reused():
    one = session()
    one = replace(one, turns=one.turns[:2])
    modes = {m: quality.converse(PARAMS, parse("full"), one, 6, m, 6)[0] for m in ("rebuilt", "reused", "turns")}
    assert modes["rebuilt"] == modes["reused"] and len(modes["reused"]) == 3
    assert modes["turns"][0] == modes["reused"][0] and modes["turns"][1:] != modes["reused"][1:]
    prompts = [quality.cut(PARAMS, q) for q in one.turns]
    seen, unseen = (quality.answer(PARAMS, parse("full"), prompts, 6, x, 2)[0] for x in (True, False))
    assert seen == unseen == modes["reused"][:2]
    for mode in ("rebuilt", "reused"):
        assert quality.converse(PARAMS, parse("full"), one, 6, mode, 2)[0] == modes[mode]


@pytest.mark.slow
def test_unseen_question_changes_compressed_answers():
    prompts = [quality.cut(PARAMS, q) for q in session().turns]
    config = parse("snapkv(budget=64, window=16)")
    seen, unseen = (quality.answer(PARAMS, config, prompts, 6, x, 5)[0] for x in (True, False))
    assert seen != unseen


def test_conversation_follows_chat_template():
    a, b = (replace(x, context="CTX" if i == 0 else "") for i, x in enumerate(session().turns[:2]))
    text = quality.conversation_prompt(PARAMS, [a, b])
    assert text == f"<u>CTX{a.question}</><a>{a.prefix}{a.gold}</><u>{b.question.strip(chr(10))}</><a>{b.prefix}"
    bare = replace(PARAMS, tokenizer=byte_tokenizer(None))
    assert quality.conversation_prompt(bare, [a, b]) == f"CTX{a.question}{a.prefix}{a.gold}{b.question}{b.prefix}"
    head, tail = quality.cut(PARAMS, a)
    assert PARAMS.tokenizer.decode(head) == "<u>CTX" and PARAMS.tokenizer.decode(
        head + tail
    ) == quality.conversation_prompt(PARAMS, [a])


def test_unavailable_caches_are_refused_before_measuring():
    for cache, word in (("trimkv(budget=9)", "trimkv"), ("kvtc", "sensitivity"), ("nothing", "nothing")):
        with pytest.raises(ValueError, match=word):
            experiments.Setting("tiny", PARAMS, ["full", cache], 2, None)


def test_perfect_model_scores_one_and_silent_zero(monkeypatch):
    setting = experiments.Setting("tiny", PARAMS, ["full"], 2, None)
    right = {}
    for name in (t.name for t in tasks.TASKS.values() if t.suite == "ruler"):
        for e in tasks.examples(name, 4000, 2, 0, experiments.count(PARAMS)):
            head, tail = quality.cut(PARAMS, e)
            right[tuple(head + tail)] = e.gold
    for answer, score in ((lambda ids: right[tuple(ids)], 1.0), (lambda ids: "", 0.0)):
        cache = quality.prefill(PARAMS, "full", [[1] * 40])[0]
        monkeypatch.setattr(
            quality,
            "generate",
            lambda params, config, rows, max_new_tokens, answer=answer, cache=cache: SimpleNamespace(
                text=[answer(ids) for ids in rows], cache=cache
            ),
        )
        made = experiments.drawn(setting, [n.name for n in tasks.TASKS.values() if n.suite == "ruler"], 4000, 2)
        found = experiments.ruler(setting, made, 4000, 2, [True], str)
        assert len(found.rows) == 13 and {r["score"] for r in found.rows} == {score}


@pytest.mark.slow
def test_real_model_finds_needles_and_broken_cache_loses_them():
    params = load("smollm2-135m")
    task = tasks.TASKS["niah_single_1"]
    asked = tasks.examples(task.name, 300, 2, 0, experiments.count(params))
    prompts = [[*head, *tail] for head, tail in (quality.cut(params, e) for e in asked)]
    whole, first = quality.prefill(params, "int8", prompts, reserve=64)

    def score(cache: Cache) -> float:
        tokens = [first.argmax(-1).astype(jnp.int32)]
        for _ in range(12):
            cache, logits = step(params, cache, tokens[-1])
            tokens.append(logits.argmax(-1).astype(jnp.int32))
        answers = map(params.tokenizer.decode, np.stack(tokens, 1).tolist())
        return np.mean([task.score(x, e.answers) for x, e in zip(answers, asked, strict=True)])

    def misplaced(layer: LayerCache) -> LayerCache:  # every value in the slot of another token
        (tier,) = layer.tiers
        values = jax.tree.map(lambda x: jnp.roll(x, 7, 2), tier.v)
        return replace(layer, tiers=(replace(tier, v=values),))

    assert score(whole) > 0.5
    assert score(replace(whole, layers=tuple(map(misplaced, whole.layers)))) == 0


def test_every_available_method_is_in_matrix(tmp_path, monkeypatch):
    def named():
        return {parse(x).name.split("(")[0].split(" ")[0] for x in experiments.catalogue(1024, tiny.PARAMS)}

    gates = {"trimkv", "makeeach", "locret", "lococo", "dms", "attentiongate", "attentionpredictor"}
    gates |= {"ksort", "matryoshkakv", "palu", "kvheads", "cskv"}  # of moments, which were not measured either
    gates |= {"kvtc", "kvquant", "qfilters", "triattention"}  # nor was what is known of queries and gradients
    gates |= {"kvzap", "retrieval", "utility"}  # the last two by two: trimkv's gates, and compresskv's heads or kvzap's
    gates |= {"duoattention", "fastkvzip"}  # by their authors' heads, and gates
    gates |= {"fasa", "infinigen", "planned", "s3attention"}  # of channels, of a plan, and of features
    some = {*METHODS} - {"append", "coded", "pooled", "rest", "compresskv", "razorattention"}
    some -= {"indexcache", "similar", "vote", "values"}
    assert named() == some - gates
    monkeypatch.setattr(trained_weights, "SHIPPED", tmp_path)
    tiny.gate(str(tmp_path / "trimkv"))
    tiny.predictor(str(tmp_path / "attentionpredictor"))
    assert named() == (some - gates) | {"trimkv", "makeeach", "attentionpredictor"}
    assert experiments.catalogue(1024, tiny.PARAMS, keeps=(0.5,)).count("h2o(budget=512)") == 1
