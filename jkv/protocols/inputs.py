"""Inputs that a method needs from the runtime, and the values that it is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Literal

from jax import Array

from jkv.arrays.pytree import static, value

Columns = dict[str, Array]  # f32[B,H,S]: what a score remembers of a token; it travels with the token


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Inputs that a method needs from the runtime; others are not computed."""

    queries: int = 0  # kept after a flush: the newest n
    recent: int = 0  # newest tokens that it cannot rank yet: the recent window holds so many
    new: bool = False  # the queries since the last flush
    prompt: bool = False  # those of a prompt or a piece of it, as new ones; of what is generated the newest n alone
    chunks: Literal["any", "own", "none"] = "any"  # of a prompt: as good as the whole, part of the method, or refused
    layer: int | None = None  # the lower layer whose cache it reads, by number; -1: the one directly below

    def __or__(self, other: Needs) -> Needs:
        """Of both; ValueError for two lower layers."""
        cuts, layers = (self.chunks, other.chunks), {x for x in (self.layer, other.layer) if x is not None}
        if len(layers) > 1:
            raise ValueError(f"one score reads one lower layer, and {sorted(layers)} are asked for: keep one of them")
        return Needs(
            queries=max(self.queries, other.queries),
            recent=max(self.recent, other.recent),
            new=self.new or other.new,
            prompt=self.prompt or other.prompt,
            chunks="none" if "none" in cuts else "own" if "own" in cuts else "any",
            layer=next(iter(layers), None),
        )


@value
class Born:
    """New tokens of one layer: its normed input x f[B,T,E], k (rotated) [B,H,T,D], v [B,H,T,Dv]; pos and ids i32[B,T],
    -1 dead.

    out f[E,H G Dv]: the layer's matrix that heads go out by; step: they are generated, one a row; else a prompt's.
    """

    x: Array
    k: Array
    v: Array
    pos: Array
    ids: Array
    out: Array
    step: bool = static(default=False)


@value
class Counts:
    """Tokens i32[B] of each row: seen, of its prompt, and given after it (`extend`); the others are generated."""

    seen: Array
    prompt: Array
    later: Array

    @property
    def generated(self) -> Array:
        return self.seen - self.prompt - self.later

    def given(self, n: Array, later: bool) -> Counts:
        """After n i32[B] tokens more of the prompt, or of what is given after it."""
        more = {"later": self.later + n} if later else {"prompt": self.prompt + n}
        return replace(self, seen=self.seen + n, **more)


def needs_of(*parts: Any) -> Needs:
    """The needs of all scores, merges and selectors that are not None."""
    return reduce(or_, (part.needs for part in parts if part is not None), Needs())
