"""Texts that end an answer."""

from __future__ import annotations


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
