"""Laws that every composition obeys, whatever its method; every method of the catalogue is in one."""

from __future__ import annotations

from itertools import product
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import models
from jkv.cache.padding import positions
from jkv.core import decode_loop, sampling
from jkv.methods import METHODS
from jkv.methods.budgets.layers import pyramid
from support import rig
from support.poison import poison
from support.rig import BUDGET, CASES, FORCED, LENGTHS, LONGEST, PARAMS, PROMPT, STEPS, Case, D, G, H, L, codes
from support.selections import prompt_taps

ALL = [*rig.ALL, *rig.OTHERS]
every = pytest.mark.parametrize("case", ALL, ids=str)
compressed = pytest.mark.parametrize("case", [c for c in ALL if c.budget], ids=str)
SHORT = np.where(np.arange(PROMPT.shape[1]) < 60, -1, PROMPT)  # 30 tokens: fills no budget
forward = jax.jit(models.forward)
TOLERANCE = 1e-4  # float32 logits of size 1, sums of at most 142 terms in another order


def test_every_method_has_tested_composition():
    assert set(rig.OWN) <= set(METHODS) == set(CASES)
    for name, cases in CASES.items():
        assert any(name in {part.partition("(")[0].strip() for part in c.text.split("|")} for c in cases), name


# ------------------------------------------------------------------------------------------------------- 1 neutral


@every
def test_cache_within_budget_matches_dense_model(case: Case):
    """A text within the budget, flushed by the program that evicts; or every token, where nothing has that budget."""
    prompt, forced, got = PROMPT, FORCED, None
    if "{b}" in case.text and "pyramid" not in case.text:
        prompt, forced = SHORT, FORCED[:, : BUDGET - 31]
        got = rig.run(case.tight, prompt, forced, params=case.params)
        assert rig.flushed(got.caches)
    got = got or rig.shared(case.wide, case.model)
    if case.slot.lossy:
        expected = replayed(got, case, prompt, forced)
    else:
        ids = np.concatenate([prompt, forced], 1)
        pos = positions(jnp.asarray(ids), jnp.zeros(2, jnp.int32))
        expected = np.asarray(forward(case.params, jnp.asarray(ids), pos)).transpose(1, 0, 2)[prompt.shape[1] - 1 :]
    for i, (logits, after) in enumerate(zip(got.logits, got.caches, strict=True)):
        assert np.array_equal(np.asarray(after.kept())[:, :, 0], np.tile(np.asarray(after.seen), (L, 1))), i
        np.testing.assert_allclose(logits, expected[i], atol=TOLERANCE, rtol=0)


def replayed(run: rig.Run, case: Case, prompt: np.ndarray = PROMPT, forced: np.ndarray = FORCED) -> list[np.ndarray]:
    """Logits of a dense model whose tokens are decode(encode(x)) from the step on at which the cache encodes them."""
    replay = rig.Replay(run.caches[0].plan, case.params, prompt)
    return [replay.logits, *(replay.step(*x) for x in zip(forced.T, run.caches[1:], strict=True))]


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in ALL
        if (c.budget or c.grows) and not (c.ranked or c.merges or c.rest or c.prunes or (c.slot.lossy and c.unit > 1))
    ],  # of pruned prompts in methods/test_fastkv.py
    ids=str,
)
def test_attention_covers_kept_tokens(case: Case):
    run = rig.shared(case.tight, case.model)
    for got, expected in zip(run.logits, replayed(run, case), strict=True):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)


@every
def test_sinks_stay_exact_and_outside_tiers(case: Case):
    caches, n = rig.shared(case.tight, case.model).caches, case.sinks
    assert case.config.num_sinks == n
    for layer, cache in product(range(L), (caches[0], caches[-1])):
        old, new = caches[0].layers[layer].recent, cache.layers[layer].recent
        for x, y in ((old.pos, new.pos), (old.k, new.k), (old.v, new.v)):
            np.testing.assert_array_equal(
                x[..., :n, :] if x.ndim > 2 else x[:, :n], y[..., :n, :] if x.ndim > 2 else y[:, :n]
            )
        first = n - case.config.predicted_sinks
        np.testing.assert_array_equal(new.pos[:, :first], [range(first)] * 2)
        coded, _ = rig.held(cache, layer)
        assert (new.pos[:, :n] >= 0).all() and not np.take_along_axis(coded, np.asarray(new.pos)[:, None, :n], 2).any()


