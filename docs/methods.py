"""Writes docs/methods.md from the catalogue: `make docs`."""

from pathlib import Path

from jkv.methods import CATALOGUE, pairs
from jkv.models import TINY, read_config

HEAD = """# Methods

Made from the catalogue by `make docs`. `jkv methods NAME` tells more of one: its arguments and their defaults, and its
parts with their equations.

| method | what it does | paper | what that promises | exactness here |
|---|---|---|---|---|
"""
REFUSED = """
## What does not go together

Every method that scores tokens goes with every one that codes or selects them, but for these:

"""


def table() -> str:
    """A line a method; what a paper promises holds in its own setting."""
    return HEAD + "".join(
        f"| `{r.name}` | {' '.join(r.text.split())} | {r.paper} | {r.claim or '-'} | {r.exactness} |\n"
        for r in CATALOGUE.values()
    )


def refused() -> str:
    """The pairs that are refused, by reason."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for (score, other), why in pairs(read_config(TINY)).items():
        if why:
            reasons.setdefault(why.split(": ", 1)[1], {}).setdefault(score, []).append(other)
    return REFUSED + "".join(
        f"- {why}: " + "; ".join(f"`{score}` with {', '.join(others)}" for score, others in found.items()) + ".\n"
        for why, found in reasons.items()
    )


if __name__ == "__main__":
    (Path(__file__).parent / "methods.md").write_text(table() + refused())
