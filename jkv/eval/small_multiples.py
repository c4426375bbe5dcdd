"""Small multiples of quality against cost: one panel per method family, with all other caches in grey."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jkv.eval.method_families import FULL, ORDER, family
from jkv.eval.pareto import LOWER, METRICS, Point, Row, pareto
from jkv.utils.plotting import blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PPL = (1, 2, 3, 3.5, 4, 5, 7, 10, 15, 20, 25, 30, 40, 50, 70, 100, 200, 500, 1000)  # ticks of a perplexity axis
KL = (0, 1e-3, 1e-2, 1e-1, 1, 10)
SHARES = (2, 5, 10, 20, 30, 50, 100, 200, 400)  # ticks of a bytes axis, in percent
COLORS = ("#0072b2", "#d55e00", "#007a5a", "#aa3377", "#222222", "#8c6d00", "#4b3fa0", "#5a7a8c")  # color-blind safe
MARKERS = "osD^vP*X"
GREY, FRONT, SMALL = "#d4d4d4", "#555555", 8
PICKED = {
    "tokens_share": "of the older tokens, %",
    "bytes_share": "of their bytes, by whole tiles and with what a pick reads, %",
}
Place = tuple[float, float]


def method(cache: str) -> str:
    """Return a composition without its sizes, so that points of one method form a line.

    >>> method("snapkv(budget=512, window=8) | int4")
    'snapkv(window=8) | int4'
    """
    out = re.sub(r"\b(budget|keep|bytes|pages|tokens|blocks)=[^,)]*(, )?", "", cache)
    return out.replace(", )", ")").replace("()", "")


def multiples(found: Sequence[Point], cost: str, title: str) -> Figure:
    """Plot all caches with labels on the Pareto front, and a panel per family.

    Args:
        found: Comparable points.
        cost: "bytes" or "ms_token".
        title: Title of the figure.
    """
    x = _cost(cost)
    front = pareto(found, lambda p: (x(p), p.loss))
    edge = [(x(p), p.value) for p in front]
    families: dict[str, list[Point]] = {}
    for p in found:
        families.setdefault(family(p.cache), []).append(p)
    # The wide panel of all caches takes two cells of the first row.
    shown = [name for name in ORDER if name in families and name != FULL]
    rows = math.ceil((len(shown) + 2) / 3)
    figure = blank(10.9, 1 + 2.6 * rows)
    grid = figure.add_gridspec(rows, 3)
    wide = figure.add_subplot(grid[0, :2])
    places = [(i // 3, i % 3) for i in range(2, len(shown) + 2)]
    panels = [wide, *(figure.add_subplot(grid[place], sharex=wide, sharey=wide) for place in places)]
    for axes, name in zip(panels, ["all; the line is the frontier, which none beats at its cost", *shown], strict=True):
        axes.scatter([x(p) for p in found], [p.value for p in found], s=9, color=GREY, lw=0, zorder=1)
        axes.plot(*zip(*edge, strict=True), color=FRONT, lw=0.8, zorder=2, drawstyle="steps-post")
        axes.set_title(name, fontsize=9, loc="left")
        _plainly(axes)
    _scales(wide, found, cost)
    figure.supxlabel("bytes, % of the full cache" if cost == "bytes" else "ms per token", fontsize=9)
    better = "lower" if found[0].metric in LOWER else "higher"
    figure.supylabel(f"{METRICS[found[0].metric]} ({better} is better)", fontsize=9)
    about = (title, found[0].model, found[0].size and f"{found[0].size} tokens", f"{len(found)} caches")
    figure.suptitle(_plain(", ".join(filter(None, about)), 120), fontsize=11, x=0.01, ha="left", parse_math=False)
    figure.draw_without_rendering()  # fixes the layout, which labels are placed in
    figure.set_layout_engine("none")
    # Label the front and the full cache, then each family's methods.
    known = [*front, *(p for p in families.get(FULL, ()) if p not in front)]
    marked = [(p.cache, [(x(p), p.value)]) for p in known]
    wide.plot(*zip(*(at for _, (at,) in marked), strict=True), ls="", marker="o", ms=4, color="#222222", zorder=3)
    _label(wide, marked, ["#222222"] * len(marked), edge)
    for axes, name in zip(panels[1:], shown, strict=True):
        _family(axes, families[name], x, edge)
    return figure


def picked(rows: Sequence[Row], title: str) -> Figure:
    """Plot selectors: the share of attention against the share of tokens, and of bytes, that they read."""
    methods: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["tokens_share"]):
        methods.setdefault(method(row["cache"]), []).append(row)
    several = {name: some for name, some in methods.items() if len(some) > 1} or methods
    figure = blank(10.9, 5)
    panels = []
    for axes, (share, says) in zip(figure.subplots(1, 2, sharey=True), PICKED.items(), strict=True):
        lines = {name: [(100 * r[share], r["recovered"]) for r in some] for name, some in several.items()}
        at = [place for line in lines.values() for place in line]
        axes.scatter(*zip(*at, strict=True), s=9, color=GREY, lw=0, zorder=1)
        _plainly(axes)
        _shares(axes, [x for x, _ in at])
        axes.minorticks_off()
        axes.set_xlabel(says, fontsize=9)
        panels.append((axes, lines))
    figure.supylabel("share of attention (higher is better)", fontsize=9)
    figure.suptitle(_plain(title, 120), fontsize=11, x=0.01, ha="left", parse_math=False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, lines in panels:
        _lines(axes, lines, [])
    return figure


def _family(axes: Axes, some: Sequence[Point], x: Callable[[Point], float], edge: Sequence[Place]) -> None:
    lines: dict[str, list[Place]] = {}
    for p in sorted(some, key=x):
        lines.setdefault(method(p.cache), []).append((x(p), p.value))
    _lines(axes, lines, edge)


def _lines(axes: Axes, lines: Mapping[str, Sequence[Place]], edge: Sequence[Place]) -> None:
    """Plot one line per method, each with a color and a label."""
    named = sorted(lines.items())  # sorted, so that a method has one color in all plots of the same caches
    colors = [COLORS[i % len(COLORS)] for i in range(len(named))]
    for i, (color, (_, line)) in enumerate(zip(colors, named, strict=True)):
        marker = MARKERS[(i + i // len(COLORS)) % len(MARKERS)]  # another marker when colors repeat
        axes.plot(*zip(*line, strict=True), color=color, marker=marker, ms=4, lw=1.1, zorder=3)
    _label(axes, named, colors, edge)


def _plainly(axes: Axes) -> None:
    axes.grid(color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, length=2, color="#999999")


def _shares(axes: Axes, x: Sequence[float]) -> None:
    """Set a logarithmic percent axis, because most values are between a tenth and a half."""
    axes.set_xscale("log")
    ends = min(x) / 1.3, max(x) * 1.3
    axes.set_xlim(*ends)
    axes.set_xticks(ticks := [t for t in SHARES if ends[0] < t < ends[1]], map(str, ticks))


def _cost(cost: str) -> Callable[[Point], float]:
    return lambda p: 100 * p.share if cost == "bytes" else p.more[cost]


def _scales(axes: Axes, found: Sequence[Point], cost: str) -> None:
    """Set scales that spread the caches out: most are close to the full one, a few far off."""
    values, x = [p.value for p in found], [_cost(cost)(p) for p in found]
    least, most = min(values), max(values)
    if found[0].metric == "kl":
        axes.set_yscale("asinh", linear_width=1e-3)
        _ticks(axes, [t for t in KL if t <= 2 * most])
    if found[0].metric == "ppl":
        near = 0.02 * least
        forward, back = (lambda y: np.arcsinh((y - least) / near)), (lambda z: least + near * np.sinh(z))
        axes.set_yscale("function", functions=(forward, back))
        _ticks(axes, [float(f"{least:.3g}"), *(t for t in PPL if least < t < most)])
    if cost == "bytes":
        _shares(axes, x)
    axes.minorticks_off()


def _ticks(axes: Axes, at: Sequence[float]) -> None:
    """Set the ticks that are far enough apart, starting from the lowest."""
    places, kept = axes.yaxis.get_transform().transform(np.array(at)), [0]
    for i in range(1, len(at)):
        if places[i] - places[kept[-1]] > 0.08 * np.ptp(places):
            kept.append(i)
    axes.set_yticks([at[i] for i in kept], [f"{at[i]:g}" for i in kept])


def _plain(name: str, most: int = 44) -> str:
    """Format a name in one line of at most `most` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _label(
    axes: Axes, lines: Sequence[tuple[str, Sequence[Place]]], colors: Sequence[str], edge: Sequence[Place]
) -> None:
    """Label each line beside the point where the label hides least, with a thin leader if it is far away."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patheffects import withStroke

    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()
    # Everything a label should not cover: points, lines and the front.
    own = [axes.transData.transform(line) for _, line in lines]
    marks = np.concatenate(own)
    steps = [step for a, b in zip(edge, edge[1:], strict=False) for step in (a, (b[0], a[1]))] + [*edge[-1:]]
    drawn = [*own, axes.transData.transform(steps)] if steps else own
    paths = np.concatenate([marks, *map(_along, drawn)])
    frame, placed, points = axes.bbox, np.zeros((0, 4)), 72 / figure.dpi
    for (name, data), line, color in zip(lines, own, colors, strict=True):
        size = axes.text(0, 0, _plain(name), fontsize=SMALL, parse_math=False)
        extent = size.get_window_extent(renderer)
        size.remove()
        boxes, which = _candidates(line, extent.width, extent.height)
        anchors = line[which]
        # Cost of each candidate box: outside the frame, hides something, far from its point.
        outside = np.maximum([frame.x0, frame.y0] - boxes[:, :2], 0).sum(1)
        outside += np.maximum(boxes[:, 2:] - [frame.x1, frame.y1 + 2], 0).sum(1)
        far = np.hypot(*(np.clip(anchors, boxes[:, :2], boxes[:, 2:]) - anchors).T)
        hides = 9 * _inside(marks, boxes) + 2 * _inside(paths, boxes) + 400 * _overlap(placed, boxes)
        best = int(np.argmin(99 * outside + hides + 0.4 * far))
        placed = np.concatenate([placed, boxes[best : best + 1]])
        axes.annotate(
            _plain(name),
            data[which[best]],
            (boxes[best, :2] - anchors[best]) * points,
            textcoords="offset points",
            fontsize=SMALL,
            color=color,
            parse_math=False,
            zorder=5,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops=dict(arrowstyle="-", lw=0.5, color=color, shrinkA=0, shrinkB=3) if far[best] > 12 else None,
        )


def _along(line: np.ndarray) -> np.ndarray:
    """Return the points of a line, in pixels, with 12 more on each segment."""
    parts = [np.linspace(a, b, 12) for a, b in zip(line[:-1], line[1:], strict=True)]
    return np.concatenate([line, *parts])


def _candidates(line: np.ndarray, width: float, height: float) -> tuple[np.ndarray, np.ndarray]:
    """Return label boxes [n,4] (left, bottom, right, top) around a line's points, and the point of each box."""
    which, boxes = [], []
    for i, (x, y) in enumerate(line):
        for r in (7, 13, 20, 30, 42, 56, 72, 90):
            for turn in np.arange(16) * math.pi / 8:
                dx, dy = r * math.cos(turn), r * math.sin(turn)
                left = x + dx - width * (0 if dx > 0.5 else 1 if dx < -0.5 else 0.5)
                bottom = y + dy - height * (0.5 + 0.5 * (-1 if dy > 2 else 1 if dy < -2 else 0))
                which.append(i)
                boxes.append((left, bottom, left + width, bottom + height))
    return np.array(boxes), np.array(which)


def _inside(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Count the points [n,2] that each box [m,4] covers, within two pixels."""
    low, high = boxes[:, None, :2] - 2, boxes[:, None, 2:] + 2
    return ((points >= low) & (points <= high)).all(-1).sum(1)


def _overlap(others: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Count the boxes [n,4] that each box [m,4] overlaps."""
    apart = (boxes[:, None, :2] >= others[:, 2:]) | (others[:, :2] >= boxes[:, None, 2:])
    return (~apart.any(-1)).sum(1)
