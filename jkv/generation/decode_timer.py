"""Decode speed without compilation and without the time that the caller of a stream takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jkv.core.compilation import Cost, compiling

LATE = 0.05  # share of a block's time that a caller may hold the stream without hiding the block's end


@dataclass
class Span:
    """The time of one block.

    Attributes:
        start: when it was dispatched, in seconds.
        held: seconds that the caller had held the stream by then.
        quiet: whether nothing was being compiled then.
        programs: programs that the generation had compiled by then.
        end: when it ended; None if it has not, or if nobody saw it end.
    """

    start: float
    held: float
    quiet: bool
    programs: int
    end: float | None = None


class DecodeTimer:
    """Times blocks, which the device runs one after the other, and counts those whose time is known.

    A block counts if nothing was being compiled while it ran, in this thread or another, and if its end was seen: the
    device goes on while the caller holds the newest piece of a stream.

    Attributes:
        seconds: time of the blocks that count.
        tokens: tokens of all rows in these blocks.
        held: seconds in which the caller held the stream.
    """

    def __init__(self, cost: Cost, clock: Callable[[], float] = time.perf_counter) -> None:
        self.cost, self.clock = cost, clock
        self.seconds, self.tokens, self.held = 0.0, 0, 0.0
        self.total = 0  # tokens of all blocks
        self.last: float | None = 0.0  # end of the block before; None if it was not seen

    def begin(self) -> Span:
        """Start a block; call it before the dispatch."""
        return Span(self.clock(), self.held, not compiling(), self.cost.programs)

    def dispatched(self, span: Span, out: Any) -> None:
        """Note that a block was dispatched, whose result is the array `out`; a small one may have ended by then."""
        if out.is_ready():
            span.end = self.clock()

    def wait(self, span: Span, out: Any) -> None:
        """Wait for a block's result."""
        if span.end is None:
            late = out.is_ready() and self.held - span.held > LATE * (self.clock() - span.start)
            jax.block_until_ready(out)
            span.end = None if late else self.clock()

    def take(self, span: Span, tokens: int) -> None:
        """Count a block that has ended.

        Args:
            tokens: generated tokens of all rows so far.
        """
        new, self.total = tokens - self.total, tokens
        quiet = span.quiet and not compiling() and self.cost.programs == span.programs
        if quiet and span.end is not None and self.last is not None:
            self.seconds += span.end - max(span.start, self.last)
            self.tokens += new
        self.last = span.end
