"""Tables of README.md, docs/quality.md and docs/speed.md, from results/. Run it: python docs/tables.py"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHOWN = (
    "int8",
    "int4",
    "kivi",
    "makeeach(budget=256)",
    "trimkv(budget=256)",
    "h2o(budget=256)",
    "snapkv(budget=256) | int4",
    "streaming(budget=256)",
)
BUDGETS = (512, 256, 128)


def results(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"]


def costs() -> list[str]:
    """What some caches cost in quality, and what they take."""
    rows, lines = {row["cache"]: row for row in results("fidelity")}, []
    for name in SHOWN:
        row, text = rows[name], name.replace("|", "\\|")
        lines.append(f"| `{text}` | {row['kept']:.0%} | {row['kl']:.2g} | {row['bytes'] / row['bytes_full']:.0%} |")
    return lines


def later() -> list[str]:
    """Answers to later questions by what evicts, merges or learned, the best first."""
    found: dict[str, dict[int, float]] = {}
    for row in results("multiturn"):
        if (match := re.fullmatch(r"(\w+)\(budget=(\d+)\)", row["cache"])) and row["mode"] == "reused":
            found.setdefault(match[1], {})[int(match[2])] = row["score"]
    whole = {name: [scores[b] for b in BUDGETS] for name, scores in found.items() if set(BUDGETS) <= set(scores)}
    alike: dict[tuple[float, ...], list[str]] = {}
    for name in sorted(whole, key=lambda name: (-sum(whole[name]), name)):
        alike.setdefault(tuple(whole[name]), []).append(name)
    return [f"| {', '.join(names)} | {' | '.join(f'{x:.2f}' for x in scores)} |" for scores, names in alike.items()]


def waiting() -> list[str]:
    """How long the compiler keeps a user waiting."""
    lines = []
    for row in results("compile"):
        cache, seconds = row["cache"].replace("|", "\\|"), f"{row['first_s']:.1f} | {row['all_s']:.1f}"
        lines.append(f"| `{cache}` | {row['how']} | {seconds} | {row['maps']:,} |")
    return lines


TABLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "README.md": ("| cache | tokens kept | KL | bytes |\n|---|---|---|---|\n", costs),
    "docs/speed.md": ("| cache | compiled | first block, s | all, s | memory maps |\n|---|---|---|---|---|\n", waiting),
    "docs/quality.md": ("| | 512 tokens, 74% | 256, 37% | 128, 18% |\n|---|---|---|---|\n", later),
}


def filled(name: str) -> str:
    """The page with the table that the results make."""
    head, lines = TABLES[name]
    before, table = (ROOT / name).read_text().split(head)
    return before + head + "\n".join(lines()) + table[table.index("\n\n") :]


if __name__ == "__main__":
    for name in TABLES:
        (ROOT / name).write_text(filled(name))
