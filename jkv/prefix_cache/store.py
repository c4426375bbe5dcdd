"""A folder of what was read and said, in blocks of 64 tokens, which processes share: read once, not read again."""

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

BLOCK = 64  # tokens of a record
GRAIN = 16  # those of the last one of a text that ends inside of a block: so many, or two or three times as many
SUFFIX = ".kv"
HEADER = 1 << 11  # bytes of a record beside its arrays, at most
ODDS = ".odds.json"  # of records, where they are asked for: the name in front, and the probability
BROKEN = OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError  # of a file that is none of ours

Held = Mapping[str, os.stat_result]  # records, by name


def chain(root: str, ids: Sequence[int]) -> list[str]:
    """The names of whole blocks of token ids: h_i = SHA-256(h_(i-1), block i), h_0 = root; of what follows none.

    Two prompts share the names of the blocks that they begin with alike, and no others.

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
    """The name of a record of token ids that follow those of another record."""
    return hashlib.sha256(before.encode() + np.asarray(ids, "<i8").tobytes()).hexdigest()


class Store:
    """Blocks of texts in a folder, at most `bytes` of them ("8GiB" or a number), for prompts that begin alike.

    evict: "lru", what was used longest ago goes first, and the end of a prompt before its beginning; "lpc:FILE", what
    belongs to the conversations that are the least likely to go on (`jkv train lpc`). salt: of those who may share:
    what one tenant stored, another with another salt does not find. codec: "", keys and values as they are, or
    "cachegen(level=2)", rounded and entropy-coded: of a prompt that is found in part, keys and values of that part are
    rounded, and what follows is read behind them; "cachegen(within=2)", three levels of each, of which so many seconds
    and the folder's speed choose. A record is written whole or not at all; one that is torn, or somebody else's, is a
    miss, and is deleted. What cannot be written is a RuntimeWarning: the answer does not depend on it.

    `jkv.generate(params, cache, prompt, store=store)` reads and writes it. Example:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(folder, "10MB")
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
        self.reused = 0  # tokens that prompts of this process found here
        self.speed: float | None = None  # bytes a second of the record that was read last
        self.folder.mkdir(parents=True, exist_ok=True)

    def match(self, root: str, ids: Sequence[int]) -> list[Record]:
        """The records of the blocks that token ids begin with, as far as there are any, and of a part of the next."""
        found: list[Record] = []
        names = self._names(root, ids[: len(ids) // BLOCK * BLOCK])
        there = [*itertools.takewhile(_held, map(self._sizes, names))]
        whole, tokens = len(there) * BLOCK, 0
        for n in range(min(whole + BLOCK - GRAIN, len(ids) // GRAIN * GRAIN), whole, -GRAIN):
            end = self._names(root, ids[:n])[-1]
            if _held(sizes := self._sizes(end)):
                names, there, tokens = [*names[: len(there)], end], [*there, sizes], n - whole
                break
        link = self.codec.link(len(there), self.speed)
        for forms, sizes in zip(names, there, strict=False):  # no more than are there
            if (record := self._next(forms, sizes, link)) is None:
                break
            found.append(record)
        self.speed = link.speed
        self._touch(names[: len(found)])
        self.reused += min(len(found) * BLOCK, whole + tokens)
        return found

    def _next(self, forms: Sequence[str], sizes: Sequence[int | None], link: Link) -> Record | None:
        """The next record, of the best of its forms that there is time for and that can be read; sizes: bytes of each,
        None: not there."""
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
        """Write make(i), the record of block i of token ids, from block `start` on, as many as there is room for.

        The last one may be shorter, of some whole GRAIN. prompt: of which these ids are the beginning, if there is more
        of it.
        """
        names = self._names(root, ids)
        with self._writing():
            self._touch(names[:start])
            held = self._held()
            known = self._known(names, ids if prompt is None else prompt, held)
            new = [i for i in range(start, len(names)) if not held.keys() >= {*names[i]}]
            free = self.bytes - sum(x.st_size for x in held.values())
            for n, i in enumerate(new):
                record = make(i)
                forms = {name: level.encode(record) for name, level in zip(names[i], self.codec.levels, strict=True)}
                size = sum(x.nbytes for form in forms.values() for x in form.values()) + HEADER * len(forms)
                if free < size:  # for those that follow too, which are about as large
                    free = self._make_room(size * (len(new) - n), {*itertools.chain(*names)}, self._held(), known)
                if free < size:
                    break
                free -= size
                for name, form in forms.items():
                    array_file.write(self._path(name), form, {"name": name})
            self._touch(names)

    def note(self, root: str, ids: Sequence[int], prompt: Sequence[int]) -> None:
        """Note of records that were all found what an order that learns says of the prompt that begins with them."""
        names = self._names(root, ids)
        if names and self.evict.learns:
            with self._writing():
                self._known(names, prompt, self._held())

    def _names(self, root: str, ids: Sequence[int]) -> list[tuple[str, ...]]:
        """Of each block, and of what is left of them in whole GRAIN, the names of its forms."""
        forms, rest = [], ids[len(ids) // BLOCK * BLOCK : len(ids) // GRAIN * GRAIN]
        for level in self.codec.levels:
            names = chain(level.name + root, ids)
            forms.append([*names, successor([level.name + root, *names][-1], rest)] if len(rest) else names)
        return list(zip(*forms, strict=True))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The folder is this process's alone; what cannot be written is a warning."""
        try:
            with locked(self.folder / ".lock"):
                for path in self.folder.glob(".*.tmp"):  # of writers that were killed: none writes now
                    path.unlink(missing_ok=True)
                yield
        except OSError as error:
            warnings.warn(f"the store {self.folder} could not take a prompt: {error}", RuntimeWarning, stacklevel=4)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _sizes(self, forms: Sequence[str]) -> list[int | None]:
        """Bytes of each form of a record; None: it is not there."""
        sizes: list[int | None] = [None] * len(forms)
        for i, name in enumerate(forms):
            with contextlib.suppress(OSError):
                sizes[i] = self._path(name).stat().st_size
        return sizes

    def _read(self, name: str, level: Exact) -> Record | None:
        path = self._path(name)
        try:
            with array_file.opened(path) as (meta, names, read):
                if meta.get("name") == name:
                    return level.decode(read(names))
        except (KeyError, ValueError) as why:  # FormatError is one
            if isinstance(why.__cause__, OSError) or not path.exists():  # nothing is known of the record then
                return None
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def _touch(self, names: Sequence[tuple[str, ...]]) -> None:
        """Note that they were used; a beginning later than what follows it, so that it outlives that."""
        now = time.time_ns()
        for i, forms in enumerate(names):
            for name in forms:
                with contextlib.suppress(OSError):
                    os.utime(self._path(name), ns=(now - i, now - i))

    def _held(self) -> Held:
        """The records that there are, with their sizes and when they were used."""
        held: dict[str, os.stat_result] = {}
        for entry in os.scandir(self.folder):
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    held[entry.name.removesuffix(SUFFIX)] = entry.stat()
        return held

    def _known(
        self, names: Sequence[tuple[str, ...]], prompt: Sequence[int], held: Held
    ) -> dict[str, tuple[str, float]]:
        """What is known of records beside their use, with the odds of those of a prompt."""
        if not self.evict.learns:
            return {}
        known: dict[str, tuple[str, float]] = {}
        with contextlib.suppress(*BROKEN):  # none yet, or torn: nothing is known then
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
        """Delete what goes first until there is room for so many bytes, and some more at once; the bytes there are.

        A record of which nothing is known, as another order had it, has the odds of the others in the mean.
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
    """Whether a form of a record is there."""
    return any(x is not None for x in sizes)
