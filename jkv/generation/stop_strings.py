"""Texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jkv.io.tokenizer import Tokenizer


class Transcript:
    """What a row says: its tokens as they come, and their text. Both end with the token that completes a stop text.

    n: tokens so far; over: whether a stop text is complete. Nothing behind it is taken, however many tokens come at a
    time. The stop text itself is no part of the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        """tokenizer: None has no texts, and no stop texts."""
        self.n, self.over = 0, False
        self._stream = None if tokenizer is None else tokenizer.stream(stop)
        self._stop, self._held = stop, ""

    def take(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; the new text that no stop text can change any more."""
        for token in tokens:
            if self.over:
                break
            self.n += 1
            if self._stream is not None:
                self._held += self._stream.push(token)
                self.over = any(s in self._held for s in self._stop)
        self._held, piece = hold(self._held, self._stop)
        return piece

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens that count, of all so far."""
        self.take(tokens[self.n :])
        return tokens[: self.n]

    def finish(self) -> str:
        """The rest of the text, where no more tokens come."""
        self._held += "" if self._stream is None else self._stream.finish()
        self.over = any(s in self._held for s in self._stop)
        return cut(self._held, self._stop)


def hold(text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    """(held back, printable): what could still become a stop text is held back, and all from a stop text on."""
    keep = max((n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)
    if any(s in text for s in stop):
        return text, ""
    return text[len(text) - keep :], text[: len(text) - keep]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop text that is complete first, in however large pieces the text comes.

    >>> cut("0123456789", ("567", "34567", "9"))
    '012'
    """
    ends = ((text.index(s) + len(s), text.index(s)) for s in stop if s in text)
    return text[: min(ends, default=(0, len(text)))[1]]
