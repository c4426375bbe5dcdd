"""Reports of result files: a table, plots of quality against bytes and time, and needle heat maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from jkv.eval.pareto import Point, Row, pareto
from jkv.utils.plotting import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def groups(found: Iterable[Point]) -> list[tuple[str, list[Point]]]:
    """Group comparable points, each group with a name as short as tells it apart."""
    by_like: dict[Any, list[Point]] = {}
    for p in found:
        by_like.setdefault(p.like, []).append(p)
    firsts = [some[0] for some in by_like.values()]
    short = [f"{p.task}, {p.asked}" if p.asked else p.task for p in firsts]
    names = [
        name if short.count(name) == 1 else f"{name}, {p.model} at {p.size}, {len(p.tasks)} tasks"
        for name, p in zip(short, firsts, strict=True)
    ]
    return list(zip(names, by_like.values(), strict=True))


def table(found: Sequence[Point]) -> Table:
    """Build a table, also valid as markdown, with one line per cache and task.

    A star marks the Pareto front by bytes. Scores have their 95% interval for the number of answers; kept is the
    fraction of the context's tokens.
    """
    heads = ("cache", "task", "tokens", "asked", "quality", "kept", "x smaller", "ms/token")
    several = len({p.model for p in found}) > 1
    out = Table(*heads, *(["model"] if several else []), box=box.MARKDOWN)
    for _, some in groups(found):
        best = pareto(some, lambda p: (p.share, p.loss))
        for p in some:
            value = f"{p.value:.3f}" if p.metric == "score" else f"{p.metric} {p.value:.4g}"
            value += f" [{p.interval[0]:.2f}, {p.interval[1]:.2f}]" if p.interval else ""
            value += "".join(f" ({k} {p.more[k]:.4g})" for k in ("ppl", "honest") if k in p.more)
            out.add_row(
                escape(p.cache) + (" *" if p in best else ""),
                p.task + (f" ({len(p.tasks)} tasks)" if len(p.tasks) > 1 else ""),
                p.size,
                p.asked,
                value,
                _kept(p),
                f"{1 / p.share:.2f}",
                f"{p.more['ms_token']:.1f}" if "ms_token" in p.more else "",
                *([p.model] if several else []),
            )
    return out


def _kept(p: Point) -> str:
    """Format the measured fraction of tokens kept, which can differ from the budget."""
    if "kept" not in p.more:
        return ""
    return f"{p.more['kept']:.3f}" + (f" of {p.more['context']:,.0f}" if "context" in p.more else "")


def heat(rows: Sequence[Row], title: str) -> Figure:
    """Plot the scores of the needle test of one cache by depth and length."""
    cells = {tuple(r["task"].split("/")[1:]): r["score"] for r in rows}
    lengths = sorted({n for n, _ in cells}, key=int)
    depths = sorted({d for _, d in cells}, key=float)
    figure = blank(1.5 + 0.8 * len(lengths), 1.2 + 0.4 * len(depths))
    axes = figure.add_subplot()
    grid = [[cells.get((n, d), float("nan")) for n in lengths] for d in depths]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), lengths)
    axes.set_yticks(range(len(depths)), [f"{float(d):.0%}" for d in depths])
    axes.set(xlabel="tokens", ylabel="depth of the needle", title=title)
    figure.colorbar(image, label="score")
    return figure


def layers(row: Row) -> Figure:
    """Plot a fidelity row: attention kept per layer and head, and the cost of each layer's compression."""
    swept = "by_layer" in row
    figure = blank(9 if swept else 6, 4)
    left, *right = figure.subplots(1, 2 if swept else 1, squeeze=False)[0]
    image = left.imshow(row["mass"], vmin=0, vmax=1, aspect="auto", cmap="viridis")
    left.set(xlabel="kv head", ylabel="layer", title="attention to the prefix that is kept")
    figure.colorbar(image)
    for axes in right:
        axes.barh(
            range(len(row["by_layer"])),
            row["by_layer"],
            color=["C3" if i in row["spare"] else "C0" for i in range(len(row["by_layer"]))],
        )
        axes.invert_yaxis()
        axes.set(xlabel="KL in nats if this layer alone is compressed", title="red: layers to spare")
    figure.suptitle(row["cache"])
    return figure


def draw(rows: Sequence[Row], found: Sequence[Point], out: Path) -> list[Path]:
    """Plot rows and points to PNG files in a folder, and return their paths."""
    from jkv.eval.small_multiples import multiples, picked  # imports the catalogue, hence jax

    out.mkdir(parents=True, exist_ok=True)
    made: list[tuple[str, Figure]] = []
    needles: dict[str, list[Row]] = {}
    picks: dict[str, list[Row]] = {}
    for row in rows:
        if str(row.get("task")).startswith("niah/"):
            needles.setdefault(f"{row['cache']}, question {row['question']}", []).append(row)
        if "bytes_share" in row:
            picks.setdefault(row["task"], []).append(row)
        if {"by_layer", "mass"} <= row.keys():  # from `sweep`; rows of `jkv eval attention` have no masses
            made.append((f"layers {row['cache']}", layers(row)))
    # Heat maps, selector plots, then quality against bytes and time.
    made += [(f"niah {name}", heat(some, name)) for name, some in needles.items()]
    made += [(name, picked(some, name)) for name, some in picks.items()]
    for name, some in groups(found):
        for cost in ("bytes", "ms_token"):
            if len(some) > 1 and (cost == "bytes" or all(cost in p.more for p in some)):
                made.append((f"{name} by {cost}", multiples(some, cost, name)))
    paths = []
    for name, figure in made:
        paths.append(out / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".png"))
        figure.savefig(paths[-1], dpi=110)
    return paths
