"""The pipeline of the TPU kernel: the steps in which it reads a tier, and the copies that each step prefetches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels import STEPS
from jkv.kernels.decode_attention.tpu_operands import LANES


def device_cores() -> int:
    """Return the cores of the target device: 2 on v5p, and on v4 in megacore mode; 1 if unknown."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:
        return 1


@dataclass(frozen=True)
class Walk:
    """The order of steps: each step reads `tile` slots of a block of heads.

    A piece is one core's part of a block: all of it, or a share of its steps if the blocks do not divide evenly among
    the cores.

    Attributes:
        name: Name of the kernel.
        rows: Rows per block.
        heads: Heads per row of a block.
        tile: Slots per step.
        parts: Number of separate places where the slots of a step lie.
        cores: Cores of the device.
        ends: Last live slot + 1 of each block.
        lists: Places of the slots, all heads' lists concatenated, if each head is a block with a list; else None.
    """

    name: str
    rows: int
    heads: int
    tile: int
    parts: int
    cores: int
    ends: Array
    lists: Array | None = None

    @property
    def tables(self) -> tuple[Array, ...]:
        return (self.ends,) if self.lists is None else (self.ends, self.lists)

    @property
    def blocks(self) -> int:
        return self.ends.shape[0]

    @property
    def shares(self) -> int:
        return shares(self.blocks, self.cores)

    @property
    def pieces(self) -> int:
        """Pieces per core."""
        return self.blocks * self.shares // self.cores

    def block(self, piece: Any) -> Any:
        return piece if self.shares == 1 else lax.rem(piece, self.blocks)

    def span(self, piece: Any, ends: Any) -> tuple[Any, Any]:
        """Return the first step of a piece, and the one after its last."""
        steps = lax.div(ends[self.block(piece)] + self.tile - 1, self.tile)
        if self.shares == 1:
            return jnp.int32(0), steps
        share = lax.div(piece, self.blocks)
        return lax.div(steps * share, self.shares), lax.div(steps * (share + 1), self.shares)

    def next_piece(self, piece: Any, stop: Any, ends: Any) -> Any:
        """Return the first piece from `piece` on that has steps, or `stop` if no piece before it has any."""

        def empty(at: Any) -> Any:
            begin, end = self.span(jnp.minimum(at, stop - 1), ends)
            return (at < stop) & (begin == end)

        return lax.while_loop(empty, lambda at: at + 1, piece)

    def start(self, i: Any, slots: int) -> Any:
        """Return the first slot of step i. The last step ends at the last slot, and so may overlap the previous one."""
        return i * self.tile if slots % self.tile == 0 else jnp.minimum(i * self.tile, slots - self.tile)

    def places(self, block: Any, i: Any, lists: Any) -> list[Any]:
        """Return the first slot of each part of step i, from `lists`."""
        at = block * (lists.shape[0] // self.blocks) + i * self.parts
        return [lists[at + part] * (self.tile // self.parts) for part in range(self.parts)]


def shares(blocks: int, cores: int) -> int:
    """Return into how many shares each block's steps are split, so that all cores have equal work.

    >>> shares(8, 2), shares(1, 2), shares(3, 1)
    (1, 2, 1)
    """
    return cores if blocks % cores else 1


@dataclass(frozen=True)
class Moving:
    """An array [x,y,z] that is fetched step by step.

    Attributes:
        array: The array in HBM.
        axis: Token axis.
        per: Tokens per entry of this axis.
        own: Entries of the first axis that a step fetches.
        common: Consecutive blocks that share these entries.
        listed: Whether the tokens lie where the lists of the walk say.
    """

    array: Array
    axis: int
    per: int
    own: int
    common: int = 1
    listed: bool = False

    def buffers(self, tile: int) -> Any:
        """Allocate double buffers in VMEM."""
        shape = [self.own, *self.array.shape[1:]]
        shape[self.axis] = tile // self.per
        return pltpu.VMEM((2, *shape), self.array.dtype)

    def copies(self, source: Any, target: Any, done: Any, block: Any, starts: list[Any], tile: int) -> Iterator[Any]:
        """Yield the copies of the slots from each of `starts` on, concatenated in the target."""
        size = tile // len(starts) // self.per
        first = self.own * (block if self.common == 1 else lax.div(block, self.common))
        for part, start in enumerate(starts):
            entry = pl.multiple_of(lax.div(start, self.per), LANES if self.axis == 2 else STEPS)
            where: list[Any] = [pl.ds(first, self.own), slice(None), slice(None)]
            to: list[Any] = [slice(None)] * 3
            where[self.axis], to[self.axis] = pl.ds(entry, size), pl.ds(part * size, size)
            yield pltpu.make_async_copy(source.at[tuple(where)], target.at[tuple(to)], done)
