"""Drafting by a model with another vocabulary."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from jkv.models import Params
from jkv.speculative.autoregressive import Drawn, Odds
from jkv.speculative.draft_model import PIECE, Through
from jkv.speculative.proposer import Guess, Verifier, parted
from jkv.speculative.vocab_mapping import Translation, split_partial

HELD = 4  # newest drafter tokens that more text may retokenize; more if they start inside a character
CONTINUING = {bytes([b]) for b in range(0x80, 0xC0)}  # UTF-8 continuation bytes


@dataclass
class Reading:
    """A row in the drafter's tokens.

    Attributes:
        sure: tokens that are final.
        open: newest tokens, which more text may retokenize.
        of: the number of the model's tokens that these represent.
        begun: bytes of an incomplete last character.
    """

    sure: list[int]
    open: list[int]
    of: int
    begun: bytes


@dataclass
class Across:
    """Drafting by a model with another vocabulary (OmniDraft, 2507.02659): its greedy tokens, translated.

    The drafter reads the row's text in its own tokens; the newest are re-read each time, because more text may
    retokenize them. Its draft is converted by `Translation`, with chances that are `Odds` of its probabilities. A draft
    ends where 1 - the chance that all tokens so far are accepted exceeds `threshold`. A draft token is accepted if it
    equals the token drawn by the verifier, so sampled tokens are those of plain decoding; the paper's acceptance of
    merged tokens is approximate.

    Of the paper's online distillation, only the parts besides the weights adapt: n-grams, odds and draft length.

    Attributes:
        params: the drafter's model.
        translation: between the two vocabularies.
        threshold: in (0, 1].
        model: the drafter with its own cache.
        rows: each row in the drafter's tokens.
        newest: the last proposals, to learn from.
        room: maximum drafter tokens per row.

    Raises:
        ValueError: for a threshold outside (0, 1].
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
    room: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"drafter=: threshold={self.threshold}; give a probability above 0, at most 1")
        self.model = Through(self.params)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Tokenize the rows for the drafter, and prefill its cache."""
        self.rows, self.newest = [self._begun(row) for row in rows], []
        length = max(len(x.sure) for x in self.rows)
        ahead = min(2 * new + PIECE, max(self.params.config.context - length, 1))
        self.room = length + ahead
        self.model.begin([x.sure for x in self.rows], ahead)

    def propose(self, rows: list[list[int]], most: int, verifier: Verifier | None = None) -> list[Guess]:
        """Propose one translated chain per row."""
        rows, known = parted(rows, verifier)
        for (length, ids, qs), row in zip(self.newest, rows, strict=False):  # empty in the first call
            self.odds.saw(qs, ids, row[length:])
        # Tokenize the new text, and stop if there is none, or no capacity for a draft.
        self.newest = []
        for x, row in zip(self.rows, rows, strict=True):
            self._follow(x, row)
        lengths = [len(x.sure) + len(x.open) for x in self.rows]
        unread = any(n < length for n, length in zip(self.model.read, lengths, strict=True))
        if not unread or max(lengths) + most > self.room:
            return [Guess([], [], []) for _ in rows]
        # Draft on a copy of the drafter, because open tokens may change. Translate, and drop known tokens.
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
        """Bytes that the drafter's cache holds."""
        return self.model.nbytes

    def learn(self, ids: np.ndarray, top: np.ndarray | None) -> None:
        """Do nothing: accepted tokens are read from the rows of the next call."""

    def branch(self, rows: list[list[int]]) -> Across:
        """Return a copy with its own cache after these rows."""
        for x, row in zip(self.rows, rows, strict=True):
            self._follow(x, row)
        branch = copy(self)
        branch.rows, branch.newest = [replace(x) for x in self.rows], []
        branch.model = self.model.branch([x.sure for x in self.rows])
        return branch

    def end(self, rows: list[list[int]]) -> None:
        """End a generation."""
        self.model.end(rows)

    def _guess(self, ids: list[int], qs: list[float], most: int) -> Guess:
        """Return a chain, cut at `threshold` and `most` tokens."""
        chance = [p for p in self.odds.along(qs) if 1 - p <= self.threshold][:most]
        return Guess(ids[: len(chance)], range(-1, len(chance) - 1), chance)

    def _begun(self, row: list[int]) -> Reading:
        """Tokenize a prompt for the drafter."""
        text, begun = split_partial(self.translation.read(row))
        tokenizer = self.translation.drafter
        ids = tokenizer.encode(text) or [0]  # special tokens have no text, and the prefill needs a token
        n = self._until(ids, max(len(ids) - HELD, 1)) or len(ids)  # the prefill needs a token
        return Reading(sure=ids[:n], open=ids[n:], of=len(row), begun=begun)

    def _follow(self, x: Reading, row: list[int]) -> None:
        """Tokenize the new part of a row."""
        if len(row) == x.of:
            return
        new = self.translation.text_of(x.open) + x.begun + self.translation.read(row[x.of :])
        text, x.begun = split_partial(new)
        ids = self.translation.within(text)
        n = self._until(ids, max(len(ids) - HELD, 0))
        x.sure, x.open, x.of = x.sure + ids[:n], ids[n:], len(row)

    def _until(self, ids: list[int], n: int) -> int:
        """Return the largest count of tokens, at most n, that does not end inside a character."""
        while n and self.translation.text_of(ids[n:])[:1] in CONTINUING:
            n -= 1
        return n
