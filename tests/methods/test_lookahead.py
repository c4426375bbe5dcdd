"""What is read after a prompt: its scores against plain attention, that nothing of it stays, and what refuses it."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.padding import pad
from jkv.core import decode_loop, deferred_prefill
from jkv.methods import METHODS, compatibility, parse
from jkv.methods.prefill.probes import AGAIN, Pseudo, Rebuilt
from jkv.prompts.allocation import CacheShape
from jkv.prompts.greedy import greedy
from jkv.prompts.prefill import PrefillRunner
from support import rig
from support.rig import MODEL, PARAMS, H, L

ROWS = [[t for t in row.tolist() if t >= 0][:n] for row, n in zip(rig.PROMPT, (60, 73), strict=True)]
ROOM = 80


def found(text: str) -> list[np.ndarray]:
    """f64[B,H,T] of each layer: what the probes of a score learn about each position of ROWS."""
    config = parse(text)
    cache = CacheShape(config.uncompressed(ROOM), MODEL, 2, ROOM, 0, jnp.float32).empty()
    cache, _ = decode_loop.prefill(PARAMS, cache, pad(ROWS, ROOM), fresh=True)
    assert config.prefill.probe is not None
    for part in config.prefill.probe.texts(PARAMS, ROWS, greedy):
        cache = deferred_prefill.probe(PARAMS, cache, pad(part.ids, 64), jnp.asarray(part.span), config.prefill.probe)
    out = []
    for layer in cache.layers:
        pos, x = np.asarray(layer.recent.pos), np.asarray(layer.recent.columns["probed"], float)
        full = np.zeros((2, H, ROOM))
        for b in range(2):
            full[b][:, pos[b][pos[b] >= 0]] = x[b][:, pos[b] >= 0]
        out.append(full)
    return out


def attention(row: int, ids: list[int]) -> list[np.ndarray]:
    """f64[H,G,P,T+P] of each layer: logits of the probe's queries over the prompt and the probe, -inf unseen."""
    every = [*ROWS[row], *ids]
    n, p = len(ROWS[row]), len(ids)
    out = []
    for q, k, _, _ in rig.dense_prompt(jnp.asarray([every]))[1]:
        logits = np.einsum("hgtd,hsd->hgts", np.asarray(q[0], float)[:, :, n:], np.asarray(k[0], float)) * MODEL.scale
        see = np.arange(n + p)[None] <= n + np.arange(p)[:, None]
        out.append(np.where(see, logits, -np.inf))
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def test_dapq_score_is_attention_of_pseudo_tokens():
    (part,) = Pseudo(tokens=10).texts(PARAMS, ROWS, greedy)
    assert [r[:5] + r[-5:] for r in ROWS] == part.ids
    got = found("dapq(budget=32, tokens=10)")
    for row, ids in enumerate(part.ids):
        for layer, logits in enumerate(attention(row, ids)):
            want = softmax(logits).sum(2).mean(1)[:, : len(ROWS[row])]
            np.testing.assert_allclose(got[layer][row, :, : len(ROWS[row])], want, atol=1e-5)


def test_kvzip_score_is_max_attention_of_repeated_piece():
    parts = Rebuilt(piece=40, lead=6, sinks=3).texts(PARAMS, ROWS, greedy)
    assert [x.span for x in parts] == [[(0, 40), (0, 40)], [(40, 60), (40, 73)]]
    assert parts[0].ids[0] == ROWS[0][:40] and parts[1].ids[1] == ROWS[1][34:]  # no tokenizer: no request in words
    small = Rebuilt(piece=4, lead=6).texts(PARAMS, ROWS, greedy)  # pieces shorter than what leads to them
    assert small[1].ids[0] == ROWS[0][:8] and small[2].ids[0] == ROWS[0][2:12]
    cache = found("kvzip(budget=32, piece=40, sinks=3)")
    lead8 = Rebuilt(piece=40, sinks=3).texts(PARAMS, ROWS, greedy)
    for part in lead8:
        for row, (ids, (first, end)) in enumerate(zip(part.ids, part.span, strict=True)):
            n = len(ROWS[row])
            pos = np.arange(n + len(ids))
            among = (pos < 3) | ((pos >= first) & (pos < end)) | (pos >= n)
            for layer, logits in enumerate(attention(row, ids)):
                want = softmax(np.where(among, logits, -np.inf)).max((1, 2))[:, first:end]
                np.testing.assert_allclose(cache[layer][row, :, first:end], want, atol=1e-5)
                assert 0 <= want.min() and want.max() <= 1


