"""The prefix cache's store: a folder of 64-token blocks of keys and values, shared by processes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from jkv.io import array_file
from jkv.prefix_cache.store_codec import Exact, Link, Record
from jkv.prefix_cache.store_codec import codec as codec_of
from jkv.prefix_cache.store_eviction import AT_ONCE, Entry, policy
from jkv.utils.file_locks import locked
from jkv.utils.validation import read_bytes

BLOCK = 64  # tokens per record
GRAIN = 16  # a sequence's last record may be partial, in multiples of these tokens
SUFFIX = ".kv"
HEADER = 1 << 11  # upper bound on a record's bytes besides its arrays
ODDS = ".odds.json"  # per record: its predecessor's name and a probability, for eviction policies that learn
BROKEN = OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError  # from a missing or foreign file

Held = Mapping[str, os.stat_result]  # records by name


def chain(root: str, ids: Sequence[int]) -> list[str]:
    """Return the names of the whole blocks of token ids: h_i = SHA-256(h_(i-1), block i), h_0 = root.

    Two prompts share the names of the blocks of their common prefix, and no others. A partial last block is left out.

    >>> a, b = chain("model", [1] * 128 + [2] * 64), chain("model", [1] * 128 + [3] * 70)
    >>> [x == y for x, y in zip(a, b)], chain("other", [1] * 64)[0] == a[0]
    ([True, True, False], False)
    """
    out, name = [], root
    for i in range(len(ids) // BLOCK):
        name = successor(name, ids[i * BLOCK : (i + 1) * BLOCK])
        out.append(name)
    return out


def successor(before: str, ids: Sequence[int]) -> str:
    """Return the name of the record of token ids that follows another record."""
    return hashlib.sha256(before.encode() + np.asarray(ids, "<i8").tobytes()).hexdigest()


class PrefixCache:
    """A prefix cache on disk: prompts with a cached prefix prefill only their remaining tokens.

    `jkv.generate(params, cache, prompt, store=store)` reads and writes it. A record is written atomically. A torn or
    foreign record is a miss and is deleted. A failed write is a RuntimeWarning, because the answer does not depend on
    it.

    Args:
        folder: shared by processes; created if missing.
        bytes: maximum size, such as "8GiB" or a number.
        evict: "lru": least recently used first, and the end of a prompt before its prefix. "lpc:FILE": first the
            records of conversations that are least likely to continue (`jkv train lpc`).
        salt: records are found only with the salt that they were stored with, which separates tenants.
        codec: "": exact keys and values. "cachegen(level=2)": quantized and entropy-coded; of a prompt that is found in
            part, that part's keys and values are rounded, and the rest is prefilled after them. "cachegen(within=2)":
            three levels of each record, chosen by the seconds given and the folder's speed.

    Attributes:
        reused: prompt tokens that this process has loaded.
        speed: bytes per second of the last record read; None: unknown.

    Raises:
        ValueError: for an empty folder name, or an unknown policy, codec or size.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = PrefixCache(folder, "10MB")
    ...     store.put("a model", [7] * 130, lambda i: {"k": np.full(2, i)})
    ...     [x["k"].tolist() for x in store.match("a model", [7] * 64 + [8] * 64)]
    [[0, 0]]
    """

    def __init__(
        self, folder: str | Path, bytes: int | str = "8GiB", evict: str = "lru", salt: str = "", codec: str = ""
    ) -> None:
        if not os.fspath(folder):
            raise ValueError("a store needs a folder, and an empty text is none; the current one is .")
        self.evict, self.codec = policy(evict), codec_of(codec)
        self.folder, self.bytes, self.salt = Path(folder).expanduser(), read_bytes(bytes), salt
        self.reused = 0
        self.speed: float | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    def match(self, root: str, ids: Sequence[int]) -> list[Record]:
        """Return the records of the longest stored prefix of token ids, including a partial last block.

        Args:
            root: identifies model, config and salt.
        """
        found: list[Record] = []
        # Whole blocks, up to the first missing one.
        names = self._names(root, ids[: len(ids) // BLOCK * BLOCK])
        there = [*itertools.takewhile(_held, map(self._sizes, names))]
        whole, tokens = len(there) * BLOCK, 0
        # The longest partial block after them.
        for n in range(min(whole + BLOCK - GRAIN, len(ids) // GRAIN * GRAIN), whole, -GRAIN):
            end = self._names(root, ids[:n])[-1]
            if _held(sizes := self._sizes(end)):
                names, there, tokens = [*names[: len(there)], end], [*there, sizes], n - whole
                break
        # Read the records, until one is unreadable or time is up.
        link = self.codec.link(len(there), self.speed)
        for forms, sizes in zip(names, there, strict=False):  # stored ones only
            if (record := self._next(forms, sizes, link)) is None:
                break
            found.append(record)
        self.speed = link.speed
        self._touch(names[: len(found)])
        self.reused += min(len(found) * BLOCK, whole + tokens)
        return found

    def _next(self, forms: Sequence[str], sizes: Sequence[int | None], link: Link) -> Record | None:
        """Read the next record in its best form that time allows and that is readable; None: prefill from here.

        Args:
            forms: names of the record's forms, the best first.
            sizes: bytes of each form; None: not stored.
            link: chooses forms by remaining time.
        """
        for i in link.choices(sizes):
            if (record := self._read(forms[i], self.codec.levels[i])) is not None:
                link.came(sizes[i] or 0)
                return record
        return None

    def put(
        self,
        root: str,
        ids: Sequence[int],
        make: Callable[[int], Record],
        start: int = 0,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """Write the records of token ids, as many as fit into the store.

        Args:
            root: identifies model, config and salt.
            ids: the last record may be partial, in multiples of GRAIN.
            make: returns the record of block i.
            start: first block to write; earlier ones are marked as used.
            prompt: the whole prompt, if `ids` is only its prefix.
        """
        names = self._names(root, ids)
        with self._writing():
            self._touch(names[:start])
            held = self._held()
            known = self._known(names, ids if prompt is None else prompt, held)
            new = [i for i in range(start, len(names)) if not held.keys() >= {*names[i]}]
            free = self.bytes - sum(x.st_size for x in held.values())
            # Write each missing record in all of its forms, evicting others if the store is full.
            for n, i in enumerate(new):
                record = make(i)
                forms = {name: level.encode(record) for name, level in zip(names[i], self.codec.levels, strict=True)}
                size = sum(x.nbytes for form in forms.values() for x in form.values()) + HEADER * len(forms)
                if free < size:  # for the following records too, of about the same size
                    free = self._make_room(size * (len(new) - n), {*itertools.chain(*names)}, self._held(), known)
                if free < size:
                    break
                free -= size
                for name, form in forms.items():
                    array_file.write(self._path(name), form, {"name": name})
            self._touch(names)

    def note(self, root: str, ids: Sequence[int], prompt: Sequence[int]) -> None:
        """Update a learned policy's odds for the stored prefix of a prompt, when nothing is written."""
        names = self._names(root, ids)
        if names and self.evict.learns:
            with self._writing():
                self._known(names, prompt, self._held())

    def _names(self, root: str, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Return the names of each block's forms, including a partial last block."""
        forms, rest = [], ids[len(ids) // BLOCK * BLOCK : len(ids) // GRAIN * GRAIN]
        for level in self.codec.levels:
            names = chain(level.name + root, ids)
            forms.append([*names, successor([level.name + root, *names][-1], rest)] if len(rest) else names)
        return list(zip(*forms, strict=True))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the folder against other processes; OSErrors become warnings."""
        try:
            with locked(self.folder / ".lock"):
                for path in self.folder.glob(".*.tmp"):  # left by killed writers; no one else holds the lock
                    path.unlink(missing_ok=True)
                yield
        except OSError as error:
            warnings.warn(f"the store {self.folder} could not take a prompt: {error}", RuntimeWarning, stacklevel=4)

    def _path(self, name: str) -> Path:
        """Return the path of a record."""
        return self.folder / f"{name}{SUFFIX}"

    def _sizes(self, forms: Sequence[str]) -> list[int | None]:
        """Return the bytes of each form of a record; None: not stored."""
        sizes: list[int | None] = [None] * len(forms)
        for i, name in enumerate(forms):
            with contextlib.suppress(OSError):
                sizes[i] = self._path(name).stat().st_size
        return sizes

    def _read(self, name: str, level: Exact) -> Record | None:
        """Read and decode a record; delete it and return None if it is damaged or has another name."""
        path = self._path(name)
        try:
            with array_file.opened(path) as (meta, names, read):
                if meta.get("name") == name:
                    return level.decode(read(names))
        except (KeyError, ValueError) as why:  # FormatError is a ValueError
            if isinstance(why.__cause__, OSError) or not path.exists():  # an I/O error does not prove damage
                return None
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def _touch(self, names: Sequence[tuple[str, ...]]) -> None:
        """Mark records as used, each block later than its successors, so that a prefix outlives what follows it."""
        now = time.time_ns()
        for i, forms in enumerate(names):
            for name in forms:
                with contextlib.suppress(OSError):
                    os.utime(self._path(name), ns=(now - i, now - i))

    def _held(self) -> Held:
        """Return the stored records with their sizes and times of last use."""
        held: dict[str, os.stat_result] = {}
        for entry in os.scandir(self.folder):
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    held[entry.name.removesuffix(SUFFIX)] = entry.stat()
        return held

    def _known(
        self, names: Sequence[tuple[str, ...]], prompt: Sequence[int], held: Held
    ) -> dict[str, tuple[str, float]]:
        """Return predecessor and odds of the stored records, updated for a prompt; {} if the policy does not learn."""
        if not self.evict.learns:
            return {}
        known: dict[str, tuple[str, float]] = {}
        with contextlib.suppress(*BROKEN):  # missing or torn: start without odds
            told = json.loads((self.folder / ODDS).read_text()).items()
            known = {x: (str(y), float(p)) for x, (y, p) in told if x in held and 0 <= float(p) <= 1}
        odds = self.evict.odds(prompt)
        for forms in zip(*names, strict=True):
            known |= {name: (before, odds) for before, name in zip(["", *forms], forms, strict=False)}
        temporary = self.folder / f"{ODDS}.tmp"
        temporary.write_text(json.dumps(known))
        os.replace(temporary, self.folder / ODDS)
        return known

    def _make_room(self, size: int, keep: set[str], held: Held, known: Mapping[str, tuple[str, float]]) -> int:
        """Evict records until `size` bytes are free, plus a little more to amortize, and return the free bytes.

        Args:
            keep: names that must stay.
            known: predecessor and odds by name. Records without odds, stored under another policy, get the mean.
        """
        free, freed = self.bytes - sum(x.st_size for x in held.values()), 0
        if free >= size:
            return free
        mean = fmean([p for _, p in known.values()] or [0.5])
        entries = []
        for name, seen in held.items():
            before, odds = known.get(name, ("", mean))
            entries.append(Entry(name, before, seen.st_mtime_ns, odds))
        for name in self.evict.order(entries, time.time_ns()):
            if name in keep:
                continue
            if free + freed >= size and freed + held[name].st_size > self.bytes // AT_ONCE:
                break
            self._path(name).unlink(missing_ok=True)
            freed += held[name].st_size
        return free + freed


def _held(sizes: Sequence[int | None]) -> bool:
    """Whether any form of a record is stored."""
    return any(x is not None for x in sizes)
