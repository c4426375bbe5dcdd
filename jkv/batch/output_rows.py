"""Rows of an output file: parsing, damage, and the line of the input that each row answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jkv.io.errors import FormatError

if TYPE_CHECKING:
    from jkv.io.object_store import Place

Counts = tuple[int, int] | None  # tokens read and generated; None for a failure
NAMED = 5  # most line numbers in a message


@dataclass(frozen=True)
class OutputRow:
    """One row of an output file.

    Attributes:
        line: line of the input that it answers.
        key: key of the request (`Request.key`).
        counts: tokens read and generated, or None for a failure.
    """

    line: int
    key: str
    counts: Counts


def tally(row: Mapping[str, Any]) -> tuple[int, Counts]:
    """Return the line of a row and its token counts."""
    return row["line"], None if row.get("error") is not None else (row["prompt_tokens"], counted(row["tokens"]))


def counted(tokens: list[Any]) -> int:
    """Count the tokens of one answer or of several.

    >>> counted([5, 6, 7]), counted([[5, 6], [7]])
    (3, 3)
    """
    return sum(map(len, tokens)) if tokens and isinstance(tokens[0], list) else len(tokens)


def dumped(row: Mapping[str, Any]) -> bytes:
    """Serialize a row as a line of standard JSON. Raises ValueError for NaN."""
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def parsed(raw: bytes) -> OutputRow:
    """Parse a line of an output file. Raises ValueError, TypeError or KeyError if it is no row.

    >>> parsed(b'{"line": 7, "key": "ab", "error": "the prompt is empty"}').line
    7
    """
    row = json.loads(raw)
    (line, counts), key = tally(row), row["key"]
    numbers = (line, *(counts or ()))
    if any(type(x) is not int for x in numbers) or min(numbers) < 0 or line < 1 or not isinstance(key, str):
        raise ValueError("its line, key or numbers of tokens cannot be right")
    return OutputRow(line, key, counts)


def scan(path: Place, lines: Iterable[bytes]) -> tuple[list[OutputRow], int]:
    """Parse the lines of an output file.

    Returns:
        Rows, and bytes up to the last newline; a kill left what follows.

    Raises:
        FormatError: a line with its newline is no row, which no kill causes.
    """
    found, damaged, size = [], [], 0
    for number, raw in enumerate(lines, 1):
        if not raw.endswith(b"\n"):
            break
        size += len(raw)
        try:
            found.append(parsed(raw))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            damaged.append(number)
    if damaged:
        what = f"{_named(damaged)} {'is' if len(damaged) == 1 else 'are'} damaged"
        way_out = "take it out, and the job runs its row again" if len(damaged) == 1 else "put back the file as it was"
        raise FormatError(path, what, f"{way_out}; or give another folder. Nothing was changed")
    return found, size


def _named(numbers: Sequence[int]) -> str:
    """Name line numbers for a message, NAMED of them at most.

    >>> _named([3]), _named([1, 2, 3, 4, 5, 6, 7])
    ('line 3', 'lines 1, 2, 3, 4, 5 and 2 more')
    """
    more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
    return f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:NAMED]))}{more}"


def relined(raw: bytes, line: int) -> bytes:
    """Return a raw row with another line number."""
    row = json.loads(raw)
    return raw if row["line"] == line else dumped(row | {"line": line})


def match_rows(path: Place, found: Sequence[OutputRow], wanted: Mapping[int, str]) -> list[int | None]:
    """Match rows of the output to lines of the input.

    A row answers its own line, or another one with the same key. Answers are matched before failures.

    Args:
        path: output file, for messages.
        found: rows of the output.
        wanted: key of each line of the input.

    Returns:
        Line of each row; None for a failure that matches no line.

    Raises:
        ValueError: an answer matches no line, and answers must not be deleted.

    >>> from pathlib import Path
    >>> match_rows(Path("x"), [OutputRow(1, "a", (3, 2)), OutputRow(2, "b", None)], {2: "a", 3: "c"})
    [2, None]
    """
    left = dict(wanted)
    lines: list[int | None] = [None] * len(found)
    for failures in (False, True):  # answers first
        some = [i for i, x in enumerate(found) if (x.counts is None) == failures]
        for i in some:
            if left.get(found[i].line) == found[i].key:
                lines[i] = found[i].line
                del left[found[i].line]
        # Match the rest by key, the smallest line first.
        asked: dict[str, list[int]] = {}
        for line in sorted(left, reverse=True):
            asked.setdefault(left[line], []).append(line)
        for i in some:
            if lines[i] is None and asked.get(found[i].key):
                lines[i] = line = asked[found[i].key].pop()
                del left[line]
    # An answer without a line belongs to another job.
    strange = [i + 1 for i, (x, line) in enumerate(zip(found, lines, strict=True)) if line is None and x.counts]
    if strange:
        raise ValueError(
            f"{path} holds another job: {_named(strange)} of it answer{'s' * (len(strange) == 1)} what the input does "
            "not ask (any more, or not twice). Give the input that it was begun with, or another folder, or take out "
            "what is not wanted any more"
        )
    return lines