@pytest.mark.parametrize("case", [c for c in ALL if c.rest], ids=str)
def test_residual_is_exact_for_equal_keys(case: Case):
    """One token with the weight of many is then these tokens: the logits are those of the full model."""
    blind = decode_loop.replace(PARAMS, layers=tuple({**x, "qkv": x["qkv"].at[:, G].set(0)} for x in PARAMS.layers))
    got, ids = rig.run(case.tight, params=blind), np.concatenate([PROMPT, FORCED], 1)
    expected = forward(blind, jnp.asarray(ids), positions(jnp.asarray(ids), jnp.zeros(2, jnp.int32)))
    expected = np.asarray(expected).transpose(1, 0, 2)[PROMPT.shape[1] - 1 :]
    np.testing.assert_allclose(np.stack(got.logits), expected, atol=TOLERANCE, rtol=0)
    assert all((np.asarray(layer.residual.count).max() > 50) for layer in got.caches[-1].layers)


@pytest.mark.parametrize("case", [c for c in ALL if c.whole], ids=str)
def test_full_heads_keep_all_and_others_sinks_and_recent(case: Case):
    caches = rig.shared(case.tight).caches
    for i in (0, rig.flushed(caches)[2]):
        cache, whole = caches[i], (1, 0)
        for layer in range(L):
            held, rest = np.logical_or(*rig.held(cache, layer)), cache.layers[layer].residual
            for row, n in enumerate(LENGTHS):
                n, few = n + i, BUDGET + 4
                assert held[row, whole[layer], :n].all()
                local = held[row, 1 - whole[layer], :n]
                first = np.argmin(local[4:]) + 4  # the first that is gone
                lost = np.flatnonzero(~local)
                assert local[:4].all() and first == 4 and (np.diff(lost) == 1).all()
                late = int(i > 0)  # the token that came since the flush
                assert n - few - 1 - late <= len(lost) <= n - few - late
                if case.rest:
                    assert rest.count[row].tolist()[:: 2 * whole[layer] - 1] == [len(lost), 0]
                if i or not case.rest:
                    continue
                _, k, v, _ = prompt_taps(layer, row)
                for got, x in ((rest.k, k), (rest.v, v)) if layer == 0 else ():
                    np.testing.assert_allclose(got[row, 1], 0 * x[1, 0], atol=0)
                    np.testing.assert_allclose(got[row, 0], x[0, lost].mean(0), atol=1e-5)


# -------------------------------------------------------------------------------------------------------- 2 poison


@every
def test_dead_slots_are_masked(case: Case):
    clean, bad = rig.shared(case.tight, case.model), rig.run(case.tight, poison=poison, params=case.params)
    np.testing.assert_array_equal(np.stack(bad.logits), np.stack(clean.logits))
    few = FORCED[:, :20]  # one flush: tiers that are not full yet
    clean, bad = (rig.run(case.tight, SHORT, few, poison=x, params=case.params) for x in (None, poison))
    np.testing.assert_array_equal(np.stack(bad.logits), np.stack(clean.logits))


@pytest.mark.parametrize("case", [CASES[x][-1] for x in ("h2o", "snapkv", "keydiff", "expected_attention")], ids=str)
def test_paused_rows_leave_masked_entries(case: Case):
    clean, bad = (rig.run(case.tight, forced=rig.PAUSES, poison=x) for x in (None, poison))
    live = rig.PAUSES.T >= 0
    np.testing.assert_array_equal(np.stack(bad.logits)[1:][live], np.stack(clean.logits)[1:][live])
    np.testing.assert_array_equal(bad.caches[-1].kept(), clean.caches[-1].kept())


# --------------------------------------------------------------------------------------------- 3 alone = in a batch


@every
def test_rows_are_independent(case: Case):
    together = rig.shared(case.tight, case.model)
    nobody = np.full_like(PROMPT[:1], -1), np.full_like(FORCED[:1], -1)
    prompt, forced = np.concatenate([PROMPT[1:], nobody[0]]), np.concatenate([FORCED[1:], nobody[1]])
    apart = rig.run(
        case.tight, prompt, forced, params=case.params
    )  # row 1, the shorter, moved to row 0, beside a row that has no token
    for a, b in zip(apart.logits, together.logits, strict=True):
        np.testing.assert_allclose(a[0], b[1], atol=1e-5, rtol=0)
    for layer in range(L):
        a, b = (np.stack(rig.held(r.caches[-1], layer)) for r in (apart, together))
        np.testing.assert_array_equal(a[:, 0], b[:, 1])


