"""Drafts through what a selector picks of the verifying cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.cache import tree_bytes
from jkv.core import decode_loop, sampling
from jkv.core import self_draft_cache as core
from jkv.generation import generate
from jkv.methods import parse
from jkv.methods.config import CacheConfig
from jkv.methods.selection.oracle import PageMean
from jkv.models import TINY, random
from jkv.prompts.allocation import CacheShape
from jkv.speculative import autoregressive, self_draft
from jkv.speculative.build import build_drafter
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_model import Through
from jkv.speculative.proposer import Refusal, Suffix
from jkv.speculative.self_draft import Excerpts
from support import rig
from support.rig import EVERYTHING, MODELS, PARAMS, PROMPT

PAGE = 8
ALL = f"triforce(tokens={EVERYTHING})"
RNG = np.random.default_rng(5)
ROWS = [RNG.integers(3, 90, n).tolist() for n in (70, 30)]
ONE = random(dict(TINY, num_hidden_layers=1))


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A clock that stands: costs are those that are assumed before any is measured."""
    for module in (generate, autoregressive):
        monkeypatch.setattr(module, "Drafting", partial(Drafting, clock=lambda: 0.0))


def begun(text: str, params: Any = ONE, prompt: Any = PROMPT, new: int = 24) -> decode_loop.Decoding:
    cache, logits = rig.begun(text, prompt, params)
    return decode_loop.Decoding.start(cache, logits, new)


def asking(params: Any, state: decode_loop.Decoding, **how: Any) -> Any:
    """Who verifies, with rows of which nothing but their number is read."""
    b = state.cache.rows
    draws = sampling.make(b, 100, seeds=range(3, 3 + b), stop_ids=(), **how)
    return SimpleNamespace(params=params, state=state, sampling=draws)


def after(verifier: Any, n: int) -> np.ndarray:
    """i[B,n]: the tokens of plain decoding."""
    state = jax.tree.map(jnp.copy, verifier.state)
    return np.asarray(decode_loop.run_blocks(verifier.params, state, verifier.sampling, jnp.int32(n)).out)[:, :n]


def test_copy_holds_first_page_and_best_mean_key_pages():
    """Of each page the mean of the dots with the next token's queries, summed over a group, in float64; the last page
    is a part of one. What is copied is as it was, and as much as was asked for."""
    state, pages = begun("full", prompt=PROMPT), 4
    token = np.asarray(state.logits).argmax(-1)
    text = np.concatenate([PROMPT, token[:, None].astype(np.int32)], 1)
    q, k, *_ = (np.asarray(x, float) for x in rig.dense_prompt(jnp.asarray(text), ONE)[1][0])
    one = Excerpts(parse(f"triforce(tokens={pages * PAGE})"))
    one.draw([[0]] * 2, 2, asking(ONE, state))
    (copy,), tier = one.tiers[0], state.cache.layers[0].tiers[0]
    pos, slots = np.asarray(copy.pos), np.asarray(tier.pos)
    assert slots.shape[2] % PAGE and copy.k.slots.shape[2] == copy.v.slots.shape[2] == pages * PAGE
    for row in range(2):
        at, dead = slots[row, 0], PROMPT.shape[1] - (PROMPT[row] >= 0).sum()
        for head in range(q.shape[1]):
            keys = np.where((at >= 0)[:, None], k[row, head, dead + np.maximum(at, 0)], 0)
            dots = keys @ q[row, head, :, -1].sum(0)
            each = [dots[i : i + PAGE].sum() / PAGE for i in range(0, len(at), PAGE)]
            live = [i for i in range(len(each)) if (at[PAGE * i : PAGE * (i + 1)] >= 0).any()]
            first = [i for i in live if at[PAGE * i : PAGE * (i + 1)].max() < PAGE]
            best = first + sorted((i for i in live if i not in first), key=lambda i: -each[i])
            want = np.concatenate([at[PAGE * i : PAGE * (i + 1)] for i in best[:pages]])
            got = pos[row, head]
            np.testing.assert_array_equal(np.sort(got[got >= 0]), np.sort(want[want >= 0]))
            for place in np.flatnonzero(got >= 0)[::5]:
                slot = np.flatnonzero(at == got[place])[0]
                for x, y in ((copy.k, tier.k), (copy.v, tier.v)):
                    np.testing.assert_array_equal(x.slots[row, head, place], y.slots[row, head, slot])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_copies_of_all_layers_match_selector_picks(model: str):
    """Whose steps read the picks too, so that layers ask what lower ones have read."""
    params, text = MODELS[model], "triforce(tokens=56, newest=32)"
    cache, logits = rig.begun("quest(pages=64, page=8, dense_layers=0, recent=32)", PROMPT, params)
    one = Excerpts(parse(text))
    one.draw([[0], [0]], 1, asking(params, decode_loop.Decoding.start(cache, logits, 24)))
    cache, logits = rig.begun(text, PROMPT, params)
    verifier = asking(params, decode_loop.Decoding.start(cache, logits, 24))
    own = decode_loop.run_blocks(params, verifier.state, verifier.sampling, jnp.int32(1)).cache.layers
    for (copy,), layer in zip(one.tiers, own, strict=True):
        (tier,) = layer.tiers
        units = np.asarray(tier.memo.units)
        slots = (units[..., None] * PAGE + np.arange(PAGE)).reshape(*units.shape[:2], -1)
        pos = np.broadcast_to(np.asarray(tier.pos), (*slots.shape[:2], tier.pos.shape[2]))
        np.testing.assert_array_equal(copy.pos, np.take_along_axis(pos, slots, 2))


