"""Groups of tokens that are coded together, and groups of channels that share a scale."""

from __future__ import annotations

from jkv.arrays.pytree import part
from jkv.protocols import Codec


class Widest(int):
    """Default number of channels that share a scale: the largest divisor of a head's width up to this number.

    >>> [Widest(32).of(dim) for dim in (16, 64, 80, 100)]
    [16, 32, 20, 25]
    """

    def of(self, dim: int) -> int:
        return max(g for g in range(1, min(self, dim) + 1) if dim % g == 0)


def shared(group: int, dim: int) -> int:
    """Channels of `dim` that share a scale: `group` as given (0: all), or the divisor that a `Widest` default picks.

    A given group need not divide `dim`.

    >>> shared(32, 80), shared(32, 16), shared(0, 80), shared(Widest(32), 80)
    (32, 16, 80, 20)
    """
    return group.of(dim) if isinstance(group, Widest) else min(group or dim, dim)


@part
class Grouped(Codec):
    """A codec of `group` tokens that are coded, moved and dropped together (grain = group)."""

    group: int = 32

    @property
    def grain(self) -> int:  # a class attribute in most codecs
        return self.group

    def check(self, dim: int) -> None:
        if self.group < 1:
            kind = type(self).__name__.lower()
            raise ValueError(f"{kind} codec: group={self.group}; tokens that share a scale, such as group=32")
