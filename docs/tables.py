"""The table of README.md, from results/fidelity.json. Run it: python docs/tables.py"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
START = "| cache | tokens kept | KL | bytes |\n|---|---|---|---|\n"
CACHES = (
    "int8",
    "int4",
    "kivi",
    "makeeach(budget=256)",
    "trimkv(budget=256)",
    "h2o(budget=256)",
    "snapkv(budget=256) | int4",
    "streaming(budget=256)",
)


def filled(page: str) -> str:
    """The page with the table that the results make."""
    rows = {row["cache"]: row for row in json.loads((ROOT / "results" / "fidelity.json").read_text())["rows"]}
    before, table = page.split(START)
    after = table[table.index("\n\n") :]
    lines = []
    for name in CACHES:
        row, text = rows[name], name.replace("|", "\\|")
        lines.append(f"| `{text}` | {row['kept']:.0%} | {row['kl']:.2g} | {row['bytes'] / row['bytes_full']:.0%} |")
    return before + START + "\n".join(lines) + after


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(filled(page.read_text()))
