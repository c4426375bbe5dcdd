"""Text that is given after a prompt: what it may cost the prompt, and that it is there when it is answered."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.cache import Cache
from jkv.core import decode_loop
from jkv.methods import METHODS, compatibility
from jkv.methods.budgets.sizes import Beyond
from support import rig
from support.rig import LENGTHS, PARAMS, L

LATER, ANSWER = (14, 15), 17  # tokens of each row after its prompt; steps of an answer: a flush
QUESTION = np.full((2, max(LATER)), -1, np.int32)
for _row, _n in enumerate(LATER):
    QUESTION[_row, -_n:] = rig.FORCED[_row, -_n:]

# Every composition of the laws, and what compresses only a prompt with every codec that tokens can be kept in.
CODED = [
    f"snapkv(budget=40, window=8) | append | {rig.CASES[name][0].tight}"
    for name, method in METHODS.items()
    if method.axes and method.axes[0] == "codec"
]
CASES = [*rig.ALL, *rig.OTHERS, *map(rig.Case, CODED)]


def held(cache: Cache) -> np.ndarray:
    """bool[L,B,H,LONGEST]: which positions a cache holds, coded or exact."""
    return np.stack([np.logical_or(*rig.held(cache, i)) for i in range(L)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_extend_keeps_new_tokens_and_respects_budget(case: rig.Case):
    """On top of the budget and at no cost to the prompt, where a method compresses prompts; else within the budget."""
    params, config = case.params, case.config
    if case.text in CODED:
        compatibility.check(config, params.config)
    before = rig.begun(case.tight, params=params)[0]
    share = config.budget.share if isinstance(config.budget, Beyond) else 0
    question = QUESTION[:, -8:] if 0 < share < 1 else QUESTION  # room for a share of what may come
    later = (question >= 0).sum(1).tolist()
    after, logits = decode_loop.prefill(params, before, jnp.asarray(question), later=True)
    assert np.isfinite(np.asarray(logits)).all()
    start = before.seen.tolist() if config.prefill.traits.skips else LENGTHS
    assert after.prompt.tolist() == list(start) and after.counts.later.tolist() == later
    was, now, answered = held(before), held(after), after
    if not share:
        most = np.asarray(after.kept())
        for i, plan in enumerate(after.plan):
            for b, (n, m) in enumerate(zip(start, later, strict=True)):
                assert now[i, b, :, n + m - min(plan.recent, m) : n + m].all()
            slots = sum(t.most for t in plan.tiers) + plan.stay
            assert (most[i] <= slots).all() if plan.pooled is None else (most[i].mean(-1) <= slots).all()
        return
    for i in range(ANSWER):
        answered, _ = decode_loop.step(params, answered, jnp.asarray(rig.FORCED[:, i]))
    assert int(answered.fill) < int(answered.recent_size) and (answered.counts.generated == ANSWER).all()
    for cache in (after, answered):
        now = held(cache)
        assert (now | ~was).all() if cache is after or share == 1 else now.any()
        for b, (n, m) in enumerate(zip(start, later, strict=True)):
            assert now[:, b, :, n : n + m].all()


def test_tokens_beyond_reserve_are_refused():
    rows = [[t % 90 for t in range(3, 63)], [t % 90 for t in range(5, 78)]]
    for text in ("kvzip(budget=32)", "snapkv(budget=32, window=8) | append"):
        cache, _ = jkv.prefill(PARAMS, text, rows, reserve=20)
        cache, _ = jkv.extend(PARAMS, cache, [[1, 2, 3, 4]] * 2)
        np.testing.assert_array_equal(np.asarray(cache.kept()).mean((0, 2)), 36)
        with pytest.raises(ValueError, match="room for 20 tokens on top of its budget.*hold 21.*larger reserve="):
            jkv.generate(PARAMS, cache, [[5, 6, 7]] * 2, max_new_tokens=14)
        out = jkv.generate(PARAMS, cache, [[5, 6, 7]] * 2, max_new_tokens=13, stop_ids=())
        assert np.asarray(out.cache.kept()).mean((0, 2)).max() <= 32 + 20
    cache, _ = jkv.prefill(PARAMS, "snapkv(budget=32, window=8)", rows, reserve=20)
    assert np.asarray(jkv.extend(PARAMS, cache, [[5] * 40] * 2)[0].kept()).max() <= 32


@pytest.mark.parametrize("text", ["full", "svdq", "simlayerkv(local=16, sinks=4)"])
def test_overflow_of_cache_without_eviction_is_refused(text: str):
    rows = [[t % 90 for t in range(3, 63)]]
    out = jkv.generate(PARAMS, text, rows, max_new_tokens=16, stop_ids=())
    with pytest.raises(ValueError, match="prefill with a larger reserve="):
        jkv.generate(PARAMS, out.cache, [[5] * 80], max_new_tokens=64, stop_ids=())
