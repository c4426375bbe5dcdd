"""Collectives between the devices of a mesh, parsed from the text of a compiled program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rich import box
from rich.table import Table

from jkv.aot.hlo import PLACES, lines

KIND = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all|collective-broadcast"
MESSAGE = re.compile(rf" = (.*?) ({KIND})(-start)?\(")
ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collective operations of one kind and shape, summed over the place where they run.

    Attributes:
        place: "step" (each decode step), "flush" (each flush) or "once" (each call).
        kind: HLO operation, such as all-reduce.
        shape: result shapes on one device.
        count: number of operations.
        bytes: bytes of all their results on one device.
    """

    place: str
    kind: str
    shape: str
    count: int
    bytes: int


def collectives(text: str) -> tuple[Collective, ...]:
    """Parse the collectives in a program's optimized HLO.

    Returns:
        Collectives of each step first, then of flushes and calls; the largest first within each.

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
        if hit[3] and hit[2] != "all-reduce":  # an asynchronous start lists its operands too; keep the result
            arrays = [max(arrays, key=lambda x: x[1])]
        key = place, hit[2], ", ".join(name for name, _ in arrays)
        count[key] += turns
        size[key] = sum(n for _, n in arrays)
    made = [Collective(place=p, kind=k, shape=s, count=n, bytes=n * size[p, k, s]) for (p, k, s), n in count.items()]
    return tuple(sorted(made, key=lambda x: (PLACES.index(x.place), -x.bytes, x.kind, x.shape)))


def _bytes(array: re.Match[str]) -> int:
    """Return the bytes of an array from its matched HLO type."""
    bits = int(array[2] or 8)  # a pred takes a byte
    return prod(map(int, filter(None, array[3].split(",")))) * bits // 8


def table(found: Sequence[tuple[str, str, Sequence[Collective]]]) -> Table:
    """Format collectives as a Markdown table, in KiB per device.

    Args:
        found: cache config, program and its collectives.
    """
    out = Table(box=box.MARKDOWN)
    for name in ("cache", "program", "in each", "kind", "of", "messages", "KiB"):
        out.add_column(name, justify="right" if name in ("messages", "KiB") else "left")
    for cache, program, messages in found:
        for x in messages:
            out.add_row(cache, program, x.place, x.kind, x.shape, f"{x.count:,}", f"{x.bytes / 2**10:,.1f}")
    return out
