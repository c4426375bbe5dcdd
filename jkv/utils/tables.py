"""Small tables as text and as HTML, for what a value prints in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

Rows = Sequence[Sequence[object]]


def text_table(heads: Sequence[str], rows: Rows) -> str:
    """Align columns: the first one left, the others right.

    >>> print(text_table(["cache", "bytes"], [["full", 900], ["int8", 30]]))
    cache  bytes
    full     900
    int8      30
    """
    cells = [[*map(str, row)] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(f"{x:<{n}}" if i == 0 else f"{x:>{n}}" for i, (x, n) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
    return "\n".join(map(str.rstrip, lines))


def html_table(heads: Sequence[str], rows: Rows, title: str = "") -> str:
    """Return an HTML table without styles of its own; every text is escaped.

    >>> html_table([], [["cache", "a < b"]])
    '<table><tr><td>cache</td><td>a &lt; b</td></tr></table>'
    """

    def line(cells: Sequence[object], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html_text(x)}</{tag}>" for x in cells) + "</tr>"

    caption = f"<caption>{html_text(title)}</caption>" if title else ""
    return f"<table>{caption}{line(heads, 'th') if heads else ''}{''.join(map(line, rows))}</table>"


def reprs(name: str, facts: Callable[[Any], list[tuple[str, str]]]) -> tuple[Any, Any]:
    """Return `__repr__` and `_repr_html_` of a class: one line, and a table of two columns.

    Args:
        name: the class's.
        facts: returns the name and value of each fact about an instance.
    """

    def line(self: Any) -> str:
        return f"{name}({'; '.join(f'{fact}: {text}' for fact, text in facts(self))})"

    def html(self: Any) -> str:
        return html_table([], facts(self), name)

    return line, html


def html_text(text: object) -> str:
    """Escape a text, and keep its line breaks.

    >>> html_text("<b>\\n1")
    '&lt;b&gt;<br>1'
    """
    return escape(str(text)).replace("\n", "<br>")


def abbreviate(text: str, most: int) -> str:
    """Return a text, or its beginning and an ellipsis if it has more than `most` characters.

    >>> abbreviate("caches", 6), abbreviate("caches", 4)
    ('caches', 'cac…')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
