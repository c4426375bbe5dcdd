"""Unicode validation of a caller's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def check_unicode(name: str, x: Any) -> None:
    """Raise ValueError for text that is not valid Unicode, alone or inside lists and mappings, with its place.

    >>> check_unicode("messages", [{"content": "cut \\ud83d"}])
    Traceback (most recent call last):
    ValueError: messages[0].content has half a character (U+D83D) at place 4: send all of it, or U+FFFD instead
    """
    for where, text in _texts(name, x):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"half a character (U+{ord(text[error.start]):04X}) at place {error.start}"
            raise ValueError(f"{ascii(where)[1:-1]} has {half}: send all of it, or U+FFFD instead") from None


def _texts(name: str, x: Any) -> Iterator[tuple[str, str]]:
    """Yield every text inside a value with its path, keys of mappings included."""
    if isinstance(x, str):
        yield name, x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield f"a key of {name or 'the object'}", str(key)
            yield from _texts(f"{name}.{key}" if name else str(key), value)
    elif isinstance(x, list | tuple):
        for i, value in enumerate(x):
            if not isinstance(value, int):  # skip token ids: there may be many
                yield from _texts(f"{name}[{i}]", value)
