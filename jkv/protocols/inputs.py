"""Inputs that a method declares, and the values that the runtime passes for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, Literal

from jax import Array

from jkv.arrays.pytree import static, value

Columns = dict[str, Array]  # f32[B,H,S] each: numbers that a score stores per token; they move with the token


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Inputs that a method needs from the runtime; others are not computed.

    Attributes:
        queries: number of newest queries kept over a flush (`Evidence.kept`).
        recent: newest tokens that the score cannot rank yet; the recent window holds at least this many.
        new: all queries since the last flush (`Evidence.new`).
        prompt: all queries of a prompt or chunk (`Evidence.new`), but only the newest `queries` while generating.
        chunks: whether a prompt may be prefilled in chunks: "any" gives the same result as the whole prompt, "own"
            means that chunks are part of the method, "none" is refused.
        layer: lower layer whose cache the score reads (`Evidence.lower`); -1 for the one directly below, None for none.
    """

    queries: int = 0
    recent: int = 0
    new: bool = False
    prompt: bool = False
    chunks: Literal["any", "own", "none"] = "any"
    layer: int | None = None

    def __or__(self, other: Needs) -> Needs:
        """Combine the needs of two methods; ValueError if they read different lower layers."""
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
    """New tokens of one layer, at the moment their keys and values are computed.

    Attributes:
        x: f[B,T,E], the layer's normed input.
        k: [B,H,T,D] rotated keys.
        v: [B,H,T,Dv] values.
        pos: i32[B,T] positions, -1 dead.
        ids: i32[B,T] token ids, -1 dead.
        out: f[E,H*G*Dv], the layer's attention output projection.
        step: True for generated tokens, one per row; False for a prompt's.
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
    """Number of tokens of each row, i32[B].

    Attributes:
        seen: all tokens.
        prompt: tokens of the prompt.
        later: tokens given after the prompt (`extend`). The remaining ones are generated.
    """

    seen: Array
    prompt: Array
    later: Array

    @property
    def generated(self) -> Array:
        """Generated tokens, i32[B]."""
        return self.seen - self.prompt - self.later

    def given(self, n: Array, later: bool) -> Counts:
        """Count n i32[B] more tokens: of text after the prompt if `later`, else of the prompt."""
        more = {"later": self.later + n} if later else {"prompt": self.prompt + n}
        return replace(self, seen=self.seen + n, **more)


def needs_of(*parts: Any) -> Needs:
    """Combine the needs of all scores, merges, selectors and codecs that are not None."""
    return reduce(or_, (part.needs for part in parts if part is not None), Needs())
