"""Result files as a table and as pictures: quality against bytes, quality against time, depth against length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
QUALITY = {"ppl": "perplexity", "kl": "KL to the full cache, nats", "score": "score"}  # of a row, the last one first
LOWER = ("ppl", "kl")  # is better


def family(cache: str) -> str:
    """A composition without its sizes: points of one family make a line.

    >>> family("snapkv(budget=512, window=8) | int4")
    'snapkv(window=8) | int4'
    """
    out = re.sub(r"\b(budget|keep|bytes|pages)=[^,)]*(, )?", "", cache)
    return out.replace(", )", ")").replace("()", "")


def quality(row: Row) -> str:
    """Which number of a row says how good it is."""
    return next(name for name in ("score", "kl", "ppl") if name in row)


def mean_scores(rows: Sequence[Row]) -> list[Row]:
    """Rows of one cache and suite ("ruler/vt" is of "ruler") in one: mean score, of the same number of tasks each."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        suite = row["task"].split("/")[0] if "score" in row else row["task"]
        groups.setdefault((row["cache"], suite, row.get("question", ""), row.get("mode", "")), []).append(row)
    out = []
    for (cache, suite, _, mode), some in groups.items():
        one = dict(some[0], cache=cache, task=f"{suite} {mode}".strip(), tasks=len(some))
        for name in ("score", "bytes", "bytes_full", "kept", "honest"):
            if all(name in r for r in some):
                one[name] = sum(r[name] for r in some) / len(some)
        out.append(one)
    return out


def pareto(rows: Sequence[Row], cost: str, good: str) -> list[Row]:
    """Rows that no other row beats: none costs less and is as good, or costs the same and is better.

    >>> rows = [dict(bytes=1, score=0.2), dict(bytes=2, score=0.1), dict(bytes=3, score=0.9)]
    >>> [r["bytes"] for r in pareto(rows, "bytes", "score")]
    [1, 3]
    """
    sign = 1 if good in LOWER else -1
    best, out = float("inf"), []
    for row in sorted(rows, key=lambda r: (r[cost], sign * r[good])):
        if sign * row[good] < best:
            best = sign * row[good]
            out.append(row)
    return out


def table(rows: Sequence[Row]) -> Table:
    """A line a cache and task; it is markdown too. The star marks what nothing else beats at its bytes."""
    from rich import box

    out = Table("cache", "task", "question", "quality", "kept", "x smaller", "ms/token", box=box.MARKDOWN)
    made = mean_scores(rows)
    for task, asked in dict.fromkeys((r["task"], r.get("question", "")) for r in made):
        some = [r for r in made if (r["task"], r.get("question", "")) == (task, asked)]
        best = pareto(some, "bytes", quality(some[0]))
        for r in some:
            name = quality(r)
            value = f"{r[name]:.3f}" if name == "score" else f"{name} {r[name]:.4g}"
            value += f" (ppl {r['ppl']:.4g})" if name == "kl" and "ppl" in r else ""
            out.add_row(
                r["cache"] + (" *" if r in best else ""),
                task + (f" ({r['tasks']} tasks)" if r["tasks"] > 1 else ""),
                asked,
                value,
                f"{r['kept']:.3f}",
                f"{r['bytes_full'] / r['bytes']:.2f}",
                f"{r['ms_token']:.1f}" if "ms_token" in r else "",
            )
    return out


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'jkv[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot(rows: Sequence[Row], cost: str, task: str) -> Figure:
    """Quality against `cost` ("bytes" or "ms_token") of one task: a line a family, the Pareto front in black."""
    good = quality(rows[0])
    figure = _figure(9, 5.5)
    axes = figure.add_subplot()
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(family(row["cache"]), []).append(row)
    x = (lambda r: 100 * r["bytes"] / r["bytes_full"]) if cost == "bytes" else (lambda r: r[cost])
    markers = "osD^vP*Xph<>"
    for i, (name, some) in enumerate(sorted(families.items())):
        some = sorted(some, key=x)
        axes.plot([x(r) for r in some], [r[good] for r in some], marker=markers[i % 12], label=name, lw=1, ms=5)
    front = sorted(pareto(rows, cost, good), key=x)
    axes.plot(
        [x(r) for r in front], [r[good] for r in front], color="black", lw=2.5, alpha=0.25, zorder=0, label="best"
    )
    if good == "kl":
        axes.set_yscale("symlog", linthresh=1e-3)
    axes.set(
        xlabel="bytes, % of the full cache" if cost == "bytes" else "ms per token",
        ylabel=QUALITY[good],
        title=task,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def heat(rows: Sequence[Row], cache: str) -> Figure:
    """Scores of the needle test by depth and length."""
    cells = {tuple(r["task"].split("/")[1:]): r["score"] for r in rows}
    lengths = sorted({n for n, _ in cells}, key=int)
    depths = sorted({d for _, d in cells}, key=float)
    figure = _figure(1.5 + 0.8 * len(lengths), 1.2 + 0.4 * len(depths))
    axes = figure.add_subplot()
    grid = [[cells.get((n, d), float("nan")) for n in lengths] for d in depths]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), lengths)
    axes.set_yticks(range(len(depths)), [f"{float(d):.0%}" for d in depths])
    axes.set(xlabel="tokens", ylabel="depth of the needle", title=cache)
    figure.colorbar(image, label="score")
    return figure


def layers(row: Row) -> Figure:
    """Of one fidelity row: the attention kept per layer and head, and what each layer's compression costs."""
    swept = "by_layer" in row
    figure = _figure(9 if swept else 6, 4)
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


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """All pictures of these rows, as PNG files in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    made: list[tuple[str, Figure]] = []
    needles = [r for r in rows if r["task"].startswith("niah/") and r["task"].count("/") == 2]
    for cache in dict.fromkeys(r["cache"] for r in needles):
        made.append((f"niah {cache}", heat([r for r in needles if r["cache"] == cache], cache)))
    for row in rows:
        if "by_layer" in row:
            made.append((f"layers {row['cache']}", layers(row)))
    means = mean_scores(rows)
    for task, asked in dict.fromkeys((r["task"], r.get("question", "")) for r in means):
        some = [r for r in means if (r["task"], r.get("question", "")) == (task, asked)]
        title = f"{task}, question {asked}" if asked else task
        for cost in ("bytes", "ms_token"):
            if len(some) > 1 and all(cost in r for r in some):
                made.append((f"{title} by {cost}", plot(some, cost, title)))
    paths = []
    for name, figure in made:
        paths.append(out / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".png"))
        figure.savefig(paths[-1], dpi=110)
    return paths
