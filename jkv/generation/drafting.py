"""Generation with drafts: passes that verify guessed tokens where they pay, plain steps where they do not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.core.compiled import Cost
from jkv.core.loop import run_block
from jkv.core.sampling import Sampling, sample
from jkv.generation.drafters import Drafter, Guess
from jkv.generation.verify import Draft, verify
from jkv.memory.cache import Decoding
from jkv.models import Params

NODES = 8  # tokens of a pass, the root among them
ROW = 0.08  # of a step's time, what one more token of a pass takes, until it is measured
STRIDE = 16  # steps at once, at most
PATIENCE = (8, 64)  # steps without a pass, after which one is tried all the same: at first, and at most
drawn = jax.jit(sample)


def likeliest(logits: np.ndarray, n: int) -> np.ndarray:
    """i[B,n]: the n largest of f32[B,V], in order.

    >>> likeliest(np.asarray([[0.0, 3.0, 1.0, 2.0]]), 2).tolist()
    [[1, 3]]
    """
    some = np.argpartition(-logits, n - 1, axis=-1)[:, :n]
    order = np.argsort(-np.take_along_axis(logits, some, -1), axis=-1, kind="stable")
    return np.take_along_axis(some, order, -1)


@dataclass
class Pace:
    """Whether a pass pays: by its time beside a step's, and by how many of the expected tokens came true.

    Times are medians of the newest. came, expected: tokens of passes, the older the less; what has misled is believed
    less, and tried again after some steps, twice as many after every time that it failed. stride: steps before guesses
    are asked for again, as a program of one step takes longer than one of sixteen takes a step: twice as many each time
    that none paid.
    """

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    passes: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    came: float = 4.0
    expected: float = 4.0
    waited: int = 0
    patience: int = PATIENCE[0]
    stride: int = 1

    @property
    def cost(self) -> float:
        """Steps that a pass takes as long as."""
        if len(self.steps) < 3 or len(self.passes) < 3:
            return 1 + ROW * (NODES - 1)
        return median(self.passes) / median(self.steps)

    def pays(self, expected: float) -> bool:
        """Whether a pass would, whose guesses are expected to bring so many tokens; it may be time to try."""
        likely = 1 + expected * min(self.came / self.expected, 1) > self.cost
        return likely or (expected > 0 and self.waited >= self.patience)

    def stepped(self, seconds: float, steps: int) -> None:
        self.steps.append(seconds / steps)
        self.waited += steps
        self.stride = min(2 * self.stride, STRIDE)

    def passed(self, seconds: float, expected: float, came: int) -> None:
        self.passes.append(seconds)
        self.came, self.expected = 0.9 * self.came + came, 0.9 * self.expected + expected
        worth = 1 + came > self.cost
        self.waited, self.patience = 0, PATIENCE[0] if worth else min(2 * self.patience, PATIENCE[1])
        self.stride = 1 if worth else self.stride


@dataclass
class Drafting:
    """A generation with drafts, and its counts: passes and steps, and of drafted tokens those verified and taken."""

    params: Params
    state: Decoding
    sampling: Sampling
    drafter: Drafter
    cost: Cost
    rows: list[list[int]]
    pace: Pace = field(default_factory=Pace)
    passes: int = 0
    steps: int = 0
    drafted: int = 0
    taken: int = 0
    passed: bool = False  # whether the newest tokens came by a pass

    @property
    def counts(self) -> dict[str, int]:
        """What the receipt says of it."""
        return {"passes": self.passes + self.steps, "drafted": self.drafted, "drafted_taken": self.taken}

    def run(self, new: int) -> Iterator[list[list[int]]]:
        """Tokens so far, row by row, after every pass or step; between two, the state may be changed."""
        self.drafter.begin(self.rows, new)
        tokens: list[list[int]] = [[] for _ in self.rows]
        try:
            yield from self.rounds(new, tokens)
        finally:  # also where the reader stops
            self.drafter.end([[*a, *b] for a, b in zip(self.rows, tokens, strict=True)])

    def rounds(self, new: int, tokens: list[list[int]]) -> Iterator[list[list[int]]]:
        """`run` of a drafter that has begun; the tokens go into lists, one a row."""
        count = 0
        while count < new and bool(self.state.alive.any()):
            token = drawn(self.state.logits, self.sampling, self.state.cache.seen, self.state.used)
            texts = [[*a, *b, t] for a, b, t in zip(self.rows, tokens, token.tolist(), strict=True)]
            if self.drafter.top and not self.passed:  # a pass has told it of this token, a step has not
                newest = np.asarray([text[-2:-1] for text in texts])
                self.drafter.learn(newest, likeliest(np.asarray(self.state.logits), self.drafter.top)[:, None])
            self._advance(texts, count, new)
            before, count = count, int(self.state.count)
            out = np.asarray(self.state.out)[:, before:count]  # on the host: each slice would be a program
            for row, more in zip(tokens, out.tolist(), strict=True):
                row.extend(t for t in more if t >= 0)
            yield tokens

    def _advance(self, texts: list[list[int]], count: int, new: int) -> None:
        """One pass if guesses are worth it for all rows that go on, which advance together; else some steps."""
        alive, full = self.state.alive.tolist(), int(self.state.cache.fill) >= self.state.cache.room
        start, before = time.perf_counter(), self.cost.compiling
        guesses: list[Guess] = []
        expected = 0.0
        if self.pace.pays(NODES - 1):  # or no guess would
            guesses = self.drafter.propose(texts, NODES - 1)
            expected = min(guess.expected for guess, on in zip(guesses, alive, strict=True) if on)
        self.passed = passes = self.pace.pays(expected)
        if passes:
            ids = self._verify(guesses, jnp.int32(new), full)
        else:
            self.state = self.cost.begin(
                run_block,
                self.params,
                self.state,
                self.sampling,
                jnp.int32(min(count + self.pace.stride, new)),
                full=full,
            )
        ran = int(self.state.count) - count
        seconds = time.perf_counter() - start
        if passes:
            self.passes, self.drafted, self.taken = self.passes + 1, self.drafted + ids, self.taken + ran - 1
        else:
            self.steps += ran
        if self.cost.compiling > before or full:  # no measure of either
            return
        if passes:
            self.pace.passed(seconds, expected, ran - 1)
        elif ran:
            self.pace.stepped(seconds, ran)

    def _verify(self, guesses: list[Guess], stop: Array, full: bool) -> int:
        """One pass; the tokens that it verifies of a row, at most."""
        top = self.drafter.top
        self.state, found = self.cost.begin(
            verify, self.params, self.state, self.sampling, drafts(guesses), stop, full=full, top=top
        )
        self.drafter.learn(np.asarray(found.ids), None if found.top is None else np.asarray(found.top))
        return max(len(guess.ids) for guess in guesses)


def drafts(guesses: list[Guess]) -> Draft:
    """Guesses as one draft, whose node 0 is the root.

    >>> drafts([Guess([7, 8], [-1, 0], 1.0)]).parent.tolist()
    [[-1, 0, 1, -1, -1, -1, -1, -1]]
    """
    ids = np.zeros((len(guesses), NODES), np.int32)
    parent = np.full(ids.shape, -1, np.int32)
    for i, guess in enumerate(guesses):
        n = len(guess.ids)
        ids[i, 1 : n + 1], parent[i, 1 : n + 1] = guess.ids, np.add(guess.parent, 1)
    return Draft(ids=jnp.asarray(ids), parent=jnp.asarray(parent))
