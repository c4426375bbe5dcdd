"""Draft length from measured acceptance rates and verification costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median

from jkv.speculative.proposer import Guess

WIDTHS = (2, 4, 8)  # tokens per pass, including the root; one program each
NODES = WIDTHS[-1]
ROW = 0.2  # prior, until measured: time of one more token in a pass, in steps
LOOK = 0.2  # prior, until measured: device idle time before a stride, in steps
STRIDE, PAUSE = 16, 32  # maximum steps at once: before the next proposal, and while no draft would pay
PATIENCE = (8, 64)  # steps without a pass after which one is tried anyway: initial and maximum
SLACK = (1.0, 0.02)  # steps that drafting may lose in total: a constant, plus this much per token
RENEW = 64  # tokens from passes after which a stride is measured again, because the last may have been disturbed
SURE = Guess(range(NODES - 1), range(-1, NODES - 2), (1.0,) * (NODES - 1))  # upper bound of all trees


def _times() -> deque[float]:
    return deque(maxlen=9)


@dataclass
class Pace:
    """Chooses the width of the next verification pass in tokens; 0: plain steps are faster.

    A pass of n tokens yields 1 + E(n) tokens and costs c(n) steps; the n with the largest (1 + E(n)) / c(n) above 1 is
    chosen.

    E(n): the sum of the chances of the n - 1 likeliest draft tokens, each corrected by came / hoped of its depth, at
    most 1: the decayed ratio of accepted to expected tokens at this depth.

    c(n): the median of the newest measurements, drafting included. An unmeasured width lies on the line through the
    nearest measured one and a single step; beyond it a token costs at most 0.2 steps.

    After losses, drafting is retried after a number of steps that doubles with every failure.

    No pass runs that could bring the total loss above SLACK: one step plus 2% of the tokens. No pass runs before a step
    is measured, and none of the largest width before a narrower one is. Device idle time before a stride counts as
    loss; compilation does not: the first proposal, which compiles, is counted with the time of the second. The caller
    measures the times.

    Attributes:
        steps: measured strides of plain steps: seconds, and number of steps.
        passes: measured seconds per width.
        guesses: measured seconds per proposal.
        came: decayed count of accepted tokens per depth.
        hoped: decayed sum of expected tokens per depth.
        lost: steps lost by passes, proposals and idle time, net of gained tokens.
        tokens: generated tokens.
        since: tokens from passes since a stride was measured.
        waited: steps since the last pass that lost.
        patience: steps to wait before a retry.
        stride: steps before the next proposal.
        asked: whether a proposal was made; the first one is not measured, because it compiles.

    >>> pace, sure = Pace(), Guess([5, 6, 7], [-1, 0, 1], [0.9, 0.8, 0.7])
    >>> pace.width([sure])
    0
    >>> pace.stepped(0.4, 4, paused=False)
    >>> pace.width([sure]), pace.width([Guess([5], [-1], [0.1])])
    (4, 0)
    """

    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=9))
    passes: dict[int, deque[float]] = field(default_factory=dict)
    guesses: deque[float] = field(default_factory=_times)
    came: list[float] = field(default_factory=lambda: [2.0] * (NODES - 1))
    hoped: list[float] = field(default_factory=lambda: [2.0] * (NODES - 1))
    lost: float = 0.0
    tokens: int = 0
    since: int = 0
    waited: int = 0
    patience: int = PATIENCE[0]
    stride: int = 4
    asked: bool = False

    @property
    def step(self) -> float | None:
        """Seconds per plain step; None until measured.

        The slope of stride time over stride length, bounded by the best stride.
        """
        if not self.steps:
            return None
        seconds, counts = zip(*self.steps, strict=True)
        best = min(s / n for s, n in self.steps)
        if len(set(counts)) == 1:
            return best / (1 + LOOK / counts[0])
        return min(max(linear_regression(counts, seconds).slope, best / (1 + LOOK)), best)

    @property
    def look(self) -> float:
        """Device idle time before a stride, in steps."""
        return max(median(s - n * self.step for s, n in self.steps) / self.step, 0.0) if self.step else 0.0

    def cost(self, width: int) -> float:
        """Return the cost in steps of a pass of `width` tokens, drafting included."""
        step, known = self.step, [w for w, times in self.passes.items() if times]
        if not step or not known:
            return 1 + ROW * (width - 1) + self._guessing
        near = min(known, key=lambda w: abs(w - width))
        beyond = median(self.passes[near]) / step - 1
        row = beyond / (near - 1)
        return 1 + beyond + (width - near) * (row if width < near else min(row, ROW)) + self._guessing

    @property
    def _guessing(self) -> float:
        """Median cost of a proposal, in steps."""
        return median(self.guesses) / self.step if self.guesses and self.step else 0.0

    def width(self, guesses: Sequence[Guess]) -> int:
        """Return the width of a pass that verifies these rows' trees together; 0: plain steps are faster."""
        if self.since >= RENEW:
            return 0
        # On a retry, trust neither few measurements nor the acceptance so far.
        best, out, trying = 1.0, 0, self.waited >= self.patience
        for width in (WIDTHS if self.passes else WIDTHS[:-1]) if self.steps else ():
            cost = held = self.cost(width)
            if trying and len(self.passes.get(width, ())) < 3:  # few measurements may have been disturbed
                held = min(cost, 1 + ROW * (width - 1) + self._guessing)
            brings = 1 + min((self._expected(x, width - 1, trying) for x in guesses), default=0.0)
            if brings / held > best and self.lost + cost - 1 <= SLACK[0] + SLACK[1] * self.tokens:
                best, out = brings / held, width
        return out

    def _expected(self, guess: Guess, n: int, trying: bool) -> float:
        """Return the expected accepted tokens among the n likeliest of a tree; on a retry, by its chances alone."""
        some = guess.best(n)
        if trying:
            return sum(some.chance)
        return sum(min(p * self.came[d] / self.hoped[d], 1.0) for p, d in zip(some.chance, some.depths, strict=True))

    def guessed(self, seconds: float, used: bool) -> None:
        """Record a proposal.

        Args:
            seconds: its duration.
            used: whether a pass follows, whose cost includes it.
        """
        if self.asked:
            # The second proposal counts for the first too.
            times = 1 if self.guesses else 2
            self.guesses.append(seconds)
            if self.step:
                self.lost += times * seconds / self.step - (self._guessing if used else 0.0)
        self.asked = True

    def stepped(self, seconds: float | None, steps: int, paused: bool) -> None:
        """Record a run of plain steps.

        Args:
            seconds: its duration; None if it cannot be used as a measurement.
            steps: number of steps.
            paused: whether no proposal was requested.
        """
        if seconds is not None:
            self.steps.append((seconds, steps))
            self.since = 0
        self.lost += self.look
        self.tokens, self.waited = self.tokens + steps, self.waited + steps
        self.stride = min(2 * self.stride, PAUSE if paused else STRIDE)

    def passed(self, seconds: float | None, width: int, guess: Guess, came: int) -> None:
        """Record a verification pass.

        Args:
            seconds: its duration; None if it cannot be used as a measurement.
            width: tokens per row.
            guess: the row's tree with the fewest expected tokens.
            came: accepted draft tokens.
        """
        if seconds is not None:
            self.passes.setdefault(width, _times()).append(seconds)
        for depth in range(NODES - 1):
            hoped = sum(p for p, d in zip(guess.chance, guess.depths, strict=True) if d == depth)
            if hoped:
                self.hoped[depth] = 0.9 * self.hoped[depth] + hoped
                self.came[depth] = 0.9 * self.came[depth] + (came > depth)
        # Balance, and when to propose again.
        gain = 1 + came - self.cost(width)
        self.lost, self.tokens, self.since = self.lost - gain, self.tokens + 1 + came, self.since + 1 + came
        if gain > 0:  # propose again at once
            self.patience = self.waited = PATIENCE[0]
            self.stride = 1
        else:
            self.waited, self.patience = 0, min(2 * self.patience, PATIENCE[1])
