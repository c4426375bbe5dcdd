"""Drafters and what generation does with them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jkv
from jkv.core import sharding
from jkv.generation import generate
from jkv.methods import parse
from jkv.models import TINY, random
from jkv.speculative import autoregressive, decoding
from jkv.speculative.build import build_drafter
from jkv.speculative.combined import Either
from jkv.speculative.decoding import Drafting, drafts
from jkv.speculative.draft_length import NODES, SURE, WIDTHS, Pace
from jkv.speculative.draft_model import Through
from jkv.speculative.proposer import Guess, Recycling, Suffix, template
from support import commands
from support.rig import MODELS, PARAMS

A, B, C = 1, 2, 3
TEXT = [5, 6, 7, 8, 9] * 8


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A clock that stands: costs are those that are assumed before any is measured."""
    for module in (generate, autoregressive):
        monkeypatch.setattr(module, "Drafting", partial(Drafting, clock=lambda: 0.0))


def test_suffix_continues_repeated_tokens():
    """The oracles of the method: ABCAB gives CA by two tokens, ABCABCAB gives CAB by five."""
    one, two = Suffix().propose([[A, B, C, A, B], [A, B, C, A, B, C, A, B]], 8)
    assert (one.ids, one.chance, one.parent) == ([C, A], [0.5, 0.5], [-1, 0])
    assert two.ids == [C, A, B] and sum(two.chance) == pytest.approx(1.5)
    assert Suffix().propose([[A, B, C]], 8)[0].ids == []


