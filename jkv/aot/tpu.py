"""Compilation for TPUs without a TPU: the real compiler, from the libtpu wheel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from jkv.utils.optional_deps import install

# HBM bytes per device, as stated by the vendor; a tpu7x chip has two devices.
CHIPS = {"v4": 32 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30, "tpu7x": 96 * 2**30}
RATES = {  # per device: bfloat16 FLOP/s, bytes/s
    "v4": (275e12, 1228e9),
    "v5e": (197e12, 819e9),
    "v5p": (459e12, 2765e9),
    "v6e": (918e12, 1640e9),
    "tpu7x": (1153e12, 3690e9),
}
ARRAY = 2 * 128 * 128  # FLOP per cycle of a 128 x 128 matrix unit
PER_CYCLE = {"v4": 8 * ARRAY, "v5e": 4 * ARRAY, "v5p": 8 * ARRAY, "v6e": 16 * ARRAY, "tpu7x": 16 * ARRAY}


def devices(topology: str) -> list[Any]:
    """Return the devices of a topology.

    Args:
        topology: a chip and its grid, such as v5e:2x4 or v5p:2x2x1.

    Raises:
        ValueError: an unknown topology, or libtpu is missing.
    """
    chip, _, grid = topology.partition(":")
    if chip not in CHIPS or ":" not in topology:
        raise ValueError(f"topology {topology!r}: a chip and its grid, such as v5e:2x4; chips are {', '.join(CHIPS)}")
    if find_spec("libtpu") is None:
        raise ValueError(f"compiling for a TPU needs its compiler, the libtpu wheel; {install('tpu-aot')}")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not query the cloud metadata server: this is no TPU machine
    from jax.experimental import topologies

    alone = {"chips_per_host_bounds": (1, 1, 1)} if set(grid.split("x")) == {"1"} else {}  # else 4 chips per host
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **alone).devices)
    except Exception as error:
        raise ValueError(f"topology {topology!r}: {error}") from None


def dump_schedules(folder: str | Path) -> None:
    """Make the compiler write its final schedules to a folder. Call it before libtpu is first loaded."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
    )


class Block(NamedTuple):
    """A straight-line block of a schedule. A bundle is one cycle; empty bundles are latency.

    Attributes:
        opens: a loop starts with it.
        depth: number of enclosing loops.
        cycles: its bundles.
    """

    opens: bool  # a loop starts with it
    depth: int  # enclosing loops
    cycles: int


def blocks(schedule: Path) -> list[Block]:
    """Parse the blocks of a schedule, in order.

    A loop ends at a label, because the compiler omits the loop marks in some bundles inside.
    """
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
    """Return the cycles of the largest block, which is what one grid step of a kernel computes."""
    return max(x.cycles for x in found)


def loop(found: list[Block]) -> int:
    """Return the cycles of one iteration of the loop around the largest block, with every branch taken.

    >>> loop([Block(False, 0, 9), Block(True, 1, 20), Block(True, 1, 3), Block(False, 1, 50), Block(False, 0, 7)])
    53
    """
    at = max(range(len(found)), key=lambda i: found[i].cycles)
    begin = next(i for i in range(at, -1, -1) if i == 0 or found[i].opens)
    inside = takewhile(lambda x: x.depth >= found[at].depth, found[begin:])
    return sum(x.cycles for x in inside)


def kernel_cycles(folder: str | Path, name: str, count: Callable[[list[Block]], int]) -> int:
    """Return the cycles of a kernel, from its newest schedule.

    A static count that excludes memory traffic: a step takes this or the time of its bytes, whichever is longer.

    Args:
        folder: folder of the schedules.
        name: name of the kernel.
        count: `largest` or `loop`.
    """
    found = sorted(Path(folder).glob(f"*{name}*-01-packed-bundles-post-ra*"))
    if not found:
        raise FileNotFoundError(f"{folder} has no schedule of a kernel {name}")
    return count(blocks(found[-1]))


def kernel_memory(text: str, name: str) -> int:
    """Return the VMEM bytes of one kernel call: operand blocks and scratch.

    Args:
        text: text of the compiled program.
        name: name of the kernel.

    >>> line = '%x = f32[8] custom-call(), op_name="name/pallas_call", "used_scoped_memory_configs":[{"size":"4096"}]'
    >>> kernel_memory(line, "name")
    4096
    """
    calls = [line for line in text.splitlines() if "custom-call(" in line and f"{name}/pallas_call" in line]
    if not calls:
        raise ValueError(f"the program has no kernel {name}")
    found = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', calls[0])
    return int(found[1]) if found else 0