@pytest.mark.parametrize("case", [CASES["snapkv"][1], CASES["knorm"][0]], ids=str)
def test_padding_changes_nothing(case: Case):
    together = rig.shared(case.tight)
    bare = rig.run(case.tight, PROMPT[:, -LENGTHS[1] :])  # row 0 is now another text, as long as row 1
    for a, b in zip(bare.logits, together.logits, strict=True):
        np.testing.assert_allclose(a[1], b[1], atol=TOLERANCE, rtol=0)


# --------------------------------------------------------------------------------------------------- 4 one compile


@pytest.mark.parametrize("case", [c for c in ALL if not c.measured], ids=str)  # whose layers' sizes are the prompt's
def test_no_recompilation(case: Case):
    caches = rig.shared(case.tight, case.model).caches
    programs = (
        decode_loop.embedded,
        decode_loop.attended,
        decode_loop.mixed,
        decode_loop.flushed,
        decode_loop.last_logits,
        decode_loop.flushed_due,
        decode_loop.steps,
    )
    kinds = {(jax.tree.structure(c), *map(jax.typeof, jax.tree.leaves(c))) for c in caches}
    assert len(kinds) == 1
    before = [f._cache_size() for f in programs]
    rig.run(case.tight, (PROMPT + 1) % 50, (FORCED[:, :2] + 1) % 50, params=case.params)
    assert [f._cache_size() for f in programs] == before


@pytest.mark.parametrize(
    "case", [CASES["full"][0], CASES["streaming"][0], CASES["snapkv"][1], *rig.OTHERS[1::2]], ids=str
)
def test_decode_loop_compiles_once_and_matches_single_steps(case: Case):
    sizes = []
    for _ in range(2):
        start = rig.shared(case.tight, case.model)
        state = decoding(start.caches[0], start.logits[0])
        state = decode_loop.run_blocks(case.params, state, greedy(), jnp.int32(STEPS))
        sizes.append([f._cache_size() for f in (decode_loop.steps, decode_loop.flushed_due, decode_loop.entering)])
    assert sizes[0] == sizes[1]
    again = rig.run(case.tight, forced=np.asarray(state.out), params=case.params)
    np.testing.assert_array_equal(np.stack(again.logits[:-1]).argmax(-1).T, state.out)
    np.testing.assert_allclose(again.logits[-1], state.logits, atol=TOLERANCE, rtol=0)


def greedy():
    return sampling.make(2, 100, seeds=(0, 1), stop_ids=())


def decoding(cache, logits):
    cache = jax.tree.map(jnp.copy, cache)  # the loop takes its argument over
    return decode_loop.Decoding.start(cache, jnp.asarray(logits), STEPS)


# --------------------------------------------------------------------------------------------------------- 5 bytes


def predicted(case: Case, longest: int, plan=None) -> int:
    """Bytes of the tight cache for two rows, by arithmetic; where layers asked, with the capacities of this plan."""
    room = case.exact + case.unit - 1 + 16
    total = 0
    for layer in range(L):
        columns, queries = len(case.plan[layer].columns), case.plan[layer].queries
        capacity = longest
        if case.grows:
            capacity = longest - STEPS + case.recent + ceil(case.grows * (STEPS - case.recent))
        if case.budget:
            capacity = BUDGET + (STEPS if case.appends else 0)
        if case.measured:
            total += 4  # the row's share
        if case.measured and plan:
            capacity = plan[layer].capacity
        if case.whole:
            capacity = ceil((case.whole * longest + (H - case.whole) * (BUDGET + 4)) / H)
        if case.draft:
            capacity = longest if layer < case.draft else BUDGET
        total += H * (D + 2) * 4 * case.odds
        if "pyramid" in case.text:
            capacity = case.recent + pyramid(BUDGET - case.recent, L, 20)[layer]
        capacity = min(capacity, longest)
        slots = ceil((capacity - case.exact) / case.unit) * case.unit * case.tiers
        total += room * (H * 2 * D * 4 + 4 + H * 4 * columns)
        total += H * (2 * D + 1) * 4 * case.rest
        total += queries * (H * G * D * 4 + 4 + H * G * 4)
        own = slots
        if case.later:  # of the prompt, and of what follows it
            own = ceil((longest - STEPS - case.exact - case.apart) / case.unit) * case.unit
            slots = own + case.apart + ceil(STEPS / case.unit) * case.unit
        total += round(own * H * (case.slot.k + case.slot.v)) + slots * H * 4 * columns
        if case.later:
            total += (slots - own) * H * round(case.later.k + case.later.v) + 4 * case.taught
        total += (slots + case.ranked) * (1 if case.uniform else H) * 4 + slots * H * case.pooled
        select = case.plan[layer].select
        if select is not None:
            index = 0 if select.follows else case.index
            total += (slots - case.apart) // case.page * H * index * 4 + H * case.memo * 4
    return 2 * (total + states(case))


