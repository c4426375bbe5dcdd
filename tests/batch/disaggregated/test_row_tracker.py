"""Rows on their way through the stages: each in one place, no more ahead than there may be, each ended once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.batch.disaggregated.allocation import decide, divided
from jkv.batch.disaggregated.row_tracker import TRIES, Ledger, Task
from jkv.engine.request import Request
from jkv.generation.sampling_params import SamplingParams

SLOTS = (2, 3)  # of each bucket


def tasks(n: int) -> list[Task]:
    return [
        Task(2 * i // n, Request(line=i, id=None, tokens=np.zeros(0, np.int32), settings=SamplingParams()))
        for i in range(n)
    ]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 4))
def test_each_row_is_in_one_place_and_ends_once(random, n: int, ahead: int):
    """Three workers, each of any stage at any time, which do, drop and end rows as it happens."""
    ledger = Ledger(tasks(n), ahead)
    ended: list[tuple[int, int]] = []
    for _ in range(400):
        worker = random.randrange(3)
        match random.choice(["prefill", "hand", "decode", "end", "lose"]):
            case "prefill":
                ledger.to_prefill(worker)
            case "hand":
                for part in list(ledger.read.get(worker, ())):
                    ledger.hand(worker, part, None)
            case "decode":
                ledger.to_decode(worker, SLOTS)
            case "end":
                for part in list(ledger.decoded.get(worker, ()))[:1]:
                    ended.append(ledger.end(worker, part).part)
            case "lose" if random.random() < 0.2:
                ended += [x.part for x in ledger.lose(worker, [x.part for x in ledger.held(worker)])]
        held = [x for w in range(3) for x in ledger.held(w)]
        places = [x.part for x in (*ledger.waiting, *(y.task for y in ledger.ready), *held)] + ended
        assert sorted(places) == [(i, 0) for i in range(n)]
        assert ledger.left == n - len(ended)
        assert len(ledger.ready) + sum(map(len, ledger.read.values())) <= ahead and ledger.most <= ahead
        for mine in ledger.decoded.values():
            assert len({x.bucket for x in mine.values()}) < 2
            assert all(len(mine) <= SLOTS[x.bucket] for x in mine.values())
        assert all(n <= TRIES for n in ledger.lost.values())


def test_prefill_waits_for_decode():
    ledger = Ledger(tasks(9), 2)
    for _ in range(2):
        assert (task := ledger.to_prefill(0)) is not None and ledger.queues()[0] > 0 or ledger.room == 0
        ledger.hand(0, task.part, None)
    assert ledger.to_prefill(0) is None and ledger.queues() == (0, 2)
    assert ledger.to_decode(1, (2, 2)) is not None and ledger.queues() == (7, 1)
    assert ledger.to_prefill(0) is not None and ledger.to_prefill(0) is None


def test_lost_row_is_retried_once_and_first():
    ledger = Ledger(tasks(3), 2)
    for lost in range(TRIES):
        task = ledger.to_prefill(0)
        assert task is not None and task.part == (0, 0)
        assert ledger.lose(0, [task.part]) == ([] if lost + 1 < TRIES else [task])
    assert [x.part for x in ledger.waiting] == [(1, 0), (2, 0)]


def test_worker_moves_to_queue_twice_as_long():
    assert decide((9, 1, 1), (1, 3, 2)) == (1, 0) and decide((9, 5, 6), (1, 3, 2)) is None
    for queues in itertools.product(range(5), repeat=2):
        for workers in itertools.product((1, 2, 3), repeat=2):
            low, high = (0, 1) if queues[0] < queues[1] else (1, 0)
            moves = queues[high] > 2 * queues[low] and workers[low] > 1
            assert decide(queues, workers) == ((low, high) if moves else None)


@pytest.mark.parametrize("text", ["", "prefill=1", "prefill=0,decode=1", "prefill=1,decode=1,decode=2", "a=1,b=2",
                                  "prefill=x,decode=1", "prefill=1,decode=64"])  # fmt: skip
def test_invalid_stages_are_refused(text: str):
    with pytest.raises(ValueError, match="--stages"):
        divided(text)


def test_lost_row_is_decoded_alone():
    """Workers that have rows take those behind it; one that has none takes it, and no other beside."""
    ledger = Ledger(tasks(8), 8)
    lost = ledger.to_prefill(0)
    assert lost is not None and ledger.lose(0, [lost.part]) == []
    for _ in range(4):
        task = ledger.to_prefill(0)
        assert task is not None
        ledger.hand(0, task.part, None)
    ledger.decoded[1] = {(9, 0): Task(0, lost.request)}  # a row under way
    assert (x := ledger.to_decode(1, SLOTS)) is not None and x.task.part == (1, 0)
    assert ledger.to_decode(1, SLOTS) is None
    assert (x := ledger.to_decode(2, SLOTS)) is not None and x.task is lost
    assert ledger.to_decode(2, SLOTS) is None
    assert (x := ledger.to_decode(3, SLOTS)) is not None and x.task.part == (2, 0)
