"""SentenceKV: sentences by the ends of their tokens, and steps that read them by their mean keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from jkv.cache.codec_map import decode
from jkv.core import decode_loop
from jkv.io.tokenizer import Tokenizer
from jkv.methods import parse
from jkv.methods.base import Newest
from jkv.methods.config import CacheConfig
from jkv.methods.selection.sentences import ENDS, START, SentenceMeans, Sentences, Spoken
from jkv.protocols import Entered, Look
from support import rig
from support.rig import FORCED, LENGTHS, MODEL, PARAMS, PROMPT, D, G, H, L
from support.scenes import evidence

LAST = np.arange(MODEL.vocab) % 6 == 0  # tokens that end a sentence
TEXTS = [np.concatenate([prompt[prompt >= 0], forced]) for prompt, forced in zip(PROMPT, FORCED, strict=True)]
PAGES, SINKS = 18, 2


def ended(text: str) -> CacheConfig:
    """A cache of sentences that end with the tokens of LAST."""
    config = parse(text)
    assert isinstance(config.score, Sentences)
    return replace(config, score=replace(config.score, ends=jnp.tile(LAST, (L, 1))))


@pytest.mark.parametrize("longest, want", [(9, [0, 0, 0, 3, 3, 3, 6, 6]), (2, [0, 0, 2, 3, 3, 5, 6, 6])])
def test_tokens_know_start_of_their_sentence(longest: int, want: list[int]):
    score = Sentences(score=Newest(), longest=longest, ends=jnp.asarray([False, False, True, False, False, True] * 2))
    found = score.observe(evidence(np.eye(8), score=score))
    assert found[START][0, 0].tolist() == want and found[ENDS][0, 0].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]


def test_sentences_end_at_punctuation_tokens_or_blank_lines():
    texts = [".", "Ġ?", "...", '."', "ĊĊ", "!)", "Ċ", "a", ".com", "Ġ", "3", ","]
    core = tokenizers.Tokenizer(BPE({x: i for i, x in enumerate(texts)}, []))
    core.decoder = ByteLevel()
    ends = Sentences(score=Newest()).bound(replace(PARAMS, tokenizer=Tokenizer(core))).ends
    assert ends is not None and ends.shape == (L, MODEL.vocab)
    assert [np.flatnonzero(x).tolist() for x in ends] == [[0, 1, 2, 3, 4, 5]] * L
    assert Sentences(score=Newest()).bound(PARAMS).ends is None


def numbers(row: int) -> np.ndarray:
    """Of the tokens of a text: how many sentences ended strictly before."""
    return np.concatenate([[0], np.cumsum(LAST[TEXTS[row]])[:-1]])


class Reader:
    """What steps read by the spec, sentence by sentence in float64, of what the tiers of a cache hold."""

    def __init__(self) -> None:
        self.said = np.zeros((L, 2, H, G, D))
        self.sentences: dict[Any, list[list[int]]] = {}
        self.known: dict[Any, set[int]] = {}

    def flush(self, cache: Any) -> None:
        """The newcomers of each head are its next sentences."""
        for i, row, h in np.ndindex(L, 2, H):
            pos = np.asarray(cache.layers[i].tiers[0].pos)[row, h]
            new = sorted({*pos[pos >= 0].tolist()} - self.known.get((i, row, h), set()))
            self.known.setdefault((i, row, h), set()).update(new)
            cut = [[p for p in new if numbers(row)[p] == x] for x in sorted({*numbers(row)[new].tolist()})]
            self.sentences.setdefault((i, row, h), []).extend(cut)

    def picks(self, i: int, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool[B,H,S] of a layer, for queries f[B,H,G,D] and keys f[B,H,S,D] by position."""
        out = np.zeros(keys.shape[:3], bool)
        for row, h in np.ndindex(2, H):
            asked = (self.said[i, row, h] + q[row, h]).sum(0)
            held = self.sentences[i, row, h]
            score = [asked @ keys[row, h, s].astype(np.float64).mean(0) for s in held]
            sinks = [p for s in held for p in s if p < SINKS]
            others = [p for n in np.argsort(score)[::-1] for p in held[n] if p >= SINKS]
            out[row, h, (sinks + others)[:PAGES]] = True
        return out

    def hear(self, i: int, q: np.ndarray, token: np.ndarray) -> None:
        """Queries of a step, whose tokens may end a sentence."""
        self.said[i] = np.where(LAST[token][:, None, None, None], 0, self.said[i] + q)


