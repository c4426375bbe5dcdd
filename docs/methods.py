"""Writes docs/methods.md from the catalogue: `make docs`."""

from pathlib import Path

from jkv.methods import METHODS, pairs
from jkv.methods.catalogue import FAMILIES, family
from jkv.methods.registry import Method
from jkv.models import TINY, read_config

HEAD = """# Methods

Made from the catalogue by `make docs`. `jkv methods NAME` tells more of one: its arguments and their defaults, and its
parts with their equations. A line says what a method does and its paper; then how far the method is that of the paper,
bits of a number with 64 / 128 channels in each tier (scales and all included; plain floats as bfloat16), and what the
paper promises, in a setting of its own.
"""
REFUSED = """
## What does not go together

Every method that scores tokens goes with every one that codes or selects them, but for these:

"""


def table() -> str:
    """A heading a family, and three lines a method."""
    out = [HEAD]
    for heading, modules in FAMILIES.items():
        out.append(f"\n## {heading}\n")
        for r in (METHODS[name] for module in modules for name in family(module)):
            source = "" if r.paper == "-" else f" ({r.paper})"
            out += [f"\n**`{r.name}`**{source}: {' '.join(r.docstring.split())}\n", f"- here: {r.exactness}\n"]
            out += [f"- bits of a number: {bits(r)}\n"] if r.bits(64) else []
            out += [f"- promised: {r.claim}\n"] if r.claim else []
    return "".join(out)


def bits(r: Method) -> str:
    """What a number of keys and of values takes, by tier."""
    both = zip(r.bits(64), r.bits(128), strict=True)
    return "; ".join(f"keys {a:.3g} / {c:.3g}, values {b:.3g} / {d:.3g}" for (a, b), (c, d) in both)


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