@pytest.mark.parametrize("depth", [64, 7])
def test_suffix_matches_brute_force(depth: int):
    """A match and what follows it are no longer than the depth; of equally frequent tokens the one that came first."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        row = rng.integers(0, rng.integers(2, 4), rng.integers(2, 40)).tolist()
        got, best = Suffix(depth=depth).propose([row], 6)[0], ([], 0.0)
        for m in range(1, min(len(row), depth)):
            ends = [i for i in range(m - 1, len(row)) if row[i - m + 1 : i + 1] == row[-m:]]
            ids, p, score, at = [], 1.0, 0.0, ends
            while len(ids) < min(6, m, depth - m):
                after = [row[i + 1] for i in at if i + 1 < len(row)]
                if not after:
                    break
                token = min(set(after), key=lambda t: (-after.count(t), after.index(t)))
                p *= after.count(token) / len(at)
                if p < 0.1:
                    break
                ids, score = [*ids, token], score + p
                at = [i + 1 for i in at if i + 1 < len(row) and row[i + 1] == token]
            if ids and score >= best[1]:
                best = ids, score
        assert (got.ids, sum(got.chance)) == (best[0], pytest.approx(best[1]))


def test_suffix_remembers_outputs_and_evicts_oldest():
    one = Suffix(limit=6)
    one.begin([[A, B]], 4)
    one.end([[A, B, 40, 41, 42, 43]])
    assert one.propose([[9, 40, 41]], 8)[0].ids == [42, 43]
    one.begin([[A]], 4)
    one.end([[A, 50, 51, 52]])
    assert one.propose([[9, 50, 51]], 8)[0].ids == [52]
    assert one.propose([[9, 40, 41]], 8)[0].ids == []
    assert one.propose([[9, 8, 43]], 8)[0].ids == []  # another output follows, and it is no continuation


def test_recycling_reads_table_level_by_level():
    one = Recycling(100)
    assert one.propose([[7]], 3)[0] == Guess([0, 0, 0], template(3)[0], [0.0] * 3)
    best = np.asarray([[[4, 5, 6, 0, 1, 2, 3, 9], [8, 9, 1, 2, 3, 4, 5, 6], [9] * 8]])
    one.learn(np.asarray([[7, 4, 7]]), best)  # the first of two equal tokens counts, none is -1
    assert one.table[7].tolist() == best[0, 0].tolist() and one.table[4].tolist() == best[0, 1].tolist()
    parent, rank, expected = template(4)
    got = one.propose([[7]], 4)[0]
    assert got.ids[0] == 4 and got.ids[parent.index(0)] == best[0, 1, rank[parent.index(0)]]
    one.learn(np.asarray([[-1, 3]]), np.zeros((1, 2, 8), int))
    assert one.table[-1].tolist() == [0] * 8 and got.chance == [*expected[:3], 0.0]  # 8 is new


def test_recycling_learns_only_new_tokens_of_rows():
    """Rows that go on in their places are not read again, or the order of what a pass told would be lost."""
    one = Recycling(100)
    one.begin([[7, 4, 5], [9, 8]], 9)
    one.propose([[7, 4, 5], [9, 8]], 3)
    best = np.asarray([[[6, 4, 5, 0, 1, 2, 3, 9]]])
    one.learn(np.asarray([[7]]), best)
    one.begin([[7, 4, 5], [3]], 9)  # one has ended
    one.propose([[7, 4, 5, 2], [3, 1]], 3)
    assert one.table[7].tolist() == best[0, 0].tolist() and (one.table[5, 0], one.table[3, 0]) == (2, 1)
    one.begin([[7, 4]], 9)
    one.propose([[7, 4]], 3)
    assert one.table[7, :3].tolist() == [4, 6, 5]


def test_recycling_branch_learns_no_unverified_tokens():
    one = Recycling(100)
    one.begin([[7, 4]], 9)
    branch = one.branch([[7, 4, 5]])
    branch.propose([[7, 4, 5, 60, 61]], 3)
    assert one.table[4, 0] == 5 and one.met[5] == one.met[60] == 0
    one.propose([[7, 4, 5, 9]], 3)
    branch.learn(np.asarray([[7]]), np.full((1, 1, 8), 3))
    assert one.table[5, 0] == 9 and one.table[7, 0] == 3  # the table is one


def test_branch_shares_pace_of_its_drafter(monkeypatch):
    monkeypatch.setattr(Through, "_reads", lambda *_, **__: None)
    one = Through(PARAMS, behind=Suffix())
    assert one.branch([[1]]).pace is one.pace


class Told(Recycling):
    """It guesses 5 and 6 for the first row, 5 for the others, and remembers what it was asked and told."""

    asked: Any = None
    told: Any = ()
    clock: Any = int

    def propose(self, rows, most, verifier=None):
        self.asked = rows, most
        return [Guess([5, 6], [-1, 0], [0.9, 0.9]), *[Guess([5], [-1], [0.9])] * (len(rows) - 1)]

    def learn(self, ids, top):
        self.told += (ids.tolist(),)
        self.clock()


def state_of(count: int, fill: int, alive: list[bool]) -> Any:
    """A state as far as a generation with drafts reads it itself."""
    cache = SimpleNamespace(fill=fill, recent_size=20, stay=4, seen=None)
    out, logits = np.full((len(alive), 64), 3), np.tile(np.arange(9.0), (len(alive), 1))
    return SimpleNamespace(count=count, alive=np.asarray(alive), cache=cache, out=out, logits=logits, used=None)


def test_passes_are_bounded_by_window_and_answer_length():
    """Until the window is full, or the answer: 20 entries, of which 4 stay after a flush."""
    found = []

    class Cut(Drafting):
        def _advance(self, tokens, count, new, most):
            found.append(most)
            self.state.count, self.state.cache.fill = count + most, (self.state.cache.fill - 4) % 16 + 4 + most

        def _steps(self, count, new, paused):
            found.append(0)
            self.state.count += 1

    class Wide(Pace):
        def width(self, guesses):
            return 8 if guesses[0].ids else 0

    run = Cut(PARAMS, state_of(0, 15, [True]), None, Told(100), None, [[1]], Wide())  # type: ignore
    for _ in run.rounds(22, [[]]):
        pass
    assert found == [5, 8, 8, 0]


def test_ended_rows_are_neither_drafted_nor_learned(monkeypatch):
    """And what a guess takes has in it what is told before it."""
    monkeypatch.setattr(decoding, "drafts", lambda guesses, *_: None)
    told, now = Told(100), iter(range(100))
    told.clock = lambda: next(now)
    after = SimpleNamespace(count=1, alive=np.ones(3, bool))
    verdict = SimpleNamespace(ids=np.zeros((3, 1)), alone=np.asarray([0, 0, 3]), known=np.full((3, 1), -1), top=None)
    answers = iter([np.asarray([2, 2, 2]), (after, verdict)])
    cost: Any = SimpleNamespace(compiling=0.0, begin=lambda *_, **__: next(answers))
    pace = Pace(asked=True)
    pace.stepped(1.0, 1, paused=False)
    monkeypatch.setattr(pace, "width", lambda guesses: 4)
    state = state_of(0, 4, [False, False, True])
    run = Drafting(PARAMS, state, None, told, cost, [[0], [8, 9], [6, 7]], pace, told.clock)  # type: ignore
    run._advance([[], [], []], 0, 40, 4)
    assert told.asked == ([[0], [8, 9], [6, 7, 2]], 3) and told.told[0] == [[-1], [-1], [7]]
    assert run.drafted == 1 and run.alone == 3 and pace.guesses[-1] == 2


def test_row_without_its_known_tokens_is_not_relearned():
    one = Recycling(100)
    one.propose([[1, 2, 3, 4, 5]], 3, SimpleNamespace(known=[[4, 5]]))  # type: ignore
    one.learn(np.asarray([[1]]), np.arange(9, 17)[None, None])
    one.propose([[1, 2, 3]], 3)
    assert one.table[1].tolist() == [*range(9, 17)]
    one.propose([[1, 2, 4]], 3)  # another row
    assert one.table[1].tolist() == [2, *range(9, 16)]


def test_known_tokens_persist_until_emitted():
    """Through passes that reach less far, and steps; it is counted once, and no guess is longer than can come."""
    first, *more = [np.asarray(x) for x in ([2, 2], [[-1], [3]], [1, 2])]
    verdict = SimpleNamespace(ids=np.zeros((2, 2)), alone=more[1], known=more[0], top=None)
    state = state_of(0, 4, [True, True])
    answers = iter([first, (state_of(1, 5, [True, True]), verdict), state_of(3, 7, [True, True])])
    cost: Any = SimpleNamespace(compiling=0.0, begin=lambda *_, **__: next(answers))
    pace = Pace(stride=2)
    pace.width = lambda guesses: 2  # type: ignore
    run = Drafting(PARAMS, state, None, Suffix(), cost, [[1], [1]], pace, lambda: 0.0)  # type: ignore
    run.known = [[], [9, 3, 8, 7, 6]]
    assert [guess.ids for guess in run._guesses([[], []], [True, True], 3)] == [[], [9, 3, 8]]
    answers = iter([first, *answers])
    run._advance([[], []], 0, 40, 4)
    assert run.known == [[], [3, 8, 7, 6]] and run.alone == 0.5  # of the other row, which knew nothing
    run._steps(1, 40, paused=False)
    assert run.known == [[], [7, 6]]


def test_guess_time_is_charged():
    """The first one, which compiles too, as if it were the second one again."""
    pace = Pace()
    for n in (10, 5):  # a step takes a second, and a look nothing
        pace.stepped(float(n), n, paused=False)
    pace.lost = 0.0
    for seconds, lost in ((90.0, 0.0), (0.25, 0.5), (0.25, 0.75), (4.0, 4.75)):
        pace.guessed(seconds, used=False)
        assert pace.lost == lost
    pace.guessed(3.0, used=True)
    assert pace.lost == 4.75 + 3.0 - pace._guessing  # the rest is in the cost of the pass


def test_unequal_strides_separate_step_and_look_costs():
    """A stride of n takes o + n b: until two lengths are known, a look is taken for 0.2 steps."""
    one, two = Pace(), Pace()
    one.stepped(4.2, 4, paused=False)
    assert one.step == pytest.approx(1.0) and one.lost == pytest.approx(0.2)
    for n in (8, 16, 16, 1):
        two.stepped(2.0 * n + 0.6, n, paused=False)
    assert (two.step, two.look) == pytest.approx((2.0, 0.3))


def test_pace_recovers_from_slow_step_measurement():
    """A step that seemed to take four makes every pass look as if it gained."""
    pace, took, at = Pace(), [0.0], [0]
    pace.stepped(16.0, 4, paused=False)
    for _ in range(400):
        if width := pace.width([SURE]):
            took.append(2.0)
            pace.passed(took[-1], width, SURE.best(width - 1), 0)
        else:
            took.append(pace.stride + 0.2)
            pace.stepped(took[-1], pace.stride, paused=True)
        at.append(pace.tokens)
    assert took[1:65] == [2.0] * 64 and at[64] == 68
    assert sum(took[101:]) < 1.05 * (at[-1] - at[100])


def test_tree_has_likeliest_nodes_parents_first():
    for n in (1, 2, 7, 30):
        parent, rank, expected = template(n)
        assert len(parent) == len(expected) == n and all(p < i for i, p in enumerate(parent)) and rank[0] == 0
        assert len({*zip(parent, rank, strict=True)}) == n and 0 < sum(expected) < n and max(expected) == 0.5


def chain(*chance: float) -> Guess:
    return Guess(range(len(chance)), range(-1, len(chance) - 1), chance)


def test_pass_width_maximizes_token_rate():
    """c(n) = 1 + 0.2 (n - 1): of chances a, a^2 ... the best n of (1 + a + ... + a^(n-1)) / c(n), by hand."""
    pace, powers = Pace(waited=-99), lambda a: chain(*(a**d for d in range(1, 8)))
    for n in (16, 8, 16):
        pace.stepped(10.0 * n, n, paused=False)
    pace.lost, pace.passes[8] = 0.0, deque([24.0])
    for a in (0.1, 0.25, 0.5, 0.75, 0.95):
        rates = {n: sum(a**d for d in range(n)) / (1 + 0.2 * (n - 1)) for n in WIDTHS}
        best = max(rates, key=rates.__getitem__)
        assert pace.width([powers(a)]) == (best if rates[best] > 1 else 0)
    assert pace.width([powers(0.95), powers(0.1)]) == 0 == pace.width([chain()])  # rows advance together
    pace.passes[8] = deque([90.0])  # compute-bound
    assert pace.width([powers(0.75)]) == 0


def test_unmeasured_width_cost_is_linear_from_nearest():
    for width, at, want in ((8, 2.4, {2: 1.2, 4: 1.6, 8: 2.4}), (2, 1.1, {4: 1.3, 8: 1.7}), (2, 3.0, {4: 3.4, 8: 4.2})):
        pace = Pace(passes={width: deque([10 * at])})
        for n in (16, 8):
            pace.stepped(10.0 * n, n, paused=False)
        assert {n: pace.cost(n) for n in want} == pytest.approx(want)


def test_misleading_guesses_are_retried_less_often():
    pace, tries = Pace(), []
    pace.stepped(160.0, 16, paused=False)
    pace.passed(24.0, 8, SURE, 7)
    pace.tokens = 10**6  # whose slack is large
    for turn in range(40):
        if width := pace.width([SURE]):
            tries.append(turn)
            pace.passed(24.0, width, SURE.best(width - 1), 0)
        else:
            pace.stepped(80.0, 8, paused=True)
    assert tries[0] == 0 and pace.patience == 64 and pace.stride == 32
    gaps = np.diff(tries)
    assert gaps[-1] >= 7 and len(tries) < 14
    pace.waited = 64
    for _ in range(3):  # until it is right again
        assert pace.width([SURE]) == 8
        pace.passed(24.0, 8, SURE, 7)
    assert pace.patience == 8 and pace.stride == 1 and pace.width([SURE.best(2)]) > 0


def test_one_slow_pass_does_not_stop_drafting():
    """Of a busy moment: it is tried again once the others may lose as much, and the median tells."""
    pace, widths = Pace(), []
    pace.stepped(4.0, 4, paused=False)
    pace.passed(6.0, 2, SURE.best(1), 1)
    for _ in range(160):
        if width := pace.width([SURE.best(1)]):
            widths.append(width)
            pace.passed(1.2, width, SURE.best(1), 1)
        else:
            pace.stepped(float(pace.stride), pace.stride, paused=True)
    assert len(widths) > 20 and {*widths} == {2} and pace.cost(2) == pytest.approx(1.2)


@pytest.mark.parametrize("row", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.9, "at first", "in turns"])
def test_drafting_is_never_below_095_of_plain_decoding(row: float, right: float | str):
    """A simulation in steps: a drafter is sure of everything, and right as said; guessing and each stride cost too."""
    rng = np.random.default_rng(3)
    for new in (96, 256, 2000):
        pace, at, took = Pace(), 0, 0.0
        while at < new:
            a = {"at first": float(at < 24), "in turns": float(at // 50 % 2)}.get(right, right)
            guessing = 0.0
            width = pace.width([SURE])
            if width:
                guessing = 0.05
                pace.guessed(guessing, used=True)
                came = min(int((rng.random(width - 1) < a).cumprod().sum()), new - at - 1)
                seconds = 1 + row * (width - 1)
                pace.passed(seconds, width, SURE.best(width - 1), came)
                at += 1 + came
            else:
                n = min(pace.stride, new - at)
                seconds = n + 0.3  # the device waits for the host
                pace.stepped(seconds, n, paused=True)
                at += n
            took += seconds + guessing
        assert new / took > 0.95
        if right == 0.9 and row < 1:
            assert new / took > 1.5


def test_combined_drafter_takes_higher_offer():
    """Row by row; the second is asked only where the first offers less than the second did; both are told of tokens."""
    asked, told = [], []

    class Says:
        rows_change, nbytes = True, 5

        def __init__(self, name: str, top: int, *chances: list[float]) -> None:
            self.name, self.top, self.chances = name, top, [*chances]

        def propose(self, rows, most, verifier=None):
            asked.append(self.name)
            return [Guess([len(self.name)] * len(x), range(-1, len(x) - 1), x) for x in self.chances.pop(0)]

        def learn(self, ids, top):
            told.append((self.name, None if top is None else top.shape[-1]))

    one = Says("a", 0, [[0.9, 0.4], [0.1]], [[0.2], [0.7]], [[1.0, 0.9], [0.8]])
    two = Says("bb", 3, [[1.0], [0.2]], [[0.3], [0.5]])
    both = Either(one, two)
    assert [x.ids for x in both.propose([[1], [2]], 7)] == [[1, 1], [2]]
    assert both.offers == pytest.approx(0.6)
    assert [x.ids for x in both.propose([[1], [2]], 7)] == [[2], [1]]
    assert both.offers == pytest.approx(0.9 * 0.6 + 0.1 * 0.4)
    assert [x.ids for x in both.propose([[1], [2]], 7)] == [[1, 1], [1]]
    assert asked == ["a", "bb", "a", "bb", "a"]
    both.learn(np.zeros((2, 1), np.int32), np.zeros((2, 1, 3), np.int32))
    assert told == [("a", None), ("bb", 3)] and (both.top, both.nbytes, both.rows_change) == (3, 10, True)
    assert not Either(one, Through(PARAMS)).rows_change


def test_second_drafter_is_retried_after_empty_offer():
    both = Either(Suffix(), Recycling(100))
    both.propose([[1, 2, 3, 4, 5]], 4)
    assert both.offers == 0
    both.second.propose([[7, 9, 8, 7]], 4)
    assert both.propose([[1, 2, 7]], 4)[0].ids[0] == 9


@pytest.mark.parametrize("draft", ["suffix", "recycle", "suffix(alpha=2.0, p_min=0.2)", "suffix | recycle"])
def test_drafts_change_no_token_and_appear_in_receipt(draft: str):
    for options in ({}, {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.1}):
        how = {"max_new_tokens": 40, "stop_ids": (), **options}
        want = jkv.generate(PARAMS, "snapkv(budget=32, window=8)", TEXT, **how)
        got = jkv.generate(PARAMS, "snapkv(budget=32, window=8)", TEXT, drafter=draft, **how)
        assert got.tokens == want.tokens and got.receipt.tokens_kept == want.receipt.tokens_kept
        assert want.receipt.passes is None and 0 < got.receipt.passes <= 40
        assert got.receipt.passes + got.receipt.drafted_taken == 40 and "tokens a pass" in str(got.receipt)


def test_custom_drafter_proposes_and_learns():
    class Mine(Recycling):
        asked = 0

        def propose(self, rows, most, verifier=None):
            self.asked += 1
            return [
                Guess((want.tokens[len(row) - len(TEXT) :] + [0] * most)[:most], range(-1, most - 1), [1.0] * most)
                for row in rows
            ]

    want = jkv.generate(PARAMS, None, TEXT, max_new_tokens=40, stop_ids=())
    for mine in (Mine(100), Mine(100)):  # what runs for the first time is no measure
        got = jkv.generate(PARAMS, None, TEXT, max_new_tokens=40, stop_ids=(), drafter=mine, compare=True)
    assert got.tokens == want.tokens and got.receipt.kl < 1e-6
    assert mine.asked == got.receipt.passes - 4 < 40 / 6 and mine.table.any()


def test_tokens_drawn_ahead_of_other_rows_begin_next_draft():
    """Guesses that fail once in seven tokens, in each row elsewhere: together they take less than the sum of passes."""
    texts = [[b, *TEXT] for b in range(4)]
    how = {"max_new_tokens": 70, "stop_ids": ()}

    class Erring(Suffix):
        def propose(self, rows, most, verifier=None):
            for b, (row, known) in enumerate(zip(rows, verifier.known, strict=True)):
                now = row[len(texts[0]) :]
                assert now == want.tokens[b][: len(now)] and now[len(now) - len(known) :] == known
            return [self.after(row[0], len(row) - len(texts[0]), most) for row in rows]

        def after(self, b: int, done: int, most: int) -> Guess:
            places = range(done, 70)[:most]
            ids = [(want.tokens[b][i] + ((i + 2 * b) % 7 == 0)) % 100 for i in places]
            return Guess(ids, range(-1, len(ids) - 1), [1.0] * len(ids))

    want = jkv.generate(PARAMS, None, texts, **how)
    got = jkv.generate(PARAMS, None, texts, drafter=Erring(), **how)
    assert got.tokens == want.tokens
    assert got.receipt.passes <= 30  # 45 if each row began anew


def test_draft_model_continues_known_tokens():
    texts, known = [[7, *TEXT], TEXT, [9, 8]], [[3, 1, 4], [], [5]]
    params = random(TINY, 1)

    def drawn(rows, known, most=6):
        through = Through(params)
        through.begin([row[:-1] for row in rows], 40)
        return through.draw(rows, most, known=known)

    for text, more, (ids, odds) in zip(texts, known, drawn(texts, known), strict=True):
        ((want, chance),) = drawn([[*text, *more]], [[]], 6 - len(more))
        assert ids == want and len(ids) == 6 - len(more)
        np.testing.assert_allclose(odds, chance, rtol=1e-4)


def test_draft_model_changes_no_token():
    """The model itself is always right, but for ties; another one of random weights hardly ever."""
    how = {"max_new_tokens": 40, "stop_ids": ()}
    for rows in (TEXT, [TEXT, [3, 4, 5]]):
        want = jkv.generate(PARAMS, "int8", rows, **how)
        for seed, few in ((None, 10), (7, 40)):  # the first four by steps, which are measured
            small = PARAMS if seed is None else random(TINY, seed=seed)
            got = jkv.generate(PARAMS, "int8", rows, drafter=small, **how)
            assert got.tokens == want.tokens and got.receipt.passes <= few


@pytest.mark.slow
def test_draft_caches_and_chained_drafters_change_no_token():
    """Of one that holds everything all guesses are right; no cache, and nothing behind it, changes a token."""

    class Behind(Suffix):
        asked = 0

        def propose(self, rows, most, verifier=None):
            self.asked += 1
            return [Guess(([7, 8] * most)[:most], range(-1, most - 1), [1.0] * most) for _ in rows]

    how = {"max_new_tokens": 40, "stop_ids": ()}
    rows, behind = [TEXT, [3, 4, 5]], Behind()
    want = jkv.generate(PARAMS, "int8", rows, **how)
    for draft, passes in (
        ("streaming(budget=96, recent=16)", range(5, 11)),
        (["full", behind], range(5, 11)),
        (["streaming(budget=48, recent=16)", random(TINY, seed=7)], range(5, 41)),
    ):
        got = jkv.generate(PARAMS, "int8", rows, drafter=draft, **how)
        assert got.tokens == want.tokens and got.receipt.passes in passes
    assert behind.asked > 1  # if nothing was compiled: what runs for the first time is no measure


def test_branch_leaves_drafter_unchanged():
    rows, one = [TEXT, TEXT[:7]], Through(PARAMS, parse("streaming(budget=48, recent=16)"))
    one.begin(rows, 40)
    sure = [[*row, 3] for row in rows]
    branch = one.branch(sure)
    branch.propose([[*row, 8, 9, 9, 2] for row in sure], 4)
    got = one.propose([[*row, 5] for row in sure], 4)
    other = Through(PARAMS, one.config)
    other.begin(rows, 40)
    other.propose(sure, 4)
    again = other.propose([[*row, 5] for row in sure], 4)
    assert [x.ids for x in got] == [x.ids for x in again]


def test_stop_ids_end_row_inside_pass():
    want = jkv.generate(PARAMS, None, TEXT, max_new_tokens=40, stop_ids=())
    end = want.tokens[11]
    for draft in (None, "suffix", "recycle"):
        got = jkv.generate(PARAMS, None, TEXT, max_new_tokens=40, stop_ids=(end,), drafter=draft)
        assert got.tokens == want.tokens[: want.tokens.index(end) + 1]


def test_stop_strings_end_drafted_rows_at_same_token():
    params = replace(random(dict(TINY, vocab_size=256)), tokenizer=commands.tokenizer())
    how = {"max_new_tokens": 60, "stop_ids": ()}
    plain = jkv.generate(params, None, "abcabcabc" * 5, **how)
    stop = plain.text[21:23]
    want = jkv.generate(params, None, "abcabcabc" * 5, stop=[stop], **how)
    got = jkv.generate(params, None, "abcabcabc" * 5, stop=[stop], drafter="suffix", **how)
    assert (got.text, got.tokens) == (want.text, want.tokens) and len(want.tokens) < 60


class Failing(Suffix):
    """Fails at the n-th call of a function, or answers with a guess that cannot be."""

    def __init__(self, where: str, nth: int, error: BaseException | Guess) -> None:
        super().__init__()
        self.top, self.left = 8 * (where == "learn"), {where: nth}
        self.error = error

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("begin", "propose", "learn", "end"):
            return found

        def called(*args):
            self.left[name] = self.left.get(name, -1) - 1
            if self.left[name]:
                return found(*args)
            if isinstance(self.error, Guess):
                return [self.error]
            raise self.error

        return called


@pytest.mark.parametrize(
    ("where", "nth", "error", "why"),
    [
        ("begin", 1, MemoryError("no room"), "MemoryError: no room"),
        ("propose", 3, ValueError("no guess"), "no guess"),
        ("propose", 1, Guess([7], [0], [0.5]), "token 0 has parent 0"),
        ("propose", 2, Guess([-7], [-1], [0.5]), "token 0 is -7"),
        ("propose", 2, Guess([7], [-1], [float("nan")]), "chance nan"),
        ("propose", 2, Guess([7, 8], [-1], [0.5]), "2 ids, 1 parents and 1 chances"),
        ("learn", 2, RuntimeError("RESOURCE_EXHAUSTED"), "RuntimeError: RESOURCE_EXHAUSTED"),
        ("end", 1, KeyError("row"), "KeyError: 'row'"),
    ],
)
def test_failed_drafter_is_dropped_and_reported_in_receipt(where, nth, error, why):
    how = {"max_new_tokens": 40, "stop_ids": ()}
    want = jkv.generate(PARAMS, None, TEXT, **how)
    one = Failing(where, nth, error)
    got = jkv.generate(PARAMS, None, TEXT, drafter=one, **how)
    assert got.tokens == want.tokens and got.receipt.draft_failed is not None
    at, said = got.receipt.draft_failed
    assert why in said and f"plain steps from token {at} on: {said}" in str(got.receipt)
    assert (at == 40) == (where == "end") and (at == 0) == (where == "begin")
    if where == "propose":
        assert one.left["propose"] == 0  # nobody asked again


def test_interrupt_in_drafter_propagates():
    one = Failing("propose", 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        jkv.generate(PARAMS, None, TEXT, max_new_tokens=40, stop_ids=(), drafter=one)


def test_invalid_drafts_are_refused():
    for draft, why in (
        ("sufix", "did you mean 'suffix'"),
        ("tree", "one of suffix, recycle"),
        ("suffix(p_min=0)", "p_min=0; give a probability above 0"),
        ("suffix(alpha=-1)", "alpha=-1; give a number, 0 or more"),
        ("suffix(depth=2.5)", "depth=2.5; give a whole number, 1 or more"),
        ("suffix(beta=1e400)", "beta=inf; give a number"),
        ("suffix(beam=3)", "takes alpha, beta, p_min, depth, limit"),
        ("suffix(", "write name or name"),
        ("suffix |", "write name or name"),
        ("suffix | recicle", "did you mean 'recycle'"),
        (["suffix | recycle", "recycle"], "no model that verifies what another guesses"),
        (["suffix", "recycle"], "'suffix' has no model that verifies what another guesses"),
        ("triforce(tokens=7)", "tokens=7, page=8: that are read together; a page or more"),
        ("triforce(page=0)", "page=0: a whole number, 1 or more"),
    ):
        with pytest.raises(ValueError, match=why):
            jkv.generate(PARAMS, None, TEXT, drafter=draft)
    with pytest.raises(TypeError, match="drafter=7: give 'suffix'"):
        jkv.generate(PARAMS, None, TEXT, drafter=7)
    with pytest.raises(ValueError, match="blocks all attend"):
        jkv.generate(MODELS["bamba"], None, TEXT, drafter="suffix")
    with pytest.raises(ValueError, match="selector goes by"):
        jkv.generate(PARAMS, "alisa(tokens=48, page=8, window=16, recent=16)", TEXT, drafter="suffix")
    alisa = jkv.prefill(PARAMS, "alisa(tokens=48, page=8, window=16, recent=16)", TEXT)[0]
    with pytest.raises(ValueError, match="selector goes by"):
        jkv.generate(PARAMS, alisa, TEXT, drafter="suffix")
    with pytest.raises(ValueError, match="drafter= is for one device"):
        over = sharding.parse_mesh("model=1", jax.devices(), PARAMS.config)
        jkv.generate(jax.device_put(PARAMS, sharding.of_params(PARAMS, over)), None, TEXT, drafter="suffix")
    with pytest.raises(ValueError, match="vocabulary of 5"):
        build_drafter("recycle", random(dict(TINY, vocab_size=5)))
    with pytest.raises(ValueError, match="its model has 5 words and this one 100"):
        jkv.generate(PARAMS, None, TEXT, drafter=random(dict(TINY, vocab_size=5)))
    with pytest.raises(ValueError, match="its model's context is 32"):
        jkv.generate(PARAMS, None, TEXT, drafter=random(dict(TINY, max_position_embeddings=32)))
    assert drafts([Guess([4], [-1], [1.0])]).ids.shape == (1, NODES)