@pytest.mark.slow
def test_steps_read_sentences_picked_by_queries_since_last_end():
    config = ended(f"sentencekv(budget=60, tokens={PAGES + 8}, window=8, sinks={SINKS}, longest=1000, least=1)")
    cache, _ = decode_loop.prefill(PARAMS, rig.made(config), jnp.asarray(PROMPT), fresh=True)
    replay, reader, flushes = rig.Replay(cache.plan), Reader(), 0
    reader.flush(cache)
    assert len({len(s) for s in reader.sentences[0, 0, 0]}) > 3 and len(reader.sentences[0, 0, 0]) > 8
    for n, token in enumerate(FORCED.T[:40]):
        before = int(cache.fill)
        cache, got = decode_loop.step(PARAMS, cache, jnp.asarray(token))
        if int(cache.fill) <= before:
            reader.flush(cache)
            flushes += 1
        ks, vs, seen = list(map(jnp.asarray, replay.k)), list(map(jnp.asarray, replay.v)), jnp.asarray(replay.seen)
        near = [rig.held(cache, i)[1] for i in range(L)]
        sees = list(map(jnp.asarray, near))
        for i in range(L):
            q = rig.dense_step(jnp.asarray(token), seen, ks, vs, sees, [])[1][i][0]
            q = np.asarray(q, np.float64)[:, :, :, 0]
            sees[i] = jnp.asarray(near[i] | reader.picks(i, q, replay.k[i]))
            reader.hear(i, q, token)
        want, taps, _ = rig.dense_step(jnp.asarray(token), seen, ks, vs, sees, [])
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0, err_msg=str(n))
        for i, (_, k, v, _) in enumerate(taps):
            for row, at in enumerate(replay.seen):
                replay.k[i][row, :, at], replay.v[i][row, :, at] = np.asarray(k)[row, :, 0], np.asarray(v)[row, :, 0]
        replay.seen = replay.seen + 1
    assert flushes == 2


def test_sentence_mean_is_over_kept_keys():
    config = ended("sentencekv(budget=60, window=8, longest=1000, least=1)")
    tier = decode_loop.prefill(PARAMS, rig.made(config), jnp.asarray(PROMPT), fresh=True)[0].layers[1].tiers[0]
    keys, pos = np.asarray(decode(config.codec[0], tier.k), np.float64), np.asarray(tier.pos)
    mean = np.asarray(tier.memo.keys) / np.maximum(np.asarray(tier.memo.tokens), 1)[..., None]
    for row, h in np.ndindex(2, H):
        slots = np.flatnonzero(pos[row, h] >= 0)
        number, of = numbers(row)[pos[row, h, slots]], np.asarray(tier.summary)[row, h, slots].astype(int)
        assert len(slots) == 52 and len({*number}) == len({*of}) < len(slots) < LENGTHS[row]
        for x in {*number.tolist()}:
            own = slots[number == x]
            np.testing.assert_allclose(mean[row, h, of[number == x]], [keys[row, h, own].mean(0)] * len(own), atol=1e-5)


def look(memo: Spoken | None, q: Any, slots: int, summary: Any, ends: Any = 0.0, alive: Any = True) -> Look:
    pos = jnp.arange(slots)[None, None]
    index: dict[str, Any] = dict(pos=pos, oldest=pos, summary=summary, memo=memo, given=None)
    q, ends, alive = jnp.full((1, 1, 1, 2), q, jnp.float32), jnp.full((1, 1), ends), jnp.full(1, alive)
    return Look(q=q, columns={ENDS: ends}, **index, alive=alive, logits=lambda: q)


def entered(memo: Spoken, starts: list[int]) -> Entered:
    """Tokens with the keys (1, 0), (2, 0) ... of sentences that begin there."""
    n = len(starts)
    k = jnp.stack([jnp.arange(1.0, n + 1), jnp.zeros(n)], 1)[None, None, :, None]
    columns = {START: jnp.asarray(starts, jnp.float32)[None, None, :, None]}
    return Entered(k=k, pos=jnp.arange(n)[None, None, :, None], columns=columns, queries=None, memo=memo)


@jax.jit
def taught(select: SentenceMeans, new: Entered) -> tuple[Spoken, jax.Array]:
    """The memo after newcomers, and their summary."""
    memo = select.renew(new)
    return memo, select.summarize(replace(new, memo=memo))


def test_short_sentences_share_mean_and_flush_starts_new_one():
    select = SentenceMeans(pages=3, sinks=0, least=4)
    memo = select.remember(look(None, 0, 16, None))
    assert memo.keys.shape == (1, 1, 4, 2)
    memo, of = taught(select, entered(memo, [0, 0, 0, 3, 3, 5, 6, 6]))
    assert of[0, 0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert memo.tokens[0, 0].tolist() == [5, 3, 0, 0] and memo.keys[0, 0, :, 0].tolist() == [15, 21, 0, 0]
    memo, of = taught(select, entered(memo, [6, 6, 6, 11]))
    assert of[0, 0].tolist() == [2, 2, 2, 2]
    assert memo.tokens[0, 0].tolist() == [5, 3, 4, 0]


def test_ties_pick_oldest_tokens_and_ended_rows_are_ignored():
    select = SentenceMeans(pages=3, sinks=0, least=1)
    memo = select.remember(look(None, 0, 8, None))
    memo, summary = taught(select, entered(memo, [0, 0, 0, 3, 3, 5, 6, 6]))
    pick = jax.jit(lambda memo, *given: select.pick(look(memo, given[0], 8, summary, *given[1:])))
    assert pick(memo, 0.0, 0.0, True)[0][0, 0].tolist() == [0, 1, 2]
    units, after = pick(memo, 1.0, 0.0, True)
    assert units[0, 0].tolist() == [6, 7, 5]
    each = [
        pick(after, 1.0, ends, alive)[1].asked[0, 0, 0].tolist() for ends, alive in ((0, True), (0, False), (1, True))
    ]
    assert each == [[2, 2], [1, 1], [0, 0]]


def test_invalid_configs_are_refused():
    with pytest.raises(ValueError, match="more than sinks=32 and window=32"):
        parse("sentencekv(budget=256, tokens=64)")
    with pytest.raises(ValueError, match="the score Sentences remembers"):
        rig.made(replace(parse("full"), select=SentenceMeans()))
