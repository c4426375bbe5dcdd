"""A trace of prompts through a store of any size, without a model: what the orders of eviction find again."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError
from jkv.io.load import read
from jkv.prefix_cache.store import BLOCK, chain
from jkv.prefix_cache.store_eviction import AT_ONCE, Entry, Evict, policy


@dataclass(frozen=True, eq=False)
class Visit:
    """A prompt: when it came, in seconds, its token ids, and the names of its whole blocks."""

    at: float
    ids: Sequence[int]
    names: tuple[str, ...]


def encoder(model: str) -> Callable[[Any], Sequence[int]]:
    """What makes token ids of a text or of chat messages, by the tokenizer of a model; ids stay as they are."""
    tokenizer = cache(lambda: read(model).tokenizer)  # loaded if there is text

    def encode(prompt: Any) -> Sequence[int]:
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError("give a text, chat messages or token ids")
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt
        own = tokenizer()
        if own is None:
            raise ValueError(f"{model} has no tokenizer: give token ids")
        return own.encode(prompt if isinstance(prompt, str) else own.chat(prompt))

    return encode


def trace(path: str | Path, encode: Callable[[Any], Sequence[int]]) -> list[Visit]:
    """A file of JSON lines {"time": seconds, "prompt": text, chat messages or token ids}, in order of time.

    FormatError names a line that is none, or that is older than the one before it.
    """
    path, out = Path(path).expanduser(), []
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(path, str(error), 'give JSON lines {"time": seconds, "prompt": ...}') from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            at, ids = float(row["time"]), [int(x) for x in encode(row["prompt"])]
        except (ValueError, KeyError, TypeError) as error:
            why = f"line {number} is no {{'time': seconds, 'prompt': ...}} ({error!r})"
            raise FormatError(path, why, "mend the line, or leave it out") from error
        if out and not at >= out[-1].at:
            raise FormatError(path, f"line {number} is older than the one before it", "sort the lines by time")
        out.append(Visit(at, ids, tuple(chain("", ids[:-1]))))
    if not out:
        raise FormatError(path, "it has no lines", "give a trace of prompts")
    return out


def moments(visits: Sequence[Visit]) -> list[int]:
    """When each came, in nanoseconds, rising: of those of one time the later one is later by more than its blocks.

    >>> moments([Visit(1e-6, [], ("a", "b")), Visit(1e-6, [], ("a", "b")), Visit(2e-6, [], ("a",))])
    [1000, 1003, 2000]
    """
    out: list[int] = []
    for x in visits:
        out.append(max(int(x.at * 1e9), out[-1] + len(x.names) + 1 if out else 0))
    return out


class Belady(Evict):
    """What is asked for latest, or never, goes first: no order finds more again, and none can know it beforehand."""

    def __init__(self, visits: Sequence[Visit]) -> None:
        self.comes: dict[str, list[int]] = {}
        for x, now in reversed([*zip(visits, moments(visits), strict=True)]):
            for name in x.names:
                self.comes.setdefault(name, []).append(now)

    def order(self, entries: Iterable[Entry], now: int) -> list[str]:
        def next_use(x: Entry) -> float:
            times = self.comes[x.name]
            while times and times[-1] <= now:
                times.pop()
            return times[-1] if times else float("inf")

        return [x.name for x in sorted(entries, key=lambda x: (-next_use(x), x.used))]


def order(text: str, visits: Sequence[Visit]) -> Evict:
    """The order of a text, as `Store` takes it, or "belady"."""
    return Belady(visits) if text == "belady" else policy(text)


def leading(names: Sequence[str], held: Container[str]) -> int:
    """How many first ones of the names are held.

    >>> leading(["a", "b", "c"], {"a", "c"}), leading([], set())
    (1, 0)
    """
    return next((i for i, name in enumerate(names) if name not in held), len(names))


def replay(visits: Sequence[Visit], evict: Evict, blocks: int) -> dict[str, Any]:
    """hits: the share of prompts' whole blocks that a store of so many blocks has when they come; tokens: that were
    found."""
    held: dict[str, Entry] = {}
    hits = total = 0
    for x, now in zip(visits, moments(visits), strict=True):
        odds = evict.odds(x.ids)
        n = leading(x.names, held)
        hits, total = hits + n, total + len(x.names)
        over = len(held) + len(x.names) - n - blocks
        if over > 0:
            mine, goes = {*x.names}, max(over, blocks // AT_ONCE)
            for name in [name for name in evict.order(held.values(), now) if name not in mine][:goes]:
                del held[name]
        for i, (before, name) in enumerate(zip(["", *x.names], x.names, strict=False)):
            if name in held or len(held) < blocks:
                held[name] = Entry(name, before, now - i, odds)
    return {"hits": round(hits / max(total, 1), 4), "tokens": hits * BLOCK}


def alike(sizes: Sequence[int], hits: Sequence[float], other: Sequence[float]) -> list[float | None]:
    """The size at which one order finds as much as another at each of `sizes`, as a share of that; None: at none.

    >>> alike([1, 2, 4], [0.2, 0.4, 0.6], [0.1, 0.3, 0.5])
    [None, 0.75, 0.75]
    """
    out: list[float | None] = []
    for size, want in zip(sizes, other, strict=True):
        inside = hits[0] <= want <= hits[-1]
        out.append(round(float(np.interp(want, hits, sizes)) / size, 3) if inside else None)
    return out


def continued(visits: Sequence[Visit]) -> np.ndarray:
    """bool[n]: whether the last whole block of each prompt is asked for again, later.

    >>> from dataclasses import replace
    >>> a, b = (Visit(t, [1] * n, tuple(chain("", [1] * (n - 1)))) for t, n in ((0.0, 70), (1.0, 200)))
    >>> continued([a, b, replace(a, at=2.0)]).tolist()
    [True, False, False]
    """
    last: dict[str, int] = {}
    for i, x in enumerate(visits):
        last |= dict.fromkeys(x.names, i)
    return np.array([bool(x.names) and last[x.names[-1]] > i for i, x in enumerate(visits)])


def pauses(visits: Sequence[Visit]) -> np.ndarray:
    """f32[n], rising: seconds from each prompt to the next one that has its last whole block."""
    waiting: dict[str, float] = {}
    out = []
    for x in visits:
        out += [x.at - waiting.pop(name) for name in x.names if name in waiting]
        if x.names:
            waiting[x.names[-1]] = x.at
    return np.sort(np.array(out, np.float32))


def rows(visits: Sequence[Visit], orders: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A row an order and size in blocks; `alike`: the size at which it finds as much as the first order does at this
    one, as a share of it."""
    found = [[replay(visits, order(text, visits), size) for size in sizes] for text in orders]
    hits = [[x["hits"] for x in some] for some in found]
    return [
        {"evict": text.split(":")[0], "blocks": size, **row, "alike": share}
        for text, some, own in zip(orders, found, hits, strict=True)
        for size, row, share in zip(sizes, some, alike(sizes, own, hits[0]), strict=True)
    ]