def states(case: Case) -> int:
    """Bytes of a row's states: with inputs of the 3 tokens before, of 16 that wait, their steps, and a count."""
    m = case.params.config.mixers
    if m is None:
        return 0
    # by the delta rule also what those that wait write
    written = 16 * m.heads * m.head_dim if m.rule == "delta" else 0
    return len(m.at) * 4 * (m.heads * m.head_dim * m.state + (3 + 16) * m.channels + 16 * m.heads + 1 + written)


@every
def test_bytes_match_formula(case: Case):
    cache = rig.shared(case.tight, case.model).caches[0]
    assert cache.nbytes == predicted(case, LONGEST, cache.plan)


@pytest.mark.parametrize("case", [c for c in ALL if c.budget or c.slot.lossy], ids=str)
def test_long_prompt_takes_fewer_bytes_than_dense_cache(case: Case):
    size = rig.empty(case.tight, longest=rig.LONG, params=case.params).nbytes
    assert size == predicted(case, rig.LONG)
    coded = max(0.5, 0.05 + (case.slot.k + case.slot.v) / (8 * D))  # where keys alone are, more than a half is left
    coded += STEPS / rig.LONG if case.later else 0
    assert size - 2 * states(case) < 2 * L * rig.LONG * H * 2 * D * 4 * (0.25 if case.budget else coded)


# ------------------------------------------------------------------------------------------------------ 6 survivors


@pytest.mark.parametrize("case", [c for c in ALL if not c.merges], ids=str)  # a merge rewrites dense slots
def test_survivors_are_never_reencoded(case: Case):
    caches = rig.shared(case.tight, case.model).caches
    flushes = rig.flushed(caches)
    assert len(flushes) >= 3
    before, admitted = codes(caches[0]), 0
    for i in flushes:
        after = codes(caches[i])
        stay = before.keys() & after.keys()
        admitted += len(after.keys() - before.keys())
        assert stay
        assert all(before[key] == after[key] for key in stay)
        before = after
    assert admitted


# --------------------------------------------------------------------------------------------------------- 7 chunks


def chunked(text: str, size: int):
    """Prompt 0 in chunks; the cache and the logits of its last token."""
    cache, ids = rig.empty(text), jnp.asarray(PROMPT)[:1].repeat(2, 0)
    for start in range(0, ids.shape[1], size):
        cache, logits = decode_loop.prefill(PARAMS, cache, ids[:, start : start + size])
    return cache, logits


def test_chunked_prefill_equals_whole_prefill():
    text = "full"
    whole = rig.shared(text)
    pieces, logits = chunked(text, 30)
    np.testing.assert_allclose(logits[0], whole.logits[0][0], atol=TOLERANCE, rtol=0)
    single = rig.empty(text)
    for token in PROMPT[0]:
        single, one = decode_loop.step(PARAMS, single, jnp.full(2, token))
    np.testing.assert_allclose(one[0], whole.logits[0][0], atol=TOLERANCE, rtol=0)
    for layer in range(L):
        sets = [np.logical_or(*rig.held(c, layer))[0] for c in (whole.caches[0], pieces, single)]
        np.testing.assert_array_equal(sets[0], sets[1])
        np.testing.assert_array_equal(sets[0], sets[2])


