"""How many tokens a pass verifies, by what earlier guesses have brought and what passes have cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median

from jkv.speculative.proposer import Guess

WIDTHS = (2, 4, 8)  # tokens of a pass, the root among them; each is a program of its own
NODES = WIDTHS[-1]
ROW = 0.2  # of a step's time, what one more token of a pass takes, until it is measured
LOOK = 0.2  # of a step's time, what the device waits for the host before a stride, until it is measured
STRIDE, PAUSE = 16, 32  # steps at once, at most: before guesses are asked for again, and where none would pay
PATIENCE = (8, 64)  # steps without a pass, after which one is tried all the same: at first, and at most
SLACK = (1.0, 0.02)  # steps that passes may have lost, at first, and more by each token
RENEW = 64  # tokens by passes after which a stride is measured again: the last one may have met a busy moment
SURE = Guess(range(NODES - 1), range(-1, NODES - 2), (1.0,) * (NODES - 1))  # no guess brings more


def _times() -> deque[float]:
    return deque(maxlen=9)


@dataclass
class Pace:
    """The width of the next pass, in tokens; 0: plain steps are faster.

    A pass of n tokens brings 1 + E(n) and costs c(n) steps; the n of the largest (1 + E(n)) / c(n) above 1 is taken.
    E(n): the chances of the n - 1 likeliest guessed tokens, each times came / hoped of its depth, at most 1: how often
    tokens of that depth have come, of how often they were expected to, the older the less. c(n): medians of the newest
    measures, guessing included; of a width that has not been measured, on a line through the nearest one and a step, or
    of 0.2 a token beyond it if that is less.
    What has misled is tried again after some steps, twice as many after every time that it failed.

    Whatever is expected, no pass runs that could bring what all have lost above SLACK: a step and 2% of the tokens;
    none before a step has been measured, and none of the largest width before a narrower one. What the device waits
    for the host before a stride is among it; compiling is not: the first guess, which compiles too, is taken to be as
    long as the second. The clock is the caller's. stride: steps before guesses are asked for again.

    >>> pace, sure = Pace(), Guess([5, 6, 7], [-1, 0, 1], [0.9, 0.8, 0.7])
    >>> pace.width([sure])
    0
    >>> pace.stepped(0.4, 4, paused=False)
    >>> pace.width([sure]), pace.width([Guess([5], [-1], [0.1])])
    (4, 0)
    """

    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=9))  # seconds, and of how many
    passes: dict[int, deque[float]] = field(default_factory=dict)
    guesses: deque[float] = field(default_factory=_times)
    came: list[float] = field(default_factory=lambda: [2.0] * (NODES - 1))
    hoped: list[float] = field(default_factory=lambda: [2.0] * (NODES - 1))
    lost: float = 0.0  # steps: what passes, guesses and looks took, beyond the tokens that they brought
    tokens: int = 0
    since: int = 0  # tokens that passes have brought since a stride was measured
    waited: int = 0
    patience: int = PATIENCE[0]
    stride: int = 4
    asked: bool = False  # whether guesses were ever made: the first take long, as programs are compiled

    @property
    def step(self) -> float | None:
        """Seconds of a plain step: the slope of what strides took by their steps, near what one took at best; None: not
        known yet."""
        if not self.steps:
            return None
        seconds, counts = zip(*self.steps, strict=True)
        best = min(s / n for s, n in self.steps)
        if len(set(counts)) == 1:
            return best / (1 + LOOK / counts[0])
        return min(max(linear_regression(counts, seconds).slope, best / (1 + LOOK)), best)

    @property
    def look(self) -> float:
        """Steps that pass while the device waits for the host, before each stride."""
        return max(median(s - n * self.step for s, n in self.steps) / self.step, 0.0) if self.step else 0.0

    def cost(self, width: int) -> float:
        """Steps that a pass of so many tokens takes as long as, and guessing them."""
        step, known = self.step, [w for w, times in self.passes.items() if times]
        if not step or not known:
            return 1 + ROW * (width - 1) + self._guessing
        near = min(known, key=lambda w: abs(w - width))
        beyond = median(self.passes[near]) / step - 1
        row = beyond / (near - 1)
        return 1 + beyond + (width - near) * (row if width < near else min(row, ROW)) + self._guessing

    @property
    def _guessing(self) -> float:
        return median(self.guesses) / self.step if self.guesses and self.step else 0.0

    def width(self, guesses: Sequence[Guess]) -> int:
        """Tokens of a pass that verifies guesses of rows which advance together; 0: steps are faster."""
        if self.since >= RENEW:
            return 0
        best, out, trying = 1.0, 0, self.waited >= self.patience
        for width in (WIDTHS if self.passes else WIDTHS[:-1]) if self.steps else ():
            cost = held = self.cost(width)
            if trying and len(self.passes.get(width, ())) < 3:  # the few measures may have been of a busy moment
                held = min(cost, 1 + ROW * (width - 1) + self._guessing)
            brings = 1 + min((self._expected(x, width - 1, trying) for x in guesses), default=0.0)
            if brings / held > best and self.lost + cost - 1 <= SLACK[0] + SLACK[1] * self.tokens:
                best, out = brings / held, width
        return out

    def _expected(self, guess: Guess, n: int, trying: bool) -> float:
        some = guess.best(n)
        if trying:
            return sum(some.chance)
        return sum(min(p * self.came[d] / self.hoped[d], 1.0) for p, d in zip(some.chance, some.depths, strict=True))

    def guessed(self, seconds: float, used: bool) -> None:
        """Guesses were made; used: for a pass, whose cost has this in it. The second ones count for the first too."""
        if self.asked:
            times = 1 if self.guesses else 2
            self.guesses.append(seconds)
            if self.step:
                self.lost += times * seconds / self.step - (self._guessing if used else 0.0)
        self.asked = True

    def stepped(self, seconds: float | None, steps: int, paused: bool) -> None:
        """Plain steps ran; seconds None: that is no measure, as more than steps did; paused: no guess was asked for."""
        if seconds is not None:
            self.steps.append((seconds, steps))
            self.since = 0
        self.lost += self.look
        self.tokens, self.waited = self.tokens + steps, self.waited + steps
        self.stride = min(2 * self.stride, PAUSE if paused else STRIDE)

    def passed(self, seconds: float | None, width: int, guess: Guess, came: int) -> None:
        """A pass ran for a guess (of the rows the least that was expected), of which `came` tokens came."""
        if seconds is not None:
            self.passes.setdefault(width, _times()).append(seconds)
        for depth in range(NODES - 1):
            hoped = sum(p for p, d in zip(guess.chance, guess.depths, strict=True) if d == depth)
            if hoped:
                self.hoped[depth] = 0.9 * self.hoped[depth] + hoped
                self.came[depth] = 0.9 * self.came[depth] + (came > depth)
        gain = 1 + came - self.cost(width)
        self.lost, self.tokens, self.since = self.lost - gain, self.tokens + 1 + came, self.since + 1 + came
        if gain > 0:  # and is tried again at once
            self.patience = self.waited = PATIENCE[0]
            self.stride = 1
        else:
            self.waited, self.patience = 0, min(2 * self.patience, PATIENCE[1])
