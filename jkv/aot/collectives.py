"""What the devices of a mesh send each other, read from the text of a compiled program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from rich import box
from rich.table import Table

PLACES = ("step", "flush", "once")  # the first two are named scopes of the programs
KIND = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all|collective-broadcast"
MESSAGE = re.compile(rf" = (.*?) ({KIND})(-start)?\(")
ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|called_computations|branch_computations)=\{?(%[^,\s}]+(?:, %[^,\s}]+)*)"
)
TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True, kw_only=True)
class Collective:
    """`count` messages of one kind and shape in each step, in each flush, or once in a call; bytes: of all of them.

    The bytes are those of the results on one device.
    """

    place: str
    kind: str
    shape: str
    count: int
    bytes: int


def collectives(text: str) -> tuple[Collective, ...]:
    """The messages of a program's optimised HLO, those of each step first, the large ones first.

    >>> body = '  %a = f32[8,64]{1,0:T(8,128)} all-reduce(%b), metadata={op_name="jit(f)/while/body/step/dot"}'
    >>> collectives("\\n".join(["ENTRY %main (x: f32[8,64]) -> f32[8,64] {", body, "}"]))
    (Collective(place='step', kind='all-reduce', shape='f32[8,64]', count=1, bytes=2048),)
    """
    count: Counter[tuple[str, str, str]] = Counter()
    size: dict[tuple[str, str, str], int] = {}
    for place, turns, line in lines(text):
        if (hit := MESSAGE.search(line)) is None:
            continue
        arrays = [(x[0], _bytes(x)) for x in ARRAY.finditer(hit[1])]
        if hit[3] and hit[2] != "all-reduce":  # the start of an asynchronous message also names what it is given
            arrays = [max(arrays, key=lambda x: x[1])]
        key = place, hit[2], ", ".join(name for name, _ in arrays)
        count[key] += turns
        size[key] = sum(n for _, n in arrays)
    made = [Collective(place=p, kind=k, shape=s, count=n, bytes=n * size[p, k, s]) for (p, k, s), n in count.items()]
    return tuple(sorted(made, key=lambda x: (PLACES.index(x.place), -x.bytes, x.kind, x.shape)))


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of every computation by its name; that of the entry is ''."""
    out: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            lines = out.setdefault("" if line.startswith("ENTRY") else line.split()[0], [])
        else:
            lines.append(line)
    return out


def lines(text: str) -> Iterator[tuple[str, int, str]]:
    """Every line of a program where it is called: its place, and how often a loop of known length runs it."""
    computations = _computations(text)
    waiting = [("", "once", 1)]
    while waiting:
        name, place, turns = waiting.pop()
        for line in computations.get(name, ()):
            own = _place(line) or place
            yield own, turns, line
            times = int(found[1]) if (found := TURNS.search(line)) else 1
            for called in CALLED.findall(line):
                waiting += [(x, own, turns * times) for x in called.split(", ")]


def _place(line: str) -> str | None:
    name = re.search(r'op_name="([^"]*)"', line)
    return next((p for p in PLACES if name and f"/{p}/" in name[1]), None)


def _bytes(array: re.Match[str]) -> int:
    bits = int(array[2] or 8)  # a truth value takes a byte
    return prod(map(int, filter(None, array[3].split(",")))) * bits // 8


def table(found: Sequence[tuple[str, str, Sequence[Collective]]]) -> Table:
    """Markdown, of (cache, program, its collectives): KiB on one device."""
    out = Table(box=box.MARKDOWN)
    for name in ("cache", "program", "in each", "kind", "of", "messages", "KiB"):
        out.add_column(name, justify="right" if name in ("messages", "KiB") else "left")
    for cache, program, messages in found:
        for x in messages:
            out.add_row(cache, program, x.place, x.kind, x.shape, f"{x.count:,}", f"{x.bytes / 2**10:,.1f}")
    return out
