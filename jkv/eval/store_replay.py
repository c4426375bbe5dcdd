"""Replay of a request trace through a prefix cache of any size, without a model: hit rates of eviction policies."""

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
    """A request of a trace.

    Attributes:
        at: Arrival time in seconds.
        ids: Token ids of the prompt.
        names: Hashes of its whole blocks.
    """

    at: float
    ids: Sequence[int]
    names: tuple[str, ...]


def encoder(model: str) -> Callable[[Any], Sequence[int]]:
    """Return a function that tokenizes text or chat messages with a model's tokenizer; token ids pass through."""
    tokenizer = cache(lambda: read(model).tokenizer)  # loaded lazily: traces of token ids need none

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
    """Load a trace from JSON lines {"time": seconds, "prompt": text, chat messages or token ids}, ascending in time.

    Args:
        path: The file.
        encode: Converts a prompt to token ids.

    Raises:
        FormatError: A line is invalid or older than the one before it.
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
    """Return strictly ascending arrival times in nanoseconds; simultaneous requests are spread by their blocks.

    >>> moments([Visit(1e-6, [], ("a", "b")), Visit(1e-6, [], ("a", "b")), Visit(2e-6, [], ("a",))])
    [1000, 1003, 2000]
    """
    out: list[int] = []
    for x in visits:
        out.append(max(int(x.at * 1e9), out[-1] + len(x.names) + 1 if out else 0))
    return out


class Belady(Evict):
    """Belady's optimal eviction: the block with the latest next use first. An upper bound that needs the future."""

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
    """Build the eviction policy of a text, as `PrefixCache` takes it, or "belady"."""
    return Belady(visits) if text == "belady" else policy(text)


def leading(names: Sequence[str], held: Container[str]) -> int:
    """Count the leading names that are held.

    >>> leading(["a", "b", "c"], {"a", "c"}), leading([], set())
    (1, 0)
    """
    return next((i for i, name in enumerate(names) if name not in held), len(names))


def replay(visits: Sequence[Visit], evict: Evict, blocks: int) -> dict[str, Any]:
    """Replay a trace through a store of at most `blocks` blocks.

    Returns:
        `hits`, the share of the prompts' whole blocks found in the store on arrival; `tokens`, the tokens found.
    """
    held: dict[str, Entry] = {}
    hits = total = 0
    for x, now in zip(visits, moments(visits), strict=True):
        odds = evict.odds(x.ids)
        n = leading(x.names, held)
        hits, total = hits + n, total + len(x.names)
        # Evict in batches, as the store does, but no block of this prompt.
        over = len(held) + len(x.names) - n - blocks
        if over > 0:
            mine, goes = {*x.names}, max(over, blocks // AT_ONCE)
            for name in [name for name in evict.order(held.values(), now) if name not in mine][:goes]:
                del held[name]
        # Insert or touch this prompt's blocks; a parent counts as used after its child.
        for i, (before, name) in enumerate(zip(["", *x.names], x.names, strict=False)):
            if name in held or len(held) < blocks:
                held[name] = Entry(name, before, now - i, odds)
    return {"hits": round(hits / max(total, 1), 4), "tokens": hits * BLOCK}


def alike(sizes: Sequence[int], hits: Sequence[float], other: Sequence[float]) -> list[float | None]:
    """Return the size at which one policy finds as much as another at each size, as a fraction of that size.

    Args:
        sizes: Sizes of the store, ascending.
        hits: Hit rates of the policy at these sizes.
        other: Hit rates of the other policy.

    Returns:
        A fraction per size; None if no size in the range finds as much.

    >>> alike([1, 2, 4], [0.2, 0.4, 0.6], [0.1, 0.3, 0.5])
    [None, 0.75, 0.75]
    """
    out: list[float | None] = []
    for size, want in zip(sizes, other, strict=True):
        inside = hits[0] <= want <= hits[-1]
        out.append(round(float(np.interp(want, hits, sizes)) / size, 3) if inside else None)
    return out


def continued(visits: Sequence[Visit]) -> np.ndarray:
    """Return bool[n]: whether a later request has the last whole block of each prompt.

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
    """Return f32[n], ascending: seconds from a prompt to the next one with its last whole block."""
    waiting: dict[str, float] = {}
    out = []
    for x in visits:
        out += [x.at - waiting.pop(name) for name in x.names if name in waiting]
        if x.names:
            waiting[x.names[-1]] = x.at
    return np.sort(np.array(out, np.float32))


def rows(visits: Sequence[Visit], orders: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure eviction policies, one row per policy and size in blocks.

    `alike` is the size at which the policy finds as much as the first policy does at this size, as a fraction of it.
    """
    found = [[replay(visits, order(text, visits), size) for size in sizes] for text in orders]
    hits = [[x["hits"] for x in some] for some in found]
    return [
        {"evict": text.split(":")[0], "blocks": size, **row, "alike": share}
        for text, some, own in zip(orders, found, hits, strict=True)
        for size, row, share in zip(sizes, some, alike(sizes, own, hits[0]), strict=True)
    ]
