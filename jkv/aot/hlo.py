"""Parser for the text of compiled programs: operations, how often they run, and the compiler's cycle estimates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

PLACES = ("step", "flush", "once")  # the first two are named scopes in the programs
CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|called_computations|branch_computations)=\{?(%[^,\s}]+(?:, %[^,\s}]+)*)"
)
TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
CONDITION = re.compile(r"\bcondition=(%[^,\s]+)")
BELOW = re.compile(r"\sROOT .* compare\(%[^,\s]+, (%[^)\s]+)\), direction=LT")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def lines(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the lines of a program, once per call site.

    Yields:
        Place (one of PLACES), how often loops of known length run the line, and the line.
    """
    computations = _computations(text)
    waiting = [("", "once", 1)]
    while waiting:
        name, place, turns = waiting.pop()
        for line in computations.get(name, ()):
            own = _place(line) or place
            yield own, turns, line
            times = _turns(line, computations)
            for called in CALLED.findall(line):
                waiting += [(x, own, turns * times) for x in called.split(", ")]


def cycles(text: str) -> dict[str, int]:
    """Return the estimated cycles of each place, by the TPU compiler's schedule of its fusions.

    Pallas kernels and programs for CPUs have none.

    >>> line = '  %a = f32[8] fusion(%b), calls=%c, metadata={op_name="f/step/add"}, "estimated_cycles":"120"'
    >>> cycles("ENTRY %main () -> f32[8] {\\n" + line)
    {'step': 120}
    """
    out: Counter[str] = Counter()
    for place, turns, line in lines(text):
        if (found := CYCLES.search(line)) is not None:
            out[place] += turns * int(found[1])
    return dict(out)


def _computations(text: str) -> dict[str, list[str]]:
    """Split a program into computations: lines by name, "" for the entry."""
    out: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            lines = out.setdefault("" if line.startswith("ENTRY") else line.split()[0], [])
        else:
            lines.append(line)
    return out


def _turns(line: str, computations: Mapping[str, Sequence[str]]) -> int:
    """Return the trip count of the loop on this line, if stated or counted up to a constant; else 1."""
    if (known := TURNS.search(line)) is not None:
        return int(known[1])
    # Without a stated count, find the constant that the condition compares to.
    if (condition := CONDITION.search(line)) is None:
        return 1
    body = "\n".join(computations.get(condition[1], ()))
    if (limit := BELOW.search(body)) is None:
        return 1
    constant = re.search(rf"{re.escape(limit[1])} = .* constant\((\d+)\)", body)
    return 1 if constant is None else int(constant[1])


def _place(line: str) -> str | None:
    """Return the named scope of PLACES that a line is in, or None."""
    name = re.search(r'op_name="([^"]*)"', line)
    return next((p for p in PLACES if name and f"/{p}/" in name[1]), None)
