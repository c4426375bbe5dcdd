"""Codecs of several tokens at once."""

from __future__ import annotations

from jkv.arrays.tree import part
from jkv.protocols import Codec


@part
class Grouped(Codec):
    """A codec of `group` tokens that are coded, moved and dropped together (grain = group)."""

    group: int = 32

    @property
    def grain(self) -> int:  # a constant of most codecs
        return self.group

    def check(self, dim: int) -> None:
        if self.group < 1:
            kind = type(self).__name__.lower()
            raise ValueError(f"{kind} codec: group={self.group}; tokens that share a scale, such as group=32")