def test_kvzip_repetition_is_in_answer_turn():
    class Words:
        """A tokenizer: token t is chr(40 + t)."""

        template = "there is one"

        def within(self, text: str) -> list[int]:
            return [ord(x) - 40 for x in text if 40 <= ord(x) < 140]

        def chat(self, messages: list[dict[str, str]]) -> str:
            return f"<SYS><USER>{messages[0]['content'].strip()}<END><SAY>"

    talks = replace(PARAMS, tokenizer=Words())
    first, then = Rebuilt(piece=40, lead=6).texts(talks, ROWS, greedy)
    turn = Words().within("<END><SAY>")
    assert first.ids[0][-40 - len(turn) :] == turn + ROWS[0][:40]
    assert then.ids[1][-33 - len(turn) - 6 :] == ROWS[1][34:40] + turn + ROWS[1][40:]
    talks.tokenizer.template = None
    assert Rebuilt(piece=40).texts(talks, ROWS, greedy)[0].ids[0] == Words().within(AGAIN) + ROWS[0][:40]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dapq(budget={}, tokens=10)", "kvzip(budget={}, piece=40)"])
def test_probe_leaves_no_trace_in_cache(text):
    new = dict(max_new_tokens=12, stop_ids=())
    full, all_kept = (jkv.generate(PARAMS, t, ROWS, **new) for t in ("full", text.format(200)))
    assert all_kept.tokens == full.tokens
    np.testing.assert_allclose(all_kept.logits, full.logits, atol=1e-4)
    cache, logits = jkv.prefill(PARAMS, text.format(24), ROWS, reserve=16)
    np.testing.assert_array_equal(logits, jkv.prefill(PARAMS, "full", ROWS, reserve=16)[1])
    assert cache.seen.tolist() == cache.prompt.tolist() == [60, 73]
    assert cache.kept().sum((0, 2)).tolist() == [24 * H * L] * 2
    dense = rig.dense_prompt(pad(ROWS, 73))[1]
    for layer in range(L):
        tier = cache.layers[layer].tiers[0]
        for b, h, s in np.argwhere(np.asarray(tier.seen_by(H)) >= 0):
            at = int(tier.seen_by(H)[b, h, s]) + 73 - len(ROWS[b])
            own = 0 if tier.head is not None else h
            np.testing.assert_allclose(tier.k.slots[b, own, s], dense[layer][1][b, h, at], atol=1e-5)


@pytest.mark.parametrize("form", ["floor=0.0, step=1", "floor=None"])
def test_highest_scored_tokens_are_kept(form: str):
    """Of all layers and heads together, as in the authors' code; or of each head, where they have equal shares."""
    text = f"kvzip(budget=24, piece=40, {form})"
    scores, (cache, _) = found(text), jkv.prefill(PARAMS, text, ROWS)
    held = [np.broadcast_to(c.tiers[0].seen_by(H), (2, H, c.tiers[0].pos.shape[2])) for c in cache.layers]
    for row, ids in enumerate(ROWS):
        kept = {(i, h, p) for i in range(L) for h in range(H) for p in held[i][row, h].tolist() if p >= 0}
        every = [(i, h, p) for i in range(L) for h in range(H) for p in range(len(ids))]
        flat = {x: np.inf if x[2] < 4 else scores[x[0]][row, x[1], x[2]] for x in every}
        best = sorted(every, key=lambda x: -flat[x])
        if form == "floor=None":
            best = [x for i in range(L) for h in range(H) for x in [y for y in best if y[:2] == (i, h)][:24]]
        assert len(kept ^ set(best[: 24 * H * L])) <= 2 * L  # a layer's places are whole tokens a head


def test_unsupported_requests_are_refused_before_prefill(monkeypatch: pytest.MonkeyPatch):
    long = [[1] * 500]
    monkeypatch.setattr(PrefillRunner, "dense", lambda self: pytest.fail("the prompt was read first"))
    with pytest.raises(ValueError, match="531 tokens, and the model's context is 512: take dapq: fewer tokens="):
        jkv.prefill(PARAMS, "dapq(budget=40, tokens=31)", long, reserve=0)
    with pytest.raises(ValueError, match="1000 tokens.*take a smaller piece="):
        jkv.prefill(PARAMS, "kvzip(budget=40)", long, reserve=0)
    with pytest.raises(ValueError, match="525 tokens.*fewer tokens of a draft"):
        jkv.prefill(PARAMS, "speckv(budget=40, tokens=25)", long, reserve=0)
    with pytest.raises(ValueError, match="reads texts after the prompt.*chunk=64"):
        jkv.prefill(PARAMS, "dapq(budget=40)", ROWS, chunk=64)
    with pytest.raises(ValueError, match="jkv batch prefills in one program"):
        compatibility.check_prefill(parse("kvzip(budget=40)"), "jkv batch")
    for method, wrong in (("dapq", dict(tokens=0)), ("kvzip", dict(piece=0)), ("kvzip", dict(step=0))):
        with pytest.raises(ValueError, match="1 or more"):
            METHODS[method](budget=40, **wrong)
