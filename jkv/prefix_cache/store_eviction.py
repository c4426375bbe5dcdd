"""Eviction policies of the store: least recently used, or least likely to be reused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jkv.io import array_file
from jkv.io.errors import FormatError

LEARNED = "lpc:"  # prefix of a policy's text; the predictor's file follows
WORDS, LAST = 1 << 12, 64  # buckets of hashed token pairs; tokens at a prompt's end that are hashed
AT_ONCE = 32  # 1 / AT_ONCE of the store is freed at once when it is full
SURE = 0.999  # upper bound on odds, because certain records would never be evicted
WHERE = 1 << 20  # a pair's hash is (WHERE a + b) mod a prime, mod WORDS


class Entry(NamedTuple):
    """A stored record, as eviction sees it.

    Attributes:
        name: its name.
        parent: name of its predecessor; "": none.
        used: time of last use, in nanoseconds.
        odds: probability that the conversation which used it continues.
    """

    name: str
    parent: str
    used: int
    odds: float


class Evict:
    """Least recently used first. A record's predecessors count as used after it, so they outlive it."""

    learns: bool = False  # whether it uses `odds`

    def odds(self, ids: Sequence[int]) -> float:
        """Return the probability that a prompt becomes the prefix of another one."""
        return 1.0

    def order(self, entries: Iterable[Entry], now: int) -> list[str]:
        """Return the names in order of eviction.

        Args:
            now: current time in nanoseconds.
        """
        return [x.name for x in sorted(entries, key=lambda x: (x.used, x.name))]


@dataclass(frozen=True, eq=False)
class Learned(Evict):
    """Least likely to continue first (LPC, Learned Prefix Caching, NeurIPS 2025).

    The probability that a conversation continues is p S(dt) / (p S(dt) + 1 - p), where S is the share of pauses longer
    than dt, the time since last use. A record shared by several conversations takes the largest probability. p comes
    from a small network over hashed pairs of a prompt's last tokens, and its length. A reconstruction from the
    abstract: predictor and formula are our own.

    Attributes:
        arrays: pairs f32[WORDS,N], size f32[N], bias f32[N], out f32[N], base f32[1]; pauses f32[n], seconds in rising
            order.
    """

    arrays: Mapping[str, np.ndarray]
    learns = True

    @classmethod
    def load(cls, path: str | Path) -> Learned:
        """Load the predictor that `jkv train lpc` wrote; FormatError for any other file, shapes or numbers."""
        arrays, meta = array_file.read(Path(path).expanduser())
        if meta.get("kind") != "lpc":
            raise FormatError(Path(path), "it is no predictor of conversations", "make one: jkv train lpc")
        if why := fault(arrays):
            raise FormatError(Path(path), why, "make it again: jkv train lpc")
        return cls(arrays)

    def odds(self, ids: Sequence[int]) -> float:
        """Return p, the network's probability that the conversation of a prompt continues."""
        w = self.arrays
        seen = w["pairs"][pairs(ids)].mean(0) + size(ids) * w["size"] + w["bias"]
        logit = float(np.maximum(seen, 0) @ w["out"] + w["base"][0])
        return 1 / (1 + float(np.exp(-max(logit, -700.0))))  # exp overflows beyond

    def alive(self, odds: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Return f64[n], the probability that conversations continue after pauses of `seconds`; odds are capped."""
        pauses = self.arrays["pauses"]
        longer = (len(pauses) - np.searchsorted(pauses, seconds, "right") + 1) / (len(pauses) + 1)
        odds = np.minimum(odds, SURE)
        return odds * longer / (odds * longer + 1 - odds)

    def order(self, entries: Iterable[Entry], now: int) -> list[str]:
        """Return the names in order of eviction."""
        entries = sorted(entries, key=lambda x: (x.used, x.name))  # successors before predecessors
        since = np.array([max(now - x.used, 0) for x in entries]) / 1e9
        own = self.alive(np.array([x.odds for x in entries]), since)
        worth: dict[str, float] = {}
        for x, value in zip(entries, own, strict=True):
            worth[x.name] = max(value, worth.get(x.name, 0.0))
            worth[x.parent] = max(worth.get(x.parent, 0.0), worth[x.name])
        return sorted((x.name for x in entries), key=worth.__getitem__)  # ties: oldest first


def fault(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the error in a predictor's arrays, or "".

    >>> fault({"pairs": np.zeros((WORDS, 2), np.float32)})
    'it has the arrays pairs, and a predictor base, bias, out, pairs, pauses, size'
    """
    width = arrays["bias"].size if "bias" in arrays else 0
    shapes = {"base": (1,), "pairs": (WORDS, width), "pauses": None} | dict.fromkeys(("bias", "out", "size"), (width,))
    if {*arrays} != {*shapes}:
        return f"it has the arrays {', '.join(sorted(arrays)) or 'none'}, and a predictor {', '.join(sorted(shapes))}"
    for name, shape in shapes.items():
        x = arrays[name]
        if x.dtype != np.float32 or (x.ndim != 1 if shape is None else x.shape != shape) or not x.size:
            want = ",".join(map(str, shape or ("n",)))
            return f"{name} is {x.dtype}{list(x.shape)}, and of a predictor float32[{want}]"
        if not np.isfinite(x).all():
            return f"{name} has numbers that are not finite"
    if arrays["pauses"][0] < 0 or (np.diff(arrays["pauses"]) < 0).any():
        return "its pauses are not in order, from 0 on"
    return ""


def pairs(ids: Sequence[int]) -> np.ndarray:
    """Return i64[n], the hash buckets of the pairs of last tokens."""
    last = np.asarray([0, *ids[-LAST:]], np.int64)
    return (last[:-1] * WHERE + last[1:]) % 2147483647 % WORDS


def size(ids: Sequence[int]) -> float:
    """Return the predictor's feature of a prompt's length."""
    return log2(len(ids) + 1) / 2 - 5


def policy(text: str) -> Evict:
    """Parse an eviction policy: "lru", or "lpc:FILE"; ValueError for anything else.

    >>> policy("lru").order([Entry("b", "a", 1, 1.0), Entry("a", "", 2, 1.0)], 3)
    ['b', 'a']
    """
    if text == "lru":
        return Evict()
    if text.startswith(LEARNED) and text != LEARNED:
        return Learned.load(text.removeprefix(LEARNED))
    told = ": it knows what will be asked, which jkv eval store replays" if text == "belady" else ""
    raise ValueError(f"evict={text!r}{told}: give lru, or lpc:FILE, of jkv train lpc")
