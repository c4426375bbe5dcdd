"""Sizes: how many tokens a user asks for, in one of three forms; by itself, what every layer and head keeps.

Host integers for shapes, a limit per row for what is used of them. `divisions.py` divides a size among layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.gather import per
from jkv.arrays.tree import part
from jkv.protocols import Budget

Share = Callable[[int, int, int], int]  # of tokens, the most that can be held of a row, and the most of all rows
KNOTS = 64  # numbers of tokens for which a division of a fraction is worked out; between them it is a line


class Size(Budget):
    """How much a user asks for. tokens: the number of them, where that is known before a text is."""

    tokens: int | None = None

    def above(self, name: str, least: int, what: str) -> Self:
        """This size for a method that keeps `least` tokens in any case and needs one more; ValueError if it has not."""
        return self.at_least(least + 1)

    def at_least(self, tokens: int) -> Self:
        """This size, and where it is a fraction no fewer than so many tokens."""
        return self

    def of(self, size: Budget) -> Budget:
        return size

    def count(self, seen: int) -> int:
        """Tokens of a row that has seen so many, as `limit` has it."""
        raise NotImplementedError  # of those that are numbers of tokens

    def divided_by(self, share: Share, longest: int) -> Budget:
        """What `share` gives a layer of this size; itself as long as it is no number of tokens."""
        return self


@part
class All(Size):
    """Every token."""

    bounded = False

    def count(self, seen: int) -> int:
        return seen

    def capacity(self, longest: int) -> int:
        return longest


@part
class Tokens(Size):
    """The same number of tokens in every layer and head, recent window included."""

    tokens: int

    def above(self, name: str, least: int, what: str) -> Self:
        if self.tokens <= least:
            raise ValueError(
                f"{name}: budget={self.tokens} must exceed {what} of {least} tokens; take budget={least + 1} or more, "
                "or lower the other"
            )
        return self

    def count(self, seen: int) -> int:
        return self.tokens

    def capacity(self, longest: int) -> int:
        return self.tokens

    def divided_by(self, share: Share, longest: int) -> Budget:
        return Tokens(tokens=share(self.tokens, longest, self.tokens))


@part
class Bytes(Size):
    """As many tokens as fit into so many bytes, everything counted; the same in every layer and head."""

    bytes: int
    least: int = 1

    def above(self, name: str, least: int, what: str) -> Self:
        return replace(self, least=max(self.least, least + 1))

    def fit(self, cost: Callable[[Budget], int], least: Callable[[], int], longest: int) -> Budget:
        low, high = min(max(self.least, least()), longest), longest
        if (needed := cost(Tokens(tokens=low))) > self.bytes:
            raise ValueError(
                f"bytes={self.bytes}: the smallest cache here, of {low} tokens, takes {needed} bytes; take "
                f"bytes={needed} or more, fewer rows, or a smaller recent= and block="
            )
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(Tokens(tokens=middle)) <= self.bytes else (low, middle - 1)
        return Tokens(tokens=low)

    def capacity(self, longest: int) -> int:
        return longest  # until `fit` has said how many


def read_bytes(text: str | int) -> int:
    """Bytes of "2GiB", "300 MB", "4096" or 4096; ValueError for anything else.

    >>> read_bytes("2GiB"), read_bytes("1.5 kB")
    (2147483648, 1500)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kKMGT]?)(i?)B?\s*", str(text))
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is None or number <= 0:
        raise ValueError(f"bytes={text!r}: give a number with a unit, such as bytes='2GiB' or bytes='300MB'")
    power = "kMGT".find(match[2].replace("K", "k")) + 1 if match[2] else 0
    return int(number * (1024 if match[3] else 1000) ** power)


@part
class Keep(Size):
    """A fraction of the tokens that a row has seen: floor(keep * seen), row by row, but no fewer than `least`."""

    keep: float
    least: int = 0

    def at_least(self, tokens: int) -> Self:
        return replace(self, least=max(self.least, tokens))

    def count(self, seen: int) -> int:
        return max(int(np.float32(self.keep) * np.float32(seen)), self.least)

    def capacity(self, longest: int) -> int:
        return min(self.count(longest), longest)

    def limit(self, capacity: int, seen: Array, prompt: Array, share: Array | None) -> Array:
        return jnp.maximum(jnp.floor(self.keep * seen.astype(jnp.float32)).astype(jnp.int32), self.least)

    def divided_by(self, share: Share, longest: int) -> Budget:
        top = self.capacity(longest)
        step = max(-(-top // KNOTS), 1)
        knots = [top - step * i for i in range(top // step, -1, -1)]
        shares = np.array([share(n, min(ceil(n / self.keep), longest), top) for n in knots])
        falls = np.minimum.accumulate(shares[::-1])[::-1]  # what a layer was given is never taken back
        return Line(size=self, first=knots[0], step=step, shares=tuple(falls.tolist()))


@part
class Line(Budget):
    """A layer's share of a fraction: `shares` of first, first + step, ... tokens, and between them a line."""

    size: Keep
    first: int
    step: int
    shares: tuple[int, ...]

    def capacity(self, longest: int) -> int:
        return self.shares[-1]

    def limit(self, capacity: int, seen: Array, prompt: Array, share: Array | None) -> Array:
        shares = jnp.asarray((*self.shares, self.shares[-1]), jnp.int32)
        n = self.size.limit(capacity, seen, prompt, share) - self.first
        n = jnp.clip(n, 0, self.step * (len(self.shares) - 1))
        at = per(n, self.step)
        low, high = shares[at], shares[at + 1]
        return low + per((high - low) * (n - at * self.step), self.step)


def at_most(most: int, budget: int | None, part: int) -> int:
    """A paper's number of tokens, or that part of a budget in tokens where it is small."""
    return most if budget is None else min(most, max(budget // part, 1))
