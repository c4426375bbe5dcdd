"""Token translation between two vocabularies, through bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jkv.io.tokenizer import Tokenizer

COMMON = 0.01  # minimum share of the drafter's tokens that the model also has
ANCHORS = "\n0."  # put before continued text if a tokenizer adds a space to every text


def pieces(tokenizer: Tokenizer, words: int = 0) -> list[bytes | None]:
    """Return the bytes of each token, None for special tokens and padding.

    Args:
        words: minimum length of the result, for models that pad their vocabulary.
    """
    added = tokenizer.core.get_added_tokens_decoder()
    every = tokenizer.core.get_vocab(with_added_tokens=True).values()
    out: list[bytes | None] = [None] * max(words, 1 + max(every, default=-1))
    for i in every:
        if i not in added or not added[i].special:
            out[i] = tokenizer.piece(i)
    return out


@dataclass
class Translation:
    """Translation of a drafter's tokens to a model's (OmniDraft, 2507.02659).

    N-grams map several drafter tokens to one model token; they are learned from the model's tokens. Beyond the paper, a
    token without a counterpart becomes the several tokens that the model's tokenizer makes of its text, where the paper
    ends the draft. The drafter's first end-of-text token maps to the model's first.

    Attributes:
        model: the model's tokenizer.
        drafter: the drafter's tokenizer.
        limit: maximum n-grams, the newest.
        words: vocabulary sizes of model and drafter, if larger than their tokenizers.
        model_bytes: bytes of each model token.
        drafter_bytes: bytes of each drafter token.
        direct: i32[V], the model's token with the same bytes; -1: none.
        grams: n-grams of drafter tokens, and the model token of each.
        longest: tokens of the longest n-gram.
        seen: model tokens already learned from.
        begins: whether the drafter's tokenizer adds a space to every text.

    Raises:
        ValueError: if fewer than 1% of the drafter's tokens are tokens of the model.
    """

    model: Tokenizer
    drafter: Tokenizer
    limit: int = 100_000
    words: tuple[int, int] = (0, 0)
    model_bytes: list[bytes | None] = field(init=False, repr=False)
    drafter_bytes: list[bytes | None] = field(init=False, repr=False)
    direct: np.ndarray = field(init=False, repr=False)
    grams: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)
    longest: int = field(default=1, init=False)
    seen: set[int] = field(default_factory=set, init=False, repr=False)
    begins: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Tokens with equal bytes.
        self.model_bytes, self.drafter_bytes = map(pieces, (self.model, self.drafter), self.words)
        index = {x: i for i, x in reversed([*enumerate(self.model_bytes)]) if x}
        self.direct = np.asarray([-1 if x is None else index.get(x, -1) for x in self.drafter_bytes], np.int32)
        common, every = int((self.direct >= 0).sum()), sum(bool(x) for x in self.drafter_bytes)
        if common < COMMON * every or not common:
            raise ValueError(
                f"drafter=: {common} of its model's {every} tokens are tokens of this one: too few to guess with; give "
                "a model whose tokens are more alike"
            )
        if self.model.eos_ids and self.drafter.eos_ids:
            self.direct[self.drafter.eos_ids[0]] = self.model.eos_ids[0]
        self.begins = self.text_of(self.drafter.within(ANCHORS)) != ANCHORS.encode()

    def text_of(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of drafter tokens."""
        return b"".join(self.drafter_bytes[i] or b"" for i in ids)

    def read(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of the model's tokens, and learn n-grams from them."""
        for token in ids:
            self._learn(token)
        return b"".join(self.model_bytes[i] or b"" for i in ids)

    def within(self, text: str) -> list[int]:
        """Tokenize text that continues other text, for the drafter."""
        if not self.begins:
            return self.drafter.within(text)
        for anchor in ANCHORS:
            ids, skipped = self.drafter.within(anchor + text), b""
            while ids and len(skipped) < len(f" {anchor}"):
                skipped += self.drafter_bytes[ids.pop(0)] or b""
            if skipped == f" {anchor}".encode():  # else a token also covers part of the text
                return ids
        return self.drafter.within(text)

    def _learn(self, token: int) -> None:
        """Learn the n-gram of drafter tokens for a model token."""
        text = self.model_bytes[token]
        if token in self.seen or not text:
            return
        self.seen.add(token)
        parts = tuple(self.within(text.decode(errors="replace")))
        if len(parts) > 1 and self.text_of(parts) == text:
            self.grams[parts] = token
            self.longest = max(self.longest, len(parts))
        if len(self.grams) > self.limit:
            del self.grams[next(iter(self.grams))]

    def translate(self, ids: Sequence[int], chance: Sequence[float]) -> tuple[list[int], list[float]]:
        """Translate a draft to the model's tokens, with their probabilities.

        Works left to right, the longest n-gram first, and ends at a token without translation. A token made of several
        has the product of their probabilities.
        """
        out: list[int] = []
        each: list[float] = []
        at = 0
        while at < len(ids):
            sizes = range(min(self.longest, len(ids) - at), 1, -1)
            n = next((n for n in sizes if tuple(ids[at : at + n]) in self.grams), 1)
            new = [self.grams[tuple(ids[at : at + n])]] if n > 1 else self._one(ids[at])
            if not new:
                break
            out += new
            each += [float(np.prod(chance[at : at + n])), *[1.0] * (len(new) - 1)]
            at += n
        return out, each

    def _one(self, token: int) -> list[int]:
        """Translate a single drafter token; [] if it has no translation."""
        if self.direct[token] >= 0:
            return [int(self.direct[token])]
        text = self.drafter_bytes[token]
        try:
            ids = self.model.within(text.decode()) if text else []
        except UnicodeDecodeError:  # part of a character
            return []
        return ids if b"".join(self.model_bytes[i] or b"" for i in ids) == text else []


def split_partial(text: bytes) -> tuple[str, bytes]:
    """Split bytes into text and the trailing bytes of an incomplete character.

    >>> split_partial("a\u00e9".encode()[:-1])
    ('a', b'\\xc3')
    """
    for n in range(min(4, len(text) + 1)):
        try:
            return text[: len(text) - n].decode(), text[len(text) - n :]
        except UnicodeDecodeError:
            continue
    return text.decode(errors="replace"), b""
