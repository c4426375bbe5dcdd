"""Drafts by a model of another vocabulary."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from jkv.models import Params
from jkv.speculative.autoregressive import Drawn, Odds
from jkv.speculative.draft_model import PIECE, Through
from jkv.speculative.proposer import Guess, Verifier, parted
from jkv.speculative.vocab_mapping import Translation, whole

HELD = 4  # of a drafter's newest tokens, which more text may change; more where they begin inside a character
CONTINUING = {bytes([b]) for b in range(0x80, 0xC0)}  # of UTF-8, with which no character begins


@dataclass
class Reading:
    """A row as its drafter reads it: tokens that stay, and the newest ones, which may change; of the model's tokens how
    many those are; bytes of a character that has only begun."""

    sure: list[int]
    open: list[int]
    of: int
    begun: bytes


@dataclass
class Across:
    """Guesses by a model of another vocabulary (OmniDraft, 2507.02659): its greedy tokens, translated.

    It reads the row's text in its own tokens; the newest ones are read again each time, as more text may change them.
    Its draft becomes tokens by `Translation`, with chances that are `Odds` of its probabilities; a draft ends where
    1 - the chance that all before came exceeds `threshold`. A draft is a point whatever the text: it is taken if it is
    the token that is drawn there, so sampled tokens are those of plain decoding too, where the paper's acceptance of
    merged tokens is approximate.

    Of the paper's distillation while serving, what adapts here is what is not a weight: the n-grams, the odds, and the
    length; the drafter's weights stay as they were given.

    Raises ValueError for a threshold outside 0 to 1, and where the two vocabularies have too little in common.
    """

    params: Params
    translation: Translation
    threshold: float = 0.9
    top: int = field(default=0, init=False)
    rows_change: bool = field(default=False, init=False, repr=False)
    odds: Odds = field(default_factory=Odds, init=False, repr=False)
    model: Through = field(init=False, repr=False)
    rows: list[Reading] = field(default_factory=list, init=False, repr=False)
    newest: list[Drawn] = field(default_factory=list, init=False, repr=False)
    room: int = field(default=0, init=False, repr=False)  # tokens of the drafter's, at most

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"draft=: threshold={self.threshold}; give a probability above 0, at most 1")
        self.model = Through(self.params)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        self.rows, self.newest = [self._begun(row) for row in rows], []
        length = max(len(x.sure) for x in self.rows)
        ahead = min(2 * new + PIECE, max(self.params.config.context - length, 1))
        self.room = length + ahead
        self.model.begin([x.sure for x in self.rows], ahead)

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        rows, known = parted(rows, verifier)
        for (length, ids, qs), row in zip(self.newest, rows, strict=False):  # none at first
            self.odds.saw(qs, ids, row[length:])
        self.newest = []
        for x, row in zip(self.rows, rows, strict=True):
            self._follow(x, row)
        lengths = [len(x.sure) + len(x.open) for x in self.rows]
        unread = any(n < length for n, length in zip(self.model.read, lengths, strict=True))
        if not unread or max(lengths) + most > self.room:  # as no text is new, or none would fit
            return [Guess([], [], []) for _ in rows]
        sure = [x.sure for x in self.rows]
        drawn = self.model.branch(sure).draw([x.sure + x.open for x in self.rows], most)
        found = [
            self.translation.translate(*draft) if not x.begun else ([], [])
            for x, draft in zip(self.rows, drawn, strict=True)
        ]
        self.newest = [(len(row), ids, qs) for row, (ids, qs) in zip(rows, found, strict=True)]
        guesses = [self._guess(ids, qs, most) for ids, qs in found]
        return [guess.after(more) for guess, more in zip(guesses, known, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Nothing: it learns of tokens as it reads them."""

    def branch(self, rows: list[list[int]]) -> Across:
        for x, row in zip(self.rows, rows, strict=True):
            self._follow(x, row)
        branch = copy(self)
        branch.rows, branch.newest = [replace(x) for x in self.rows], []
        branch.model = self.model.branch([x.sure for x in self.rows])
        return branch

    def end(self, rows: list[list[int]]) -> None:
        self.model.end(rows)

    def _guess(self, ids: list[int], qs: list[float], most: int) -> Guess:
        chance = [p for p in self.odds.along(qs) if 1 - p <= self.threshold][:most]
        return Guess(ids[: len(chance)], range(-1, len(chance) - 1), chance)

    def _begun(self, row: list[int]) -> Reading:
        text, begun = whole(self.translation.read(row))
        tokenizer = self.translation.drafter
        ids = tokenizer.encode(text) or [0]  # a row of marks alone has no text, and something must be read
        n = self._until(ids, max(len(ids) - HELD, 1)) or len(ids)  # as something must be read
        return Reading(sure=ids[:n], open=ids[n:], of=len(row), begun=begun)

    def _follow(self, x: Reading, row: list[int]) -> None:
        """Read what is new of a row."""
        if len(row) == x.of:
            return
        new = self.translation.text_of(x.open) + x.begun + self.translation.read(row[x.of :])
        text, x.begun = whole(new)
        ids = self.translation.within(text)
        n = self._until(ids, max(len(ids) - HELD, 0))
        x.sure, x.open, x.of = x.sure + ids[:n], ids[n:], len(row)

    def _until(self, ids: list[int], n: int) -> int:
        """The largest count of tokens, at most n, after which no character goes on."""
        while n and self.translation.text_of(ids[n:])[:1] in CONTINUING:
            n -= 1
        return n
