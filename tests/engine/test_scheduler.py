"""Buckets against every choice of lengths, and waves: every row once, after the beginning that it goes on from."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.engine.request import Request
from jkv.engine.scheduler import LONG, MANY, Grain, arrange, bounds, padded, waves
from jkv.generation.sampling_params import SamplingParams


def requests(lengths: list[int], *heads: int) -> list[Request]:
    """Rows of these lengths that share their first tokens and no more, with every so many'th other row."""
    rng, firsts = np.random.default_rng(0), [100 * i + np.arange(n) for i, n in enumerate(heads or (0,))]
    rows = []
    for i, n in enumerate(lengths):
        first = firsts[i % len(firsts)]
        rows.append(np.concatenate([first, [1000 + i], rng.integers(0, 50, max(n - len(first) - 1, 0))]))
    return [
        Request(line=i, id=None, tokens=r.astype(np.int32), settings=SamplingParams(max_new_tokens=8))
        for i, r in enumerate(rows, 1)
    ]


def cost(lengths: list[int], ends: tuple[int, ...], worth: int) -> float:
    if max(lengths) > max(ends):
        return float("inf")
    return sum(min(e for e in ends if e >= n) for n in lengths) + worth * len(ends)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=8), st.integers(1, 3), st.integers(0, 200))
def test_bucket_bounds_minimize_padding(lengths: list[int], most: int, worth: int):
    sizes = sorted({padded(n) for n in lengths})
    choices = [c for k in range(1, most + 1) for c in combinations(sizes, k)]
    found = bounds(lengths, most, worth)
    assert len(found) <= most and found == sorted(found)
    assert cost(lengths, tuple(found), worth) == min(cost(lengths, c, worth) for c in choices)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(60, 200), min_size=1, max_size=20),
    st.integers(0, 60),
    st.integers(1, 4),
    st.sets(st.integers(1, 20)),
    st.booleans(),
    st.sampled_from([None, Grain(unit=1, recent=16), Grain(unit=32, recent=0)]),
)
def test_waves_contain_every_row_once(
    lengths: list[int], head: int, several: int, done: set[int], shares: bool, grain: Grain | None
):
    rows = requests(lengths, head, head // 2, 40)
    seen: list[int] = []
    for bucket in arrange(rows, shares, grain):
        heads: tuple[np.ndarray, ...] = ()
        for wave in waves(bucket, several, {(line, 0) for line in done}):
            heads = wave.heads or heads
            assert 0 < len(wave.rows) <= several and len(wave.heads) <= several
            for i, (row, tail) in enumerate(zip(wave.rows, wave.tails, strict=True)):
                first = heads[wave.at[i]] if wave.at else np.zeros(0, np.int32)
                assert np.array_equal(np.concatenate([first, tail]), row.tokens) and len(tail)
                assert len(row.tokens) <= bucket.length and row.new <= bucket.new
                assert len(tail) <= wave.length and wave.length in (bucket.tails if wave.at else bucket.lengths)
                assert not wave.at or len(first) <= bucket.first
                assert not bucket.common or (len(tail) <= bucket.own and len(wave.heads) <= 1 and wave.at[i] == 0)
                seen.append(row.line)
    assert sorted(seen) == [r.line for r in rows if r.line not in done]


def test_prefix_is_shared_only_if_it_saves_padded_tokens():
    (bucket,) = arrange(requests([120] * 9, 100), True)
    assert [len(g.members) for g in bucket.shared] == [9] and (bucket.first, bucket.tails) == (112, (32,))
    assert bucket.saved == 800
    assert sum(len(w.heads) for w in waves(bucket, 4, ())) == 1
    (bucket,) = arrange(requests([120] * 9, 16), True)  # tails of 104 tokens, padded to 112
    assert bucket.saved == 8 * 16 and bucket.tails == (112,)
    (bucket,) = arrange(requests([120] * 9, 15), True)
    assert not bucket.shared
    (bucket,) = arrange(requests([120] * 9, 100), False)
    assert not bucket.shared


def test_long_tail_does_not_pad_other_rows():
    rows = requests([120] * 20 + [400], 100)
    (bucket,) = arrange(rows, True)
    assert bucket.tails == (32,) and len(bucket.shared[0].members) == 20


def test_short_tail_joins_group_of_longer_tails():
    (bucket,) = arrange(requests([105] + [120] * 8, 100), True)
    assert bucket.tails == (32,) and len(bucket.shared[0].members) == 9


def test_waves_group_rows_of_similar_length():
    (bucket,) = arrange(requests(np.random.default_rng(0).integers(16, 257, 200).tolist()), False)
    made = list(waves(bucket, 4, ()))
    assert all(len(t) <= w.length for w in made for t in w.tails) and len({w.length for w in made}) > 1
    assert sum(w.length * len(w.rows) for w in made) < 1.3 * sum(len(r.tokens) for r in bucket.rows)
    early, late = (np.mean([len(t) for w in part for t in w.tails]) for part in (made[:10], made[-10:]))
    assert early < late  # as many new tokens beside shorter prompts


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 120), st.integers(0, 3), st.sampled_from([1, 16, 32]), st.sampled_from([0, 16, 40]))
def test_shared_prefix_ends_at_unit_boundary(head: int, more: int, unit: int, recent: int):
    """As the tokens of a whole prompt enter a tier: those before the newest `recent`, in whole units."""
    rows = requests([*[head + 3 + i for i in range(MANY + more)], 30, 31], head)
    for bucket in arrange(rows, True, Grain(unit=unit, recent=recent)):
        for g in bucket.shared if bucket.common else ():
            shortest = min(len(bucket.rows[i].tokens) for i in g.members)
            assert g.length % unit == 0 and LONG <= g.length <= shortest - recent and len(g.members) >= MANY
            assert g.length + unit > min(head, shortest - recent)  # not one unit less
            assert len({tuple(bucket.rows[i].tokens[: g.length]) for i in g.members}) == 1


def test_short_or_rare_prefix_is_copied():
    kinds = {}
    for n, head in ((MANY, 100), (MANY - 1, 100), (MANY, LONG - 1)):
        (bucket,) = arrange(requests([120] * n, head), True, Grain(unit=1, recent=16))
        kinds[n, head] = bucket.common
    assert list(kinds.values()) == [True, False, False]
    shared, alone = arrange([*requests([120] * MANY, 100), *requests([121] * 3, 0)], True, Grain(unit=1, recent=16))
    assert {shared.common, alone.common} == {True, False} and {len(shared.rows), len(alone.rows)} == {MANY, 3}
    (bucket,) = arrange(requests([120] * 2 * MANY, 100, 90), True, Grain(unit=1, recent=16))
    made = list(waves(bucket, 4, ()))
    assert [len(w.heads) for w in made if w.heads] == [1, 1] and {w.at for w in made} == {(0,) * 4}
