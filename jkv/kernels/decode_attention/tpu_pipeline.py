"""In which steps the TPU kernel reads a tier, and what it fetches for each while it computes the one before."""

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
    """Of the device that a program is made for: two on v5p, and on v4 where both are one; 1 where nobody knows."""
    try:
        return pltpu.get_tpu_info().num_cores
    except ValueError:
        return 1


@dataclass(frozen=True)
class Walk:
    """A step takes `tile` slots of a block of heads, which lie in `parts` places.

    A block is `heads` heads of `rows` rows each. ends: of each block the last live slot + 1; lists: where each head has
    one and is a block of its own, those places, in one line. A piece is what one core does of a block: all of it, or a
    share of its steps where the cores could not have equally many blocks.
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
        """Of each core."""
        return self.blocks * self.shares // self.cores

    def block(self, piece: Any) -> Any:
        return piece if self.shares == 1 else lax.rem(piece, self.blocks)

    def span(self, piece: Any, ends: Any) -> tuple[Any, Any]:
        """The first step of a piece, and the one after its last."""
        steps = lax.div(ends[self.block(piece)] + self.tile - 1, self.tile)
        if self.shares == 1:
            return jnp.int32(0), steps
        share = lax.div(piece, self.blocks)
        return lax.div(steps * share, self.shares), lax.div(steps * (share + 1), self.shares)

    def next_piece(self, piece: Any, stop: Any, ends: Any) -> Any:
        """The first from `piece` on that has steps; `stop` if none before it has."""

        def empty(at: Any) -> Any:
            begin, end = self.span(jnp.minimum(at, stop - 1), ends)
            return (at < stop) & (begin == end)

        return lax.while_loop(empty, lambda at: at + 1, piece)

    def start(self, i: Any, slots: int) -> Any:
        """The first slot of step i: the last step of all ends with the slots, and begins among those of another."""
        return i * self.tile if slots % self.tile == 0 else jnp.minimum(i * self.tile, slots - self.tile)

    def places(self, block: Any, i: Any, lists: Any) -> list[Any]:
        """The first slots of the parts of step i, by lists."""
        at = block * (lists.shape[0] // self.blocks) + i * self.parts
        return [lists[at + part] * (self.tile // self.parts) for part in range(self.parts)]


def shares(blocks: int, cores: int) -> int:
    """Parts of every block's steps, so that cores have equally much to do.

    >>> shares(8, 2), shares(1, 2), shares(3, 1)
    (1, 2, 1)
    """
    return cores if blocks % cores else 1


@dataclass(frozen=True)
class Moving:
    """An array [x,y,z] of which a step fetches `own` entries of the first axis, which `common` blocks have together,
    and along `axis` those of its tokens, one for `per` of them. listed: they lie where lists say."""

    array: Array
    axis: int
    per: int
    own: int
    common: int = 1
    listed: bool = False

    def buffers(self, tile: int) -> Any:
        """For two steps."""
        shape = [self.own, *self.array.shape[1:]]
        shape[self.axis] = tile // self.per
        return pltpu.VMEM((2, *shape), self.array.dtype)

    def copies(self, source: Any, target: Any, done: Any, block: Any, starts: list[Any], tile: int) -> Iterator[Any]:
        """Of the slots from each of `starts` on, one after the other into the target."""
        size = tile // len(starts) // self.per
        first = self.own * (block if self.common == 1 else lax.div(block, self.common))
        for part, start in enumerate(starts):
            entry = pl.multiple_of(lax.div(start, self.per), LANES if self.axis == 2 else STEPS)
            where: list[Any] = [pl.ds(first, self.own), slice(None), slice(None)]
            to: list[Any] = [slice(None)] * 3
            where[self.axis], to[self.axis] = pl.ds(entry, size), pl.ds(part * size, size)
            yield pltpu.make_async_copy(source.at[tuple(where)], target.at[tuple(to)], done)