def test_full_copy_predicts_every_token():
    """Before a flush and after it; drawn tokens too, as the noise is the same."""
    verifier, one = asking(ONE, begun("full"), temperature=(0.0, 0.9)), Excerpts(parse(ALL))
    want, rows = after(verifier, 22), [[0], [0]]
    for done in (3, 15, 19):
        verifier.state = decode_loop.run_blocks(ONE, begun("full"), verifier.sampling, jnp.int32(done))
        got = one.draw(rows, 2, verifier)
        np.testing.assert_array_equal([ids for ids, _ in got], want[:, done + 1 : done + 3])


WHOLE = [
    case
    for case in [*rig.ALL, *rig.OTHERS]
    if case.params.config.mixers is None and case.config.pooled is None and case.config.select is None
]


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_full_copy_of_every_cache_equals_plain_decoding(case: rig.Case):
    """A copy of all pages has the tokens of steps that read everything: codes, merged entries and states included."""
    verifier = asking(case.params, begun(case.tight, case.params))
    want = after(verifier, 5)
    got = Excerpts(parse(ALL)).draw([[0], [0]], 4, verifier)
    np.testing.assert_array_equal([ids for ids, _ in got], want[:, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["full", "int8", "snapkv(budget=32, window=8)"])
@pytest.mark.parametrize("draft", [ALL, "triforce(tokens=16)", [ALL, "suffix"]], ids=str)
def test_drafts_change_no_token(cache: str, draft: Any):
    for how in ({}, {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.1}):
        ask = partial(jkv.generate, PARAMS, cache, ROWS, max_new_tokens=40, stop_ids=(), **how)
        want, got = ask(), ask(drafter=draft)
        assert got.tokens == want.tokens and got.receipt.draft_failed is None
        assert got.receipt.tokens_kept == want.receipt.tokens_kept and got.receipt.bytes_draft > 0
        if draft == ALL and cache == "full":
            assert got.receipt.drafted_taken == got.receipt.drafted > 20


@pytest.mark.slow
def test_copy_is_reused_until_next_flush(monkeypatch):
    made, real = [], core.excerpt

    def counted(params, plan, state, sampling):
        made.append(int(state.count) - int(state.cache.fill))
        return real(params, plan, state, sampling)

    monkeypatch.setattr(self_draft, "excerpt", counted)
    got = jkv.generate(ONE, "full", ROWS, max_new_tokens=60, stop_ids=(), drafter=ALL)
    assert len(made) == len({*made}) >= 3  # flushes after 16, 32 and 48 tokens
    assert got.receipt.drafted > 20


def test_copy_size_is_independent_of_cache_length():
    """By the compiler, of a cache sixteen times as long: only dots and positions grow, 3 numbers of a slot."""

    def made(slots: int) -> tuple[int, int, int]:
        cache = CacheShape(parse("full"), ONE.config, 2, slots, 64, jnp.float32).shapes()
        plan = tuple(x.view for x in Excerpts(parse("triforce(tokens=64)"))._plan(cache))
        logits = jax.ShapeDtypeStruct((2, 100), jnp.float32)
        state = jax.eval_shape(lambda logits: decode_loop.Decoding.start(cache, logits, 24), logits)
        draws = sampling.make(2, 100, seeds=range(2), stop_ids=())
        program = core.excerpt.lower(ONE, plan, replace(state, cache=cache.bare), draws).compile()
        found = program.memory_analysis()
        return found.output_size_in_bytes, found.temp_size_in_bytes, tree_bytes(cache.layers[0].tiers)

    (short, some, tier), (long, more, larger) = made(512), made(8192)
    assert short == long < tier / 4
    assert more - some < (larger - tier) / 4


@pytest.mark.slow
def test_chained_drafter_failure_is_reported():
    class Broken(Suffix):
        def propose(self, rows, most, verifier=None):
            assert verifier is not None and all(rows)
            raise MemoryError("no room")

    want = jkv.generate(ONE, "full", ROWS, max_new_tokens=60, stop_ids=())
    got = jkv.generate(ONE, "full", ROWS, max_new_tokens=60, stop_ids=(), drafter=[ALL, Broken()])
    assert got.tokens == want.tokens and "what guesses for it failed: MemoryError" in got.receipt.draft_failed[1]


@pytest.mark.slow
def test_copy_may_chain_after_another_draft_cache():
    """Of the cache of the one before it."""
    ask = partial(jkv.generate, PARAMS, "int8", ROWS, max_new_tokens=24, stop_ids=())
    want, got = ask(), ask(drafter=["streaming(budget=96, recent=16)", ALL])
    assert got.tokens == want.tokens and got.receipt.draft_failed is None and got.receipt.drafted > 10


def test_only_plain_triforce_and_tokenselect_draft_by_copy():
    for text in ("triforce(tokens=512)", "tokenselect(tokens=64)", "tokenselect(tokens=64) | vote(join='sum')"):
        assert isinstance(build_drafter(text, ONE), Excerpts)
    for text in (
        "full",
        "streaming(budget=64)",
        "quest(dense_layers=0)",
        "triforce(tokens=64) | int4",
        "tokenselect(tokens=64, far=True)",
        "tokenselect(tokens=64) | indexcache",
    ):
        assert isinstance(build_drafter(text, ONE), Through), text


def test_uncopyable_caches_are_refused():
    how = {"max_new_tokens": 24, "stop_ids": (), "drafter": ALL}
    with pytest.raises(Refusal, match="share slots, of which no head has pages; leave drafter= out"):
        jkv.generate(ONE, "h2o(budget=48, newest=0.2) | pooled(floor=0.5)", ROWS, **how)
    with pytest.raises(ValueError, match="selector goes by what other steps"):
        jkv.generate(ONE, ALL, ROWS, **how)
    with pytest.raises(ValueError, match="tokens=7, page=8: that are read together; a page or more"):
        jkv.generate(ONE, "full", ROWS, **how | {"drafter": "triforce(tokens=7)"})
    with pytest.raises(Refusal, match="layer 0 would be copied whole; give a selector of all layers"):
        jkv.generate(ONE, "full", ROWS, **how | {"drafter": Excerpts(CacheConfig(select=PageMean(first=1)))})
    with pytest.raises(ValueError, match="context"):
        jkv.generate(ONE, "full", [[5] * ONE.config.context], **how)


@pytest.mark.slow
def test_disk_codes_are_copied_in_host_pages(tmp_path):
    ask = partial(jkv.generate, ONE, f"full(host='all', disk={str(tmp_path)!r})", ROWS, max_new_tokens=40, stop_ids=())
    want, got = ask(), ask(drafter=f"triforce(tokens={EVERYTHING}, page=16)")
    assert got.tokens == want.tokens and got.receipt.drafted_taken == got.receipt.drafted > 20
    with pytest.raises(Refusal, match="from the host in units of 16 tokens, and it picks 8; take page=16"):
        ask(drafter=ALL)
