"""One vocabulary's tokens as another's, through their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jkv.io.tokenizer import Tokenizer

COMMON = 0.01  # of the tokens of a drafter, at least, must be tokens of the model
ANCHORS = "\n0."  # one stands before text that goes on, where a tokenizer begins every text with a space


def pieces(tokenizer: Tokenizer, words: int = 0) -> list[bytes | None]:
    """The bytes of each of at least so many tokens, None of those that stand for no text or pad a model's words."""
    added = tokenizer.core.get_added_tokens_decoder()
    every = tokenizer.core.get_vocab(with_added_tokens=True).values()
    out: list[bytes | None] = [None] * max(words, 1 + max(every, default=-1))
    for i in every:
        if i not in added or not added[i].special:
            out[i] = tokenizer.piece(i)
    return out


@dataclass
class Translation:
    """A drafter's tokens as a model's (OmniDraft, 2507.02659).

    direct i32[V]: the model's token of the same bytes, -1: none. grams: of several of the drafter's tokens the one of
    the model that they make, learned from tokens that the model has given, at most `limit`, the newest. Beyond the
    paper, where a token without another of the same bytes stops the draft: it becomes the several ones that the model's
    tokenizer makes of its text. The first token that ends a text is the model's first one. words: of the model and of
    the drafter, where they have more than their tokenizers.

    Raises ValueError where fewer than 1% of the drafter's tokens are tokens of the model.
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
    begins: bool = field(init=False, repr=False)  # whether the drafter's tokenizer begins every text with a space

    def __post_init__(self) -> None:
        self.model_bytes, self.drafter_bytes = map(pieces, (self.model, self.drafter), self.words)
        index = {x: i for i, x in reversed([*enumerate(self.model_bytes)]) if x}
        self.direct = np.asarray([-1 if x is None else index.get(x, -1) for x in self.drafter_bytes], np.int32)
        common, every = int((self.direct >= 0).sum()), sum(bool(x) for x in self.drafter_bytes)
        if common < COMMON * every or not common:
            raise ValueError(
                f"draft=: {common} of its model's {every} tokens are tokens of this one: too few to guess with; give a "
                "model whose tokens are more alike"
            )
        if self.model.eos_ids and self.drafter.eos_ids:
            self.direct[self.drafter.eos_ids[0]] = self.model.eos_ids[0]
        self.begins = self.text_of(self.drafter.within(ANCHORS)) != ANCHORS.encode()

    def text_of(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens of the drafter."""
        return b"".join(self.drafter_bytes[i] or b"" for i in ids)

    def read(self, ids: Sequence[int]) -> bytes:
        """The bytes of tokens that the model has given, which are learned."""
        for token in ids:
            self._learn(token)
        return b"".join(self.model_bytes[i] or b"" for i in ids)

    def within(self, text: str) -> list[int]:
        """Tokens of the drafter of text that follows another."""
        if not self.begins:
            return self.drafter.within(text)
        for anchor in ANCHORS:
            ids, skipped = self.drafter.within(anchor + text), b""
            while ids and len(skipped) < len(f" {anchor}"):
                skipped += self.drafter_bytes[ids.pop(0)] or b""
            if skipped == f" {anchor}".encode():  # else a token has a part of the text too
                return ids
        return self.drafter.within(text)

    def _learn(self, token: int) -> None:
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
        """Tokens of the model of a draft, and their probabilities: of several in one, the product of theirs.

        From left to right, the longest of `grams` first; where no token fits, it ends.
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
        if self.direct[token] >= 0:
            return [int(self.direct[token])]
        text = self.drafter_bytes[token]
        try:
            ids = self.model.within(text.decode()) if text else []
        except UnicodeDecodeError:  # a part of a character
            return []
        return ids if b"".join(self.model_bytes[i] or b"" for i in ids) == text else []


def whole(text: bytes) -> tuple[str, bytes]:
    """Text without the bytes at its end that only begin a character, and these.

    >>> whole("a\u00e9".encode()[:-1])
    ('a', b'\\xc3')
    """
    for n in range(min(4, len(text) + 1)):
        try:
            return text[: len(text) - n].decode(), text[len(text) - n :]
        except UnicodeDecodeError:
            continue
    return text.decode(errors="replace"), b""
