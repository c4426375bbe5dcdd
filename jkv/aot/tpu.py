"""Compile-only TPUs: the real TPU compiler, from the libtpu wheel, on a machine that has none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from jkv.utils.optional_deps import install

# HBM bytes of a device, as the vendor states them; tpu7x shows two devices a chip.
CHIPS = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30, "tpu7x": 96 * 2**30}
RATES = {  # of a device: FLOP a second in bfloat16, bytes a second
    "v4": (275e12, 1228e9),
    "v5e": (197e12, 819e9),
    "v5p": (459e12, 2765e9),
    "v6e": (918e12, 1640e9),
    "tpu7x": (1153e12, 3690e9),
}
ARRAY = 2 * 128 * 128  # FLOP of a matrix unit of 128 rows and columns in a cycle
PER_CYCLE = {"v4": 8 * ARRAY, "v5e": 4 * ARRAY, "v5p": 8 * ARRAY, "v6e": 16 * ARRAY, "tpu7x": 16 * ARRAY}


def devices(topology: str) -> list[Any]:
    """The devices of a topology such as v5e:2x4 or v5p:2x2x1; ValueError without libtpu, or if unknown."""
    chip, _, grid = topology.partition(":")
    if chip not in CHIPS or ":" not in topology:
        raise ValueError(f"topology {topology!r}: a chip and its grid, such as v5e:2x4; chips are {', '.join(CHIPS)}")
    if find_spec("libtpu") is None:
        raise ValueError(f"compiling for a TPU needs its compiler, the libtpu wheel; {install('tpu-aot')}")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no cloud about a machine that is not one
    from jax.experimental import topologies

    alone = {"chips_per_host_bounds": (1, 1, 1)} if set(grid.split("x")) == {"1"} else {}  # else hosts of four
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **alone).devices)
    except Exception as error:
        raise ValueError(f"topology {topology!r}: {error}") from None


def dump_schedules(folder: str | Path) -> None:
    """From now on the compiler writes its final schedules there; only before it is first loaded."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
    )


class Block(NamedTuple):
    """A straight-line block of a schedule: one bundle is one cycle, empty ones are latency."""

    opens: bool  # a loop begins with it
    depth: int  # loops around it
    cycles: int


def blocks(schedule: Path) -> list[Block]:
    """Of a schedule, in order. A loop ends at a label: the compiler leaves the marks out of some bundles inside."""
    line_of = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*((?:> ?)*)\s*\{")
    depth, out = 0, list[Block]()
    for line in schedule.read_text().splitlines():
        hit = line_of.match(line)
        if hit is None:
            continue
        now = max(hit[2].count(">"), 0 if hit[1] else depth)
        if hit[1] or now != depth or not out:
            out.append(Block(hit[1] == "LB", now, 0))
        depth = now
        out[-1] = out[-1]._replace(cycles=out[-1].cycles + 1)
    return out


def largest(found: list[Block]) -> int:
    """Cycles of the largest block: what one grid step of a kernel computes."""
    return max(x.cycles for x in found)


def loop(found: list[Block]) -> int:
    """Cycles of one iteration of the loop that the largest block is in, every branch taken.

    >>> loop([Block(False, 0, 9), Block(True, 1, 20), Block(True, 1, 3), Block(False, 1, 50), Block(False, 0, 7)])
    53
    """
    at = max(range(len(found)), key=lambda i: found[i].cycles)
    begin = next(i for i in range(at, -1, -1) if i == 0 or found[i].opens)
    inside = takewhile(lambda x: x.depth >= found[at].depth, found[begin:])
    return sum(x.cycles for x in inside)


def kernel_cycles(folder: str | Path, name: str, count: Callable[[list[Block]], int]) -> int:
    """Cycles of a kernel by its newest schedule, `largest` or those of a `loop`.

    Static: memory is not in it, so a step takes this or the time of its bytes, whichever is more.
    """
    found = sorted(Path(folder).glob(f"*{name}*-01-packed-bundles-post-ra*"))
    if not found:
        raise FileNotFoundError(f"{folder} has no schedule of a kernel {name}")
    return count(blocks(found[-1]))


def kernel_memory(text: str, name: str) -> int:
    """Bytes of VMEM that one call of a kernel takes, its operands' blocks and scratch, from a compiled program's text.

    >>> line = '%x = f32[8] custom-call(), op_name="name/pallas_call", "used_scoped_memory_configs":[{"size":"4096"}]'
    >>> kernel_memory(line, "name")
    4096
    """
    calls = [line for line in text.splitlines() if "custom-call(" in line and f"{name}/pallas_call" in line]
    if not calls:
        raise ValueError(f"the program has no kernel {name}")
    found = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', calls[0])
    return int(found[1]) if found else 0
