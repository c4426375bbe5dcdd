"""The speculative decoding loop: draft and verify while it pays, plain decode steps otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.cache.cache import Decoding
from jkv.core.compilation import Cost, Run, call, flow, program
from jkv.core.decode_loop import borders, run_block
from jkv.core.sampling import LOST, Sampling, sample
from jkv.models import Params
from jkv.speculative.draft_length import NODES, SURE, Pace
from jkv.speculative.guard import Trial
from jkv.speculative.proposer import Drafter, Guess, legal
from jkv.speculative.verify import Draft, verify

one = program(arguments=(None, None, None, None), results=None)(sample)


@flow(arguments=(None, None, None, None), results=None)
def drawn(logits: Array, sampling: Sampling, seen: Array, used: Array | None, run: Run = call) -> Array:
    """Sample the next token i32[B] of each row."""
    return run(one, logits, sampling, seen, used)


def likeliest(logits: np.ndarray, n: int) -> np.ndarray:
    """Return i[B,n], the n largest logits of f32[B,V], in descending order.

    >>> likeliest(np.asarray([[0.0, 3.0, 1.0, 2.0]]), 2).tolist()
    [[1, 3]]
    """
    some = np.argpartition(-logits, n - 1, axis=-1)[:, :n]
    order = np.argsort(-np.take_along_axis(logits, some, -1), axis=-1, kind="stable")
    return np.take_along_axis(some, order, -1)


@dataclass
class Drafting:
    """A speculative decoding run, and its counts.

    Attributes:
        params: the verifying model.
        state: state of the decode loop.
        sampling: sampling settings.
        drafter: proposes draft tokens.
        cost: collects compile time and peak bytes.
        rows: prompt tokens per row.
        pace: chooses the draft length.
        clock: seconds; measurements influence which tokens are drafted together, and never the tokens.
        trial: catches the drafter's errors; after one, plain steps continue from the same state.
        passes: verification passes.
        steps: plain steps.
        drafted: draft tokens verified, in the row with most.
        taken: draft tokens accepted by all rows.
        alone: tokens per pass, summed over passes, that were drawn and not known before, mean over rows.
        pauses: ranges of generated tokens in which no draft would have paid.
        watched: whether the reader may end rows at block borders.
        passed: whether the newest tokens come from a pass.
        known: per row, tokens after its next one that a pass drew and could not take, because another row accepted
            fewer.
    """

    params: Params
    state: Decoding
    sampling: Sampling
    drafter: Drafter
    cost: Cost
    rows: list[list[int]]
    pace: Pace = field(default_factory=Pace)
    clock: Callable[[], float] = time.perf_counter
    trial: Trial = field(default_factory=Trial)
    passes: int = 0
    steps: int = 0
    drafted: int = 0
    taken: int = 0
    alone: float = 0.0
    pauses: list[tuple[int, int]] = field(default_factory=list)
    watched: bool = False
    passed: bool = False
    known: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.known = [[] for _ in self.rows]

    @property
    def counts(self) -> dict[str, Any]:
        """The receipt's fields on speculation."""
        drafted = {"drafted": self.drafted, "drafted_taken": self.taken}
        passes = {"passes": self.passes + self.steps, "draft_pauses": self.pauses}
        alone = {"tokens_alone": (self.alone + self.steps) / max(self.passes + self.steps, 1)}
        drafter = {"draft_failed": self.trial.failed, "bytes_draft": self.drafter.nbytes}
        return {**passes, **drafted, **alone, **drafter}

    def run(self, new: int) -> Iterator[list[list[int]]]:
        """Generate up to `new` tokens, and yield all tokens so far, per row, after every pass or run of steps.

        The caller may change the state between two items.
        """
        with self.trial:
            self.drafter.begin(self.rows, new, self)
        tokens: list[list[int]] = [[] for _ in self.rows]
        try:
            yield from self.rounds(new, tokens)
        finally:  # also if the caller stops early
            with self.trial:
                self.drafter.end([[*a, *b] for a, b in zip(self.rows, tokens, strict=True)])

    def rounds(self, new: int, tokens: list[list[int]]) -> Iterator[list[list[int]]]:
        """Run the loop for a drafter that has begun; appends to `tokens`, one list per row."""
        count = int(self.state.count)
        while count < new and bool(self.state.alive.any()):
            # Verify drafts if they may pay, else run plain steps.
            limit = min(self._room, new - count)  # maximum tokens of a pass
            failed = bool(self.trial.failure)
            if most := 0 if failed else self.pace.width([SURE.best(limit - 1)]):
                self._advance(tokens, count, new, min(most, limit))
            else:
                self._steps(count, new, paused=True)
            before, count = count, int(self.state.count)
            # Record a pause, merged with an adjacent one.
            if not (most or failed):
                start = self.pauses.pop()[0] if self.pauses and self.pauses[-1][1] == before else before
                self.pauses.append((start, count))
            out = np.asarray(self.state.out)[:, before:count]  # on the host, because each slice is another program
            for row, more in zip(tokens, out.tolist(), strict=True):
                row.extend(t for t in more if t >= 0)
            yield tokens

    @property
    def _room(self) -> int:
        """Tokens until the next flush, or until the one after it if a flush is due."""
        cache, fill = self.state.cache, int(self.state.cache.fill)
        return cache.recent_size - (fill if fill < cache.recent_size else cache.stay)

    def _guesses(self, tokens: list[list[int]], alive: list[bool], most: int) -> list[Guess]:
        """Propose draft trees after each row and its next token; [] if the drafter fails.

        A plain step's top tokens are passed to the drafter first, if it wants them.
        """
        state = self.state
        token = self.cost.begin(drawn, state.logits, self.sampling, state.cache.seen, state.used)
        rows = zip(self.rows, tokens, token.tolist(), alive, strict=True)
        texts = [[*a, *b, *([t] if on and t != LOST else [])] for a, b, t, on in rows]
        self.known = [more if on else [] for more, on in zip(self.known, alive, strict=True)]
        with self.trial:
            if self.drafter.top and not self.passed:  # a pass has already reported this token
                newest = np.asarray([text[-2:-1] if on else [-1] for text, on in zip(texts, alive, strict=True)])
                self.drafter.learn(newest, likeliest(np.asarray(self.state.logits), self.drafter.top)[:, None])
            longer = [[*text, *more] for text, more in zip(texts, self.known, strict=True)]
            found = legal(self.drafter.propose(longer, most, self), len(texts))
            return [guess.behind(more).best(most) for guess, more in zip(found, self.known, strict=True)]
        return []

    def _advance(self, tokens: list[list[int]], count: int, new: int, most: int) -> None:
        """Run one verification pass of at most `most` tokens if it pays for all live rows, else plain steps."""
        alive, full = self.state.alive.tolist(), int(self.state.cache.fill) >= self.state.cache.recent_size
        # Propose, and choose the width for the rows that are alive.
        start = self.clock()
        guesses = self._guesses(tokens, alive, most - 1)
        if self.trial.failure:
            return self._steps(count, new, paused=True)
        going = [guess for guess, on in zip(guesses, alive, strict=True) if on]
        width, guessing = self.pace.width(going), self.clock() - start
        self.pace.guessed(guessing, used=width > 0)
        if not width:
            return self._steps(count, new, paused=False)
        # Verify.
        start, before = self.clock(), self.cost.compiling
        guesses, going = ([guess.best(width - 1) for guess in some] for some in (guesses, going))
        draft, top = drafts(guesses, width, self.params.config.vocab), self.drafter.top
        self.state, found = self.cost.begin(
            verify, self.params, self.state, self.sampling, draft, jnp.int32(new), full=full, top=top
        )
        # Update counts and known tokens.
        came = int(self.state.count) - count - 1
        self.trial.came(came + 1)
        sure = [len(more) for more in self.known]
        self.alone += float(np.maximum(np.asarray(found.alone) - sure, 0)[alive].mean())
        later = ([t for t in row if t >= 0] for row in np.asarray(found.known).tolist())
        # A narrow pass may reach less far than an earlier one.
        self.known = [max(more, old[came + 1 :], key=len) for more, old in zip(later, self.known, strict=True)]
        # Report to the drafter and to the pace.
        ids, likely = np.asarray(found.ids), None if found.top is None else np.asarray(found.top)
        with self.trial:
            self.drafter.learn(ids, likely)
        seconds = None if full else self._since(start, before)
        least = min(going, key=lambda guess: sum(guess.chance))
        self.pace.passed(seconds, width, least, came)
        self.passed, self.passes, self.taken = True, self.passes + 1, self.taken + came
        self.drafted += max(len(guess.ids) for guess in going)

    def _steps(self, count: int, new: int, paused: bool) -> None:
        """Run plain steps, to the end of a block at most.

        While drafting pauses, run several blocks at once, unless the reader may end rows in between.
        """
        blocks = borders(self.state, min(count + self.pace.stride, new))[: None if paused and not self.watched else 1]
        start, before = self.clock(), self.cost.compiling
        for stop, full in blocks:
            self.state = self.cost.begin(run_block, self.params, self.state, self.sampling, jnp.int32(stop), full=full)
        ran = int(self.state.count) - count
        self.trial.came(ran)
        seconds = None if any(full for _, full in blocks) else self._since(start, before)  # no flush times
        self.pace.stepped(seconds, ran, paused)
        self.passed, self.steps = False, self.steps + ran
        self.known = [more[ran:] for more in self.known]

    def _since(self, start: float, compiling: float) -> float | None:
        """Return the seconds since `start`, or None if anything was compiled, because a first run is slower too."""
        return self.clock() - start if self.cost.compiling == compiling else None


def drafts(guesses: list[Guess], width: int = NODES, words: int = 2**31) -> Draft:
    """Convert trees to one draft of `width` tokens, whose node 0 is the root.

    Args:
        words: vocabulary size of the model; larger ids are clipped.

    >>> drafts([Guess([7, 8], [-1, 0], [1.0, 1.0])], 4).parent.tolist()
    [[-1, 0, 1, -1]]
    """
    ids = np.zeros((len(guesses), width), np.int32)
    parent = np.full(ids.shape, -1, np.int32)
    for i, guess in enumerate(guesses):
        n = len(guess.ids)
        ids[i, 1 : n + 1], parent[i, 1 : n + 1] = np.minimum(guess.ids, words - 1), np.add(guess.parent, 1)
    return Draft(ids=jnp.asarray(ids), parent=jnp.asarray(parent))