@pytest.mark.parametrize("text", ["int8", "int4", rig.KIVI_TEXT, "knorm(budget=48)", "streaming(budget=48)"])
def test_first_layer_codes_are_independent_of_chunk_size(text: str):
    # Its keys depend on the tokens alone, and the ranks of these methods do not change with time.
    whole, pieces = rig.prompted(text), chunked(text, 30)[0]
    a, b = ({k: v for k, v in codes(c).items() if k[:2] == (0, 0)} for c in (whole, pieces))
    assert a.keys() == b.keys()
    for coded in ("int8", "int4", rig.KIVI_TEXT):
        if text == coded:
            same = np.mean([a[key] == b[key] for key in a])
            assert same > 0.95  # a key at a rounding boundary may fall on either side


# --------------------------------------------------------------------------------------------------------- 8 values


@pytest.mark.parametrize("case", [CASES[x][-1] for x in ("full", "h2o", "snapkv", "knorm")], ids=str)
def test_caches_are_immutable(case: Case):
    whole = rig.shared(case.tight)
    start = whole.caches[20]
    frozen = [np.array(x) for x in jax.tree.leaves(start)]
    for _ in range(2):  # the same cache, continued twice
        cache = start
        for i in range(20, 40):
            cache, logits = decode_loop.step(PARAMS, cache, jnp.asarray(FORCED[:, i]))
        np.testing.assert_array_equal(logits, whole.logits[40])
    decode_loop.prefill(PARAMS, start, jnp.asarray(FORCED[:, :30]))
    assert all(np.array_equal(a, b) for a, b in zip(frozen, jax.tree.leaves(start), strict=True))
    forked = start.fork(2)
    for rows in ([0, 2], [1, 3]):  # each a copy of either row: what the program of two rows goes on from
        cache = forked.pick(jnp.array(rows))
        for i in range(20, 40):
            cache, logits = decode_loop.step(PARAMS, cache, jnp.asarray(FORCED[:, i]))
        np.testing.assert_array_equal(logits, whole.logits[40])


# --------------------------------------------------------------------------------------------------------- 9 budget


@compressed
def test_kept_tokens_match_budget(case: Case):
    caches = rig.shared(case.tight, case.model).caches
    budget = np.full((L, 1, 1), BUDGET)
    if "pyramid" in case.text:
        budget[:, 0, 0] = np.array(pyramid(BUDGET - case.recent, L, 20)) + case.recent
        assert budget.mean() == BUDGET
    if case.measured:
        budget = np.stack([layer.share for layer in caches[0].layers])[:, :, None] + case.exact
        assert (budget.mean(0) == BUDGET).all() and len(np.unique(budget)) > 1
    flushes = {0, *rig.flushed(caches)}
    for i, cache in enumerate(caches):
        more = i if case.appends else 0
        kept, fed = np.asarray(cache.kept()), np.asarray(cache.seen)[None, :, None]
        if case.pooled:
            assert (kept <= fed).all()
            kept = kept.mean(-1, keepdims=True)
        at_flush = i in flushes
        # right after a flush: the budget, tokens that do not fill a unit yet, and the token that came since
        bound = budget + more + case.unit - 1 + ((i > 0) if at_flush else 16)
        assert (kept <= np.minimum(bound, fed)).all(), i
        if case.follows and at_flush:
            np.testing.assert_array_equal(*(np.logical_or(*rig.held(cache, layer)) for layer in range(L)))
        if at_flush and case.unit == 1 and not more:
            assert (kept == np.minimum(bound, fed)).all(), i


@pytest.mark.parametrize("case", [c for c in ALL if c.grows], ids=str)
def test_growing_budget_keeps_prompt_and_share_of_answer(case: Case):
    caches = rig.shared(case.tight).caches
    for i in rig.flushed(caches):
        older = max(i - 1 - case.recent, 0)
        want = np.array(LENGTHS) + i - ceil((1 - case.grows) * older)
        np.testing.assert_array_equal(caches[i].kept(), np.tile(want[:, None], (L, 1, H)))
        for row, n in enumerate(LENGTHS):
            assert np.logical_or(*rig.held(caches[i], 0))[row, :, :n].all()


# -------------------------------------------------------------------------------------------------------- on disk


@every
def test_saved_cache_round_trips(case: Case, tmp_path):
    caches = rig.shared(case.tight, case.model).caches
    for cache in (caches[0], caches[len(caches) // 2], caches[-1]):
        cache = decode_loop.replace(cache, name=case.tight)
        jkv.save_cache(cache, tmp_path / "c", case.params)
        again = jkv.load_cache(tmp_path / "c", case.params)
        assert jax.tree.structure(again) == jax.tree.structure(cache)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True))
