"""Draws the .svg of docs/, two of them from results/. Run it: python docs/pictures.py"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Any

from jkv.eval.pareto import pareto

ROOT = Path(__file__).parent.parent
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
INK, SOFT, LINE = "#1f2933", "#5f6c7b", "#9aa5b1"
EXACT, MID, PALE, EMPTY = "#2b6cb0", "#8ab8e3", "#d6e6f5", "#ffffff"  # fewer bits, paler
READ, READ_SOFT = "#d9730d", "#fce5cf"  # queries, and what they read
CARD = "#f3f5f7"
Place = tuple[float, float]
Box = tuple[float, float, float, float]


class Canvas:
    """An SVG image on a white card."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.items = [f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>']

    def box(self, x: float, y: float, w: float, h: float, fill: str = EMPTY, stroke: str = LINE, r: float = 2) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}"'
        self.items.append(f'<rect {place} fill="{fill}" stroke="{stroke}"/>')

    def frame(self, x: float, y: float, w: float, h: float) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2"'
        self.items.append(f'<rect {place} fill="none" stroke="{READ}" stroke-width="2.5"/>')

    def text(
        self, x: float, y: float, text: str, size: float = 14, at: str = "start", fill: str = INK, bold: bool = False
    ) -> None:
        style = f'font-size="{size:g}" text-anchor="{at}" fill="{fill}"' + (' font-weight="bold"' if bold else "")
        halo = (' stroke="#ffffff" stroke-width="3"', "") if fill == INK else ("",)  # lines end short of a word
        for stroke in halo:  # twice: not every viewer knows paint-order
            self.items.append(f'<text x="{x:g}" y="{y:g}" {style}{stroke}>{escape(text, False)}</text>')

    def line(self, *points: Place, stroke: str = SOFT, width: float = 1.5, head: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = f' marker-end="url(#{stroke[1:]})"' if head else ""
        self.items.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{end}/>')

    def dot(self, x: float, y: float, r: float, fill: str) -> None:
        self.items.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" fill="{fill}"/>')

    def svg(self) -> str:
        w, h = self.size
        heads = "".join(
            f'<marker id="{c[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{c}"/></marker>'
            for c in (SOFT, READ)
        )
        size = f'viewBox="0 0 {w} {h}" width="{w}" height="{h}"'
        top = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">'
        return "\n".join([top, f"<title>{escape(self.title)}</title><defs>{heads}</defs>", *self.items, "</svg>\n"])


# A layer's cache: (name, about, x, position of each slot or None, fill, height of a number, picked pages)
CELL, PAGE = 22, 4
STORES: list[tuple[str, str, float, list[int | None], str, float, list[int] | None]] = [
    ("tier 2", "int4, slots in no order", 208, [8, 9, 11, 12, 0, 1, 2, 3, None, None, None, None], PALE, 10, [1]),
    ("tier 1", "int8", 500, [40, 41, 43, 44, 31, 33, 35, 36], MID, 20, [0]),
    ("recent window", "exact, in order", 704, [*range(50, 57), None, None, None], EXACT, 40, None),
]
READS = {"tier 2": "the picked pages", "tier 1": "the picked pages", "recent window": "all entries"}


def layer() -> str:
    """A layer's cache and what a decode step reads of it."""
    c = Canvas(960, 508, "A layer's cache and what a decode step reads of it")
    for y, name in ((86, "page summaries"), (133, "keys"), (181, "values"), (218, "positions"), (240, "score columns")):
        c.text(118, y, name, 13, "end", SOFT)
    c.text(157, 34, "residual", 15, "middle", bold=True)
    c.text(157, 52, "token", 15, "middle", bold=True)
    for y in (108, 156):
        c.box(146, y, CELL, 40, CARD)
    parts = [(157.0, "logit + log n")]
    for name, about, x, slots, fill, height, picked in STORES:
        _store(c, x, slots, fill, height, picked)
        c.text(x, 34, name, 15, bold=True)
        c.text(x, 52, about, 13, fill=SOFT)
        parts.append((x + CELL * len(slots) / 2, READS[name]))
    full = STORES[2][3].index(None)
    new = STORES[2][2] + CELL * (full + 0.5)
    c.text(new + 8, 86, "new k, v", 13, fill=READ)
    c.line((new, 78), (new, 106), stroke=READ, head=True)
    for x, what in parts:
        c.line((x, 250), (x, 300), head=True)
        c.text(x + 8, 270, what, 13, fill=INK)
        c.line((x - 22, 286), (x - 22, 300), stroke=READ, head=True)
        c.box(x - 52, 302, 104, 46, CARD, r=6)
        c.text(x, 321, "attention", 14, "middle")
        c.text(x, 339, "(acc, m, l)", 13, "middle", SOFT)
        c.line((x, 348), (x, 378), head=True)
    c.line((944, 286), (parts[0][0] - 22, 286), stroke=READ)
    c.text(938, 278, "q", 16, "end", READ, bold=True)
    c.box(105, 380, 819, 34, CARD, r=6)
    c.text(514, 402, "merge of Partials: exact, in any order", 15, "middle")
    c.line((514, 414), (514, 440), head=True)
    c.text(514, 458, "acc / l, the layer's attention output", 14, "middle")
    c.line((944, 286), (944, 466), (926, 466), stroke=READ, head=True)
    for i in range(8):
        c.box(748 + i * CELL, 455, CELL, 22, READ_SOFT, READ)
    c.text(924, 496, "ring of queries, for the next flush", 13, "end", SOFT)
    about = "Height: bits of a number. White: an empty slot. Orange: the step's query, and what it touches."
    c.text(36, 496, about, 13, fill=SOFT)
    return c.svg()


def _store(c: Canvas, x: float, slots: list[int | None], fill: str, height: float, picked: list[int] | None) -> None:
    """A strip of slots: page summaries, keys, values, positions, columns."""
    for page in range(len(slots) // PAGE if picked is not None else 0):
        c.box(x + page * PAGE * CELL, 74, PAGE * CELL, 16, READ_SOFT if page in (picked or ()) else CARD)
    for i, pos in enumerate(slots):
        for y in (128, 176):
            c.box(x + i * CELL, y - height / 2, CELL, height, EMPTY if pos is None else fill)
        c.box(x + i * CELL, 204, CELL, 20, EMPTY)
        c.box(x + i * CELL, 230, CELL, 12, EMPTY if pos is None else CARD)
        if pos is not None:
            c.text(x + (i + 0.5) * CELL, 218, str(pos), 12, "middle", SOFT)
    for page in picked or ():
        c.frame(x + page * PAGE * CELL, 102, PAGE * CELL, 143)


# A flush: ranks of slots and newcomers; None: an empty slot
TIERS: list[tuple[str, list[int | None], str]] = [
    ("tier 1", [14, 5, 19, 9, 16], MID),
    ("tier 2", [10, None, 6, 3, 8], PALE),
]
NEWCOMERS = [11, 4, 18, 7, 15]
W, H = 40, 32


def contest(slots: list[int | None], new: list[int]) -> tuple[list[int | None], list[int]]:
    """The slots after the contest, and those that lost it: the i-th best newcomer against the i-th worst slot."""
    after, lost = list(slots), []
    worst = sorted(range(len(slots)), key=lambda i: -1 if slots[i] is None else slots[i] or 0)
    for i, rank in zip(worst, sorted(new, reverse=True), strict=True):
        old = slots[i]
        win = old is None or rank > old
        after[i] = rank if win else old
        lost += [x for x in ([old] if win else [rank]) if x is not None]
    return after, lost


def flush() -> str:
    """A flush: pack, observe, rank, cascade, merge, encode."""
    c = Canvas(960, 600, "A flush: pack, observe, rank, cascade through the tiers, merge, encode")
    _steps(c, 62, "1 pack", "2 observe", "3 rank")
    x = 150
    for name, slots, fill in [*TIERS, ("newcomers", NEWCOMERS, EXACT), ("stay exact", [None] * 3, EXACT)]:
        c.text(x, 34, name, 15, bold=True)
        _ranks(c, x, 60, slots, fill)
        for i in range(len(slots)):
            c.line((x + (i + 0.5) * W, 114), (x + (i + 0.5) * W, 98), stroke=READ, head=True)
        x += W * len(slots) + 20
    c.line((150, 114), (570 + 8 * W + 20, 114), stroke=READ)
    about = "the new queries update what the score remembers of every token; then every token gets a rank"
    c.text(150, 136, about, fill=READ)
    new, y = NEWCOMERS, 178
    for step, (name, slots, fill) in enumerate(TIERS):
        _steps(c, y + 56, *(["4 cascade"] if not step else []))
        after, lost = contest(slots, new)
        _contest(c, y, name, slots, new, after, fill, last=name == TIERS[-1][0])
        new, y = lost, y + 186
    _steps(c, y + 22, "5 merge")
    _ranks(c, 250, y, sorted(new, reverse=True))
    c.line((250 + W * len(new) + 8, y + 16), (470, y + 16), head=True)
    c.text(480, y + 12, "shares in tokens that stay, mixtures,", 14)
    c.text(480, y + 30, "or the residual token; otherwise dropped", 14)
    return c.svg()


def _steps(c: Canvas, y: float, *names: str) -> None:
    for i, name in enumerate(names):
        c.text(24, y + 20 * i, name, 15, bold=True)


def _ranks(c: Canvas, x: float, y: float, ranks: Sequence[int | None], fill: str = "", won: Sequence[int] = ()) -> None:
    """A strip of tokens with their ranks, each in the colour of where it comes from, or in one colour."""
    origin = dict.fromkeys(NEWCOMERS, EXACT) | {rank: own for _, slots, own in TIERS for rank in slots}
    for i, rank in enumerate(ranks):
        color = EMPTY if rank is None and fill != EXACT else fill or origin[rank]
        c.box(x + i * W, y, W, H, color)
        if rank is not None:
            c.text(x + (i + 0.5) * W, y + 21, str(rank), 15, "middle", "#ffffff" if color == EXACT else "#111111")
    for i, rank in enumerate(ranks):
        if rank in won:
            c.frame(x + i * W, y, W, H)


def _contest(
    c: Canvas,
    y: float,
    name: str,
    slots: list[int | None],
    new: list[int],
    after: list[int | None],
    fill: str,
    last: bool,
) -> None:
    """One tier's contest: newcomers over slots, who wins, the tier after it, and who goes on."""
    best = sorted(new, reverse=True)
    worst = sorted(slots, key=lambda x: -1 if x is None else x)
    won = [a for a, b in zip(best, worst, strict=True) if b is None or a > b]
    c.text(238, y + 21, "newcomers, best first", 13, "end", SOFT)
    c.text(238, y + 91, f"{name}, worst first", 13, "end", SOFT)
    _ranks(c, 250, y, best, won=won)
    _ranks(c, 250, y + 70, worst)
    for i, (a, b) in enumerate(zip(best, worst, strict=True)):
        x, wins = 250 + (i + 0.5) * W, b is None or a > b
        if wins:
            c.line((x, y + H + 4), (x, y + 66), stroke=READ, head=True)
        else:
            c.text(x, y + 56, "≤", 16, "middle", SOFT)
    c.line((250 + 5 * W + 12, y + 51), (590, y + 51), head=True)
    c.text(526, y + 40, "6 encode", 15, "middle", bold=True)
    c.text(526, y + 70, "once", 13, "middle", SOFT)
    c.text(604, y + 21, f"{name} after the flush", 14, bold=True)
    _ranks(c, 604, y + 35, after, fill, won)
    c.text(604, y + 91, "survivors do not move", 13, fill=SOFT)
    c.line((350, y + 108), (350, y + 180), head=True)
    lost = "are evicted" if last else "are the newcomers of the next tier"
    c.text(362, y + 142, f"losers {lost}", 14)


def quality() -> str:
    """KL to the full cache against bytes, the frontier named; below, codes and evictions together on longer texts."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "results" / "fidelity.json").read_text())["rows"]
    found = [(100 * r["bytes"] / r["bytes_full"], r["kl"], r["cache"]) for r in rows]
    front = [p for p in pareto(found, lambda p: (p[0], p[1])) if p[1] or p[2] == "full"]
    c = Canvas(960, 880, "KL to the full cache against bytes; the frontiers named")
    left, right, top, bottom = 84, 936, 46, 430
    c.text(left, 26, "KL on prose, 1,024 tokens and 128 after them", 15, bold=True)

    def at(share: float, kl: float) -> Place:
        x = left + (right - left) * (log10(share) - log10(2.5)) / (log10(240) - log10(2.5))
        return x, bottom if kl == 0 else min(top + (bottom - 34 - top) * -log10(kl) / 5, bottom)

    for kl, name in ((1, "1"), (0.1, "0.1"), (0.01, "0.01"), (1e-3, "0.001"), (1e-4, "0.0001"), (0, "0")):
        y = at(10, kl)[1]
        c.line((left, y), (right, y), stroke="#e4e7eb", width=1)
        c.text(left - 8, y + 5, name, 14, "end", SOFT)
    for share in (5, 10, 20, 50, 100, 200):
        x = at(share, 1)[0]
        c.line((x, bottom), (x, bottom + 6), stroke=LINE, width=1)
        c.text(x, bottom + 22, f"{share}%", 14, "middle", SOFT)
    c.text((left + right) / 2, bottom + 46, "bytes of the cache, of a full one", 14, "middle")
    turn = f'transform="translate(22 {(top + bottom) / 2:g}) rotate(-90)"'
    c.items.append(f'<text {turn} text-anchor="middle" font-size="15" fill="{INK}">KL to the full cache, nats</text>')
    for share, kl, _ in found:
        c.dot(*at(share, kl), 3, "#c5cdd6")
    edge = [at(share, kl) for share, kl, _ in front]
    steps = [place for a, b in zip(edge, edge[1:], strict=False) for place in (a, (b[0], a[1]))]
    c.line(*steps, edge[-1], stroke=EXACT, width=2)
    lowest = -20.0
    for (x, y), (_, _, name) in zip(edge, front, strict=True):
        lowest = max(y, lowest + 19)
        c.line((x - 22, lowest), (x - 4, y), stroke=LINE, width=1)
        c.text(x - 26, lowest + 5, name, 14, "end")
    for x, y in edge:
        c.dot(x, y, 5, EXACT)
    c.dot(112, 366, 5, EXACT)
    c.text(124, 371, "frontier: no cache has fewer bytes and less KL", 13)
    c.dot(112, 390, 3, "#c5cdd6")
    c.text(124, 395, f"the other {len(found) - len(front)} caches measured", 13)
    for i, panel in enumerate(PANELS[:2]):  # other texts and lengths: frames of their own
        _panel(c, 56 + 470 * i, 540, *panel)
    _legend(c, 860)
    return c.svg()


# A panel: its file, the metric, a file of the same task with more caches, what it says, the scale's marks
PANELS: list[tuple[str, str, str, str, tuple[float, ...]]] = [
    ("prose", "kl", "", "KL on prose, 2,048 tokens", (0.003, 0.01, 0.03, 0.1, 0.3)),
    ("code", "kl", "", "KL on code, 2,048 tokens", (0.003, 0.01, 0.03, 0.1, 0.3)),
    ("later", "score", "multiturn", "later questions answered, 1,024 tokens", (0, 0.25, 0.5, 0.75, 1)),
    ("needles", "score", "ruler", "needles given back, 1,024 tokens", (0, 0.25, 0.5, 0.75, 1)),
]
SHARES = (2.5, 5, 10, 20, 40)


def compositions() -> str:
    """Quality against bytes of codes, of evictions, and of both together, on four tasks; the frontiers named."""
    c = Canvas(960, 720, "Quality against bytes: codes, evictions, and both together")
    for i, panel in enumerate(PANELS):
        _panel(c, 56 + 470 * (i % 2), 40 + 330 * (i // 2), *panel)
    _legend(c, 705, others=True)
    return c.svg()


def _legend(c: Canvas, y: float, others: bool = False) -> None:
    every = ((250, READ, "codes and evictions"), (420, EXACT, "codes alone"), (540, "#c5cdd6", "all other caches"))
    for x, fill, name in every if others else every[:2]:
        c.dot(x, y - 5, 4.5, fill)
        c.text(x + 10, y, name, 13)
    c.text(56, y, "bytes, of a full cache's;", 13, fill=SOFT)


def _panel(c: Canvas, left: float, top: float, name: str, metric: str, more: str, title: str, marks: Any) -> None:
    width, height, low = 410, 260, metric == "kl"
    files = [ROOT / "results" / "compositions" / f"{name}.json", *([ROOT / "results" / f"{more}.json"] if more else [])]
    rows = [("" if n else "own", json.loads(f.read_text())["rows"]) for n, f in enumerate(files)]
    ours = {r["cache"] for r in rows[0][1]}
    every: dict[str, list[tuple[float, float]]] = {}
    for own, some in rows:
        for r in some:
            if own or r["cache"] not in ours:
                every.setdefault(r["cache"], []).append((100 * r["bytes"] / r["bytes_full"], r[metric]))
    means = {cache: [sum(x) / len(x) for x in zip(*found, strict=True)] for cache, found in every.items()}
    shown = {cache: x for cache, x in means.items() if x[0] <= SHARES[-1]}

    def at(share: float, value: float) -> Place:
        bottom, most = (log10(marks[0]), log10(marks[-1])) if low else (0.0, 1.0)
        y = (min(max(log10(value), bottom), most) - bottom) / (most - bottom) if low else value
        return (
            left + width * (log10(share) - log10(SHARES[0])) / (log10(SHARES[-1]) - log10(SHARES[0])),
            top + height * (1 - y),
        )

    c.text(left, top - 14, title, 15, bold=True)
    for mark in marks:
        y = at(10, mark)[1]
        c.line((left, y), (left + width, y), stroke="#e4e7eb", width=1)
        c.text(left - 6, y + 5, f"{mark:g}", 13, "end", SOFT)
    for share in SHARES:
        c.text(at(share, marks[0])[0], top + height + 20, f"{share:g}%", 13, "middle", SOFT)
    both = {x for x in shown if x in ours and "|" in x}
    for cache, (share, value) in sorted(shown.items(), key=lambda x: (x[0] in ours, x[0] in both)):
        fill = READ if cache in both else EXACT if cache in ours else "#c5cdd6"
        c.dot(*at(share, value), 4.5 if cache in ours else 3, fill)
    front = {
        (x, y): name for x, y, name in pareto([(*shown[x], x) for x in shown], lambda p: (p[0], p[1] if low else -p[1]))
    }
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in (at(*place) for place in shown.values())]
    for place, cache in sorted(front.items(), reverse=True):  # a line down from the left passes names on its right
        _beside(c, at(*place), cache.replace("(rotate=True)", ""), taken, left, left + width)


def _beside(c: Canvas, place: Place, name: str, taken: list[Box], left: float, right: float) -> None:
    """A name beside its dot, where it hides no other dot or name, if there is such a place."""
    (x, y), wide = place, 6.1 * len(name)
    boxes = [(x + 8, 0), (x + 6, 12), (x + 6, -12), (x - wide / 2, 14), (x - wide / 2, -14), (x - wide - 8, 0)]
    boxes += [(x + 8, dy) for dy in range(26, 160, 13)]  # with a line to its dot

    def parts(at: float, dy: float) -> list[Box]:
        line = [(x - 2, y + 6, x + 2, y + dy)] if dy > 14 else []
        return [(at, y + dy - 7, at + wide, y + dy + 7), *line]

    def clear(a: Box) -> bool:
        return all(a[0] > b[2] or a[2] < b[0] or a[1] > b[3] or a[3] < b[1] for b in taken)

    inside = [(at, dy) for at, dy in boxes if left < at and at + wide < right + 20]
    at, dy = next((place for place in inside if all(map(clear, parts(*place)))), boxes[0])
    taken += parts(at, dy)
    if dy > 14:
        c.line((x, y + 6), (x, y + dy), (at - 2, y + dy), stroke=LINE, width=1)
    c.text(at, y + dy + 4, name, 12)


PICTURES = {"layer": layer, "flush": flush, "quality": quality, "compositions": compositions}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / f"{name}.svg").write_text(draw())
