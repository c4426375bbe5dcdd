"""Prompts of passages that were read before: with all tokens read again the prompt itself, with none of them PIE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.attention.dequantization import dequantize
from jkv.eval.attention_recall import dense_queries
from jkv.prefix_cache.chunk_reuse import LEAST, ChunkCache, ChunkMatch
from jkv.prefix_cache.chunk_variants import Variant
from jkv.prefix_cache.recompute import renewal
from support.tiny import PARAMS

ONE = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=1), 0, jnp.float32)
TWO = jkv.models.random(jkv.models.TINY | dict(num_hidden_layers=3), 0, jnp.float32)
RNG = np.random.default_rng(5)
HEAD, A, B, GAP, ASK = (RNG.integers(0, 100, n).tolist() for n in (20, 70, 50, 9, 12))
PROMPT = [*HEAD, *B, *GAP, *A, *ASK]


def read(params: Any, renew: str, cache: str = "full", prompt: list[int] = PROMPT) -> tuple[Any, Any, ChunkCache]:
    passages = ChunkCache(renew)
    for x in (A, B):
        passages.add(params, x)
    return *jkv.prefill(params, cache, [prompt], reserve=16, prefix_cache=passages), passages


def kept(cache: Any) -> list[list[int]]:
    return [np.sort(np.asarray(t.pos)).ravel().tolist() for layer in cache.layers for t in layer.tiers]


SLOW = [pytest.param("full", marks=pytest.mark.slow)]


@pytest.mark.parametrize("cache", ["snapkv(budget=48, window=8) | int4", *SLOW])
def test_full_recompute_equals_prefill(cache: str):
    want, logits = jkv.prefill(TWO, cache, [PROMPT], reserve=16, chunk=0)
    for renew in ("cacheblend(ratio=1.0)", "kvshare(kappa=-9.0, most=1.0, check=1)"):
        got, same, passages = read(TWO, renew, cache)
        np.testing.assert_allclose(same, logits, atol=1e-4)
        assert kept(got) == kept(want) and got.seen.tolist() == got.prompt.tolist() == [len(PROMPT)]
        assert passages.reused == len(A) + len(B)


def test_rotated_chunk_keys_are_exact_in_one_layer_model():
    want = jkv.prefill(ONE, "full", [PROMPT], reserve=16)
    got = read(ONE, "pie")
    np.testing.assert_allclose(got[1], want[1], atol=1e-4)
    for a, b in zip(got[0].layers, want[0].layers, strict=True):
        for x, y in zip(jax.tree.leaves(a.tiers), jax.tree.leaves(b.tiers), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
def test_error_falls_with_recompute_ratio():
    want = np.asarray(jkv.prefill(TWO, "full", [PROMPT], reserve=16)[1])

    def far(renew: str) -> float:
        return float(np.sqrt(((read(TWO, renew)[1] - want) ** 2).mean()))

    errors = [far(x) for x in ("pie", *(f"cacheblend(ratio={r})" for r in (0.16, 0.5, 0.9, 1.0)))]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 < errors[-2]


def test_chunk_at_prompt_start_is_exact():
    prompt = [*A, *ASK]
    want = jkv.prefill(TWO, "full", [prompt], reserve=16)[1]
    np.testing.assert_allclose(read(TWO, "pie", prompt=prompt)[1], want, atol=1e-4)


def test_edited_text_matches_two_chunks():
    edited = [*A[:30], 5, 6, 7, *A[34:], *ASK]
    passages = read(PARAMS, "pie", prompt=edited)[2]
    assert [(x.place, x.start, x.length) for x in passages.match(edited)] == [(0, 0, 30), (33, 34, 36)]
    assert passages.reused == 66


def test_unsupported_reuse_is_prefilled_or_refused():
    for cache in ("h2o(budget=48)", "keydiff(budget=48)"):  # of the whole prompt; notes something
        got, logits, passages = read(PARAMS, "cacheblend", cache)
        np.testing.assert_array_equal(logits, jkv.prefill(PARAMS, cache, [PROMPT], reserve=16)[1])
        assert passages.reused == 0
    for prompt in (ASK[:1], ASK):  # nothing to look for, and nothing that is there
        plain = jkv.prefill(PARAMS, "full", [prompt], reserve=16)[1]
        np.testing.assert_allclose(read(PARAMS, "pie", prompt=prompt)[1], plain, atol=1e-4)
    for text, why in (
        ("cacheblen", "did you mean 'cacheblend'"),
        ("pie(ratio=1)", "ratio=; pie takes no arguments"),
        ("cacheblend(ratio=2)", "ratio=2.*: give a share from 0 to 1"),
        ("kvshare(check=-1)", "check=-1: give a layer"),
        ("cachecraft(variants=0)", "variants=0: give how many"),
        ("cachecraft(alpha=-1)", "alpha=-1.*: give a factor"),
        ("cachecraft(whole=0)", "whole=0.*: give a share above 0"),
        ("relaycaching(check=2, until=1)", "until=1: tokens are chosen at layer check=2"),
    ):
        with pytest.raises(ValueError, match=why):
            renewal(text)
    with pytest.raises(ValueError, match="check=1: the model has 2 layers"):
        read(PARAMS, "cacheblend")
    with pytest.raises(ValueError, match="until=99: the model has 2 layers"):
        read(PARAMS, "relaycaching(check=0, until=99)")
    with pytest.raises(ValueError, match="a passage of 800 tokens: the model reads 512; give it in parts"):
        ChunkCache().add(PARAMS, [1, 2, 3, 4] * 200)
    with pytest.raises(ValueError, match=f"a passage of 3 tokens: give {LEAST}"):
        ChunkCache().add(PARAMS, [1, 2, 3])
    with pytest.raises(ValueError, match="the passage has token ids from 0 to 900"):
        ChunkCache().add(PARAMS, [0, 900] * 20)


def test_receipt_counts_reused_chunk_tokens():
    passages = ChunkCache("pie")
    passages.add(PARAMS, A)
    out = jkv.generate(PARAMS, "snapkv(budget=48, window=8)", [*A, *ASK], max_new_tokens=5, prefix_cache=passages)
    want = jkv.generate(PARAMS, "snapkv(budget=48, window=8)", [*A, *ASK], max_new_tokens=5)
    assert out.tokens == want.tokens and out.receipt.tokens_stored == len(A)


@pytest.mark.slow
def test_variants_record_attention_to_earlier_chunks():
    got, logits, passages = read(TWO, "cachecraft(whole=1.0)")  # its first prompt is read whole
    np.testing.assert_allclose(logits, jkv.prefill(TWO, "full", [PROMPT], reserve=16)[1], atol=1e-4)
    assert passages.reused == 0 and passages.read == len(PROMPT)
    (of_b,), (of_a,) = (passages._variants[key] for key in sorted(passages._variants, key=lambda x: -x[1]))
    assert (of_b.before, of_a.before, of_b.first, of_a.first) == ((), (1,), 20, 79)
    p = [
        x[0].mean(0) for x in dense_queries(TWO, jnp.asarray([PROMPT]), jnp.arange(len(PROMPT)))[1]
    ]  # of the dense model
    owed = [x[79:149, 20:70] for x in p]
    inter, intra = np.mean([x.sum() for x in owed]), np.mean([x[79:149, 79:149].sum() for x in p])
    np.testing.assert_allclose(of_a.inter, [inter], rtol=1e-4)
    np.testing.assert_allclose(of_a.ratio, (inter / (70 * 50)) / (intra / 70**2), rtol=1e-4)
    np.testing.assert_allclose(of_a.owed, np.sum([x.sum(1) for x in owed], axis=0), rtol=1e-4)

    again, same = jkv.prefill(
        TWO, "full", [PROMPT], reserve=16, prefix_cache=passages
    )  # as it was read: nothing to mend
    np.testing.assert_allclose(same, logits, atol=1e-4)
    assert passages.reused == len(A) + len(B)

    other = [*HEAD, *A, *GAP, *B, *ASK]  # a stands behind nothing now: cci of it is read again, b owed nothing
    before = passages.reused
    jkv.prefill(TWO, "full", [other], reserve=16, prefix_cache=passages)
    assert before + 120 - passages.reused == np.ceil(70 / (1 + np.exp(-of_a.ratio)))

    passages.renew = renewal("cachecraft(variants=2)")  # a half or more: all of a, a variant more
    _, near = jkv.prefill(TWO, "full", [other], reserve=16, prefix_cache=passages)
    want = jkv.prefill(TWO, "full", [other], reserve=16)[1]
    mine = passages._variants[next(key for key in passages._variants if key[1] == 0)]
    assert [x.before for x in mine] == [(), (1,)] and passages.reused == before + 120 - np.ceil(
        70 / (1 + np.exp(-of_a.ratio))
    ) + len(B)
    assert (
        np.abs(np.asarray(near) - np.asarray(want)).max()
        < np.abs(np.asarray(read(TWO, "pie", prompt=other)[1]) - want).max()
    )


def test_variants_are_added_on_miss_and_evicted_by_use():
    """Passage 3 behind others in turn, by numbers alone: it paid a tenth of what it paid to its own tokens."""
    passages, found = ChunkCache("cachecraft(variants=2)"), [ChunkMatch(20 * i, i, 0, 20) for i in range(4)]
    record = {x: np.zeros((1, 1, 20, 2), np.float32) for x in "kv"}
    paid = [np.array([[0.1, 1.0]] * 20)]

    def behind(i: int) -> bool:
        """Whether it was there, where passage i alone stands before it; if not, it is read."""
        there = passages.held("m", TWO, None, found[3], [i], None)  # type: ignore[arg-type]
        if there is None:
            passages.learn("m", [found[i], found[3]], 1, record, paid)
        return there is not None

    assert [behind(i) for i in (0, 1, 0, 0, 1)] == [False, False, True, True, True]
    assert not behind(2) and [x.before for x in passages._variants["m", 3]] == [(2,), (0,)]  # used twice, 1 once
    assert [behind(i) for i in (2, 0, 2, 2, 1)] == [True, True, True, True, False]
    assert [x.before for x in passages._variants["m", 3]] == [(1,), (2,)]  # now 2 was of more use than 0


def test_recompute_share_depends_on_preceding_chunks():
    record = {"k": np.zeros((1, 1, 10, 2))}
    one = Variant(record, 0, before=(1, 2), inter=np.array([0.3, 0.7]), ratio=1.0, owed=np.arange(10.0))
    share = one.share((1,), 1.0)
    assert round(share, 4) == 0.5117 and one.again(share).nonzero()[0].tolist() == [4, 5, 6, 7, 8, 9]
    assert one.share((7, 1, 8, 2), 1.0) == 0 and one.share((), 9.0) == 1  # in their order; nothing of it, much of it
    assert one.share((2, 1), 1.0) == one.share((), 1.0) == 1 / (1 + np.exp(-1))


@pytest.mark.slow
def test_reused_answer_equals_prefill():
    out = jkv.generate(TWO, "full", A, max_new_tokens=40, temperature=1.0, stop_ids=())
    says = out.tokens
    prompt = [*A, *says, *ASK]
    want, logits = jkv.prefill(TWO, "full", [prompt], reserve=16)

    def after(renew: str, prompt: list[int]) -> tuple[Any, Any, ChunkCache]:
        passages = ChunkCache(renew)
        passages.add_answer(TWO, says, out.cache)
        return *jkv.prefill(TWO, "full", [prompt], reserve=16, prefix_cache=passages), passages

    _, same, passages = after("pie", prompt)  # keys that were made while decoding are those of a prompt
    np.testing.assert_allclose(same, logits, atol=1e-4)
    assert passages.reused == len(says) == 40
    moved = [*HEAD, *says, *GAP, *ASK]
    whole = jkv.prefill(TWO, "full", [moved], reserve=16)[1]
    all_read = "relaycaching(diff=0.0, down=0.0, most=1.0)"
    np.testing.assert_allclose(after(all_read, moved)[1], whole, atol=1e-4)
    got, near, passages = after("relaycaching(most=0.3, until=1)", moved)
    read, held = np.asarray(dequantize(got)[2].v)[0, :, 20:60], np.asarray(dequantize(out.cache)[2].v)[0, :, 70:110]
    np.testing.assert_allclose(read, held, atol=1e-5)  # above the band what the run made stands
    assert 28 + 13 < passages.read < 28 + 13 + 40 and passages.reused == 40
    with pytest.raises(ValueError, match="cachecraft weighs what it has read"):
        ChunkCache("cachecraft").add_answer(TWO, says, out.cache)
    with pytest.raises(ValueError, match="the cache is that of another model"):
        ChunkCache("pie").add_answer(ONE, says, out.cache)
    with pytest.raises(ValueError, match="200 tokens were said, and the cache has 110"):
        ChunkCache("pie").add_answer(TWO, [1] * 200, out.cache)
    lossy = jkv.prefill(TWO, "streaming(budget=40)", [A])[0]
    with pytest.raises(ValueError, match="has not every token of one row as it was made: generate with 'full'"):
        ChunkCache("pie").add_answer(TWO, A, lossy)
