"""Stop strings, and the check that ends a row by stop string, stop token or length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jkv.io.tokenizer import Tokenizer


class StopChecker:
    """Decide, token by token, whether a row has ended, and emit its text as it becomes final.

    The token that completes a stop string is the row's last. Later tokens of the same block or draft do not count. The
    stop string itself is not part of the text.

    Attributes:
        count: tokens so far.
        finish_reason: "stop" or "length" once the row has ended, else None.

    Example:
        >>> checker = StopChecker(None, stop_ids=(2,), max_new_tokens=5)
        >>> checker.cut([7, 8]), checker.finish_reason, checker.cut([7, 8, 2, 9]), checker.finish_reason
        ([7, 8], None, [7, 8, 2], 'stop')
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...] = (),
        stop_ids: Collection[int] = (),
        max_new_tokens: int | None = None,
    ) -> None:
        """Start a row.

        Args:
            tokenizer: None: no text is emitted and no stop string found.
            stop: stop strings.
            stop_ids: stop tokens; a row ends with the stop token.
            max_new_tokens: the row's length; None: the decode loop ends it.
        """
        self.count = 0
        self.finish_reason: str | None = None
        self._stream = None if tokenizer is None else tokenizer.stream(stop)
        self._stop, self._stop_ids, self._limit, self._held = stop, stop_ids, max_new_tokens, ""

    def take(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the new text that no stop string can still change."""
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.count += 1
            if self._stream is not None:
                self._held += self._stream.push(token)
            if token in self._stop_ids or self._complete:
                self.finish_reason = "stop"
            elif self.count == self._limit:
                self.finish_reason = "length"
        self._held, piece = hold(self._held, self._stop)
        return piece

    def cut(self, tokens: list[int]) -> list[int]:
        """Add the new ones of all tokens so far, and return those up to the row's end."""
        self.take(tokens[self.count :])
        return tokens[: self.count]

    def finish(self) -> str:
        """Flush: return the rest of the text, because the decoder may hold bytes that complete a stop string."""
        self._held += "" if self._stream is None else self._stream.finish()
        if self._complete:
            self.finish_reason = "stop"
        return cut(self._held, self._stop)

    @property
    def _complete(self) -> bool:
        """Whether the held text contains a stop string."""
        return any(s in self._held for s in self._stop)


def hold(text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    """Split a text into the part that is or may become a stop string, with what follows it, and the final part."""
    keep = max((n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)
    if any(s in text for s in stop):
        return text, ""
    return text[len(text) - keep :], text[: len(text) - keep]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before the stop string that is complete first.

    Streaming in pieces of any size gives the same text.

    >>> cut("0123456789", ("567", "34567", "9"))
    '012'
    """
    ends = ((text.index(s) + len(s), text.index(s)) for s in stop if s in text)
    return text[: min(ends, default=(0, len(text)))[1]]
