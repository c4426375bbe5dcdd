"""Rows that were under way when a job was stopped: a record of each, from which the next run goes on."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.cache import Cache, Common, Decoding
from jkv.cache.disk_pages import SHARE
from jkv.engine.prefill import Filled
from jkv.engine.request import Request
from jkv.engine.scheduler import Bucket
from jkv.generation.cache_file import packed, row, unpacked
from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.utils.errors import said
from jkv.utils.files import sync
from jkv.utils.notes import note

LOGITS = "logits"  # of the token that comes next, beside the arrays of a cache


class Suspended:
    """The records of one process, in a folder that is its alone. Idea: HiFC, sequences that are swapped to flash whole.

    A record is a file of its own: a row's cache, codes as they are, the logits and the tokens so far. Draws depend on
    the seed and the place of a token alone, so they need nothing else. It is written in one stretch, never changed, and
    there whole or not at all; it goes when its row has a result. folder: None where rows cannot be suspended, and then
    all of them begin anew.
    """

    def __init__(self, folder: Path | None, params: Params, config: CacheConfig, left: Iterable[Request] = ()) -> None:
        """left: the rows that have no result yet; records of others are deleted, and what a kill left of one."""
        self.folder, self.params, self.config = folder, params, config
        self.resumed: dict[tuple[int, int], int] = {}  # rows that went on (`Request.part`), and the tokens they had
        self.rows = self.nbytes = 0  # that were suspended, and their arrays
        found = {x.name for x in folder.iterdir()} if folder is not None and folder.is_dir() else set()
        self.there = found and found & set(map(_name, left))
        for name in found - self.there:
            self._delete(name)

    def take(self, request: Request, bucket: Bucket, running: Cache) -> Filled | None:
        """The row as its record has it, for a batch of such a cache. None: there is none, or none that is of use, which
        is said and deleted."""
        if self.folder is None or not self.there or (name := _name(request)) not in self.there:
            return None
        try:
            filled = self._read(self.folder / name, request, bucket, running)
        except (OSError, ValueError, KeyError, TypeError) as error:
            note(f"the row of line {request.line} begins anew: {said(error)}")
            self._delete(name)
            return None
        self.resumed[request.part] = len(filled.drawn[0])
        return filled

    def _read(self, path: Path, request: Request, bucket: Bucket, running: Cache) -> Filled:
        """Raises FormatError for a record that is damaged, or of another row, model, cache or batch."""
        own = self._about(request, bucket)
        with array_file.opened(path) as (meta, _, read):
            if there := {x: meta.get(x) for x in own if meta.get(x) != own[x]}:
                cause = ", ".join(f"its {name} is {x!r}, not {own[name]!r}" for name, x in there.items())
                raise FormatError(path, cause, "it is deleted")
            found: dict[str, np.ndarray] = {}

            def arrays(names: Iterable[str]) -> dict[str, np.ndarray]:
                found.update(read([*names, LOGITS]))
                return found

            cache = unpacked(path, meta["description"], arrays, self.params, self.config)
        if jax.tree.structure(cache.plan) != jax.tree.structure(running.plan):
            raise FormatError(path, "its batch was of rows of other lengths", "it is deleted")
        if running.common is not None:
            cache = replace(cache, common=Common(held=(), of=jnp.full(1, -1, jnp.int32)))
        return Filled(rows=(request,), cache=cache, logits=jnp.asarray(found[LOGITS]), drawn=(meta["drawn"],))

    def keep(self, state: Decoding, rows: Sequence[tuple[int, Request, list[int]]], bucket: Bucket) -> None:
        """Write the records of rows that stand at the border of a block: their slots, and their tokens so far.

        Those first that have most tokens: there may be no time for all. Raises OSError where the disk has no room: as
        much as is written stays free, for results.
        """
        assert self.folder is not None
        self.folder.mkdir(exist_ok=True)
        arrays, description = packed(state.cache, self.params)
        logits = np.asarray(state.logits)
        for slot, request, drawn in sorted(rows, key=lambda x: -len(x[1].tokens) - len(x[2])):
            own, about = row(arrays, description, slot)
            own[LOGITS] = logits[slot : slot + 1]
            size = sum(x.nbytes for x in own.values())
            if size > SHARE * (free := shutil.disk_usage(self.folder).free):
                raise OSError(errno.ENOSPC, f"{size:,} bytes of a row, {free:,} bytes free", str(self.folder))
            meta = self._about(request, bucket) | {"drawn": drawn, "description": about}
            array_file.write(self.folder / _name(request), own, meta)
            self.there.add(_name(request))
            self.rows, self.nbytes = self.rows + 1, self.nbytes + size
        sync(self.folder)
        sync(self.folder.parent)

    def forget(self, keys: Collection[str]) -> None:
        """Delete the records of rows (`Request.key`) that have a result now."""
        for name in [x for x in self.there if x.partition("-")[0] in keys]:
            self._delete(name)

    def _delete(self, name: str) -> None:
        assert self.folder is not None
        self.there.discard(name)
        with contextlib.suppress(OSError):  # what stays is deleted by a later run
            (self.folder / name).unlink()
            if not self.there:
                self.folder.rmdir()

    def _about(self, request: Request, bucket: Bucket) -> dict[str, Any]:
        """What a record must have been made for. held: of a prompt, in a beginning that is not the row's own."""
        return {
            "key": request.key,
            "sample": request.sample,
            "cache": self.config.name,
            "held": bucket.held.get(request.part, 0),
        }


def _name(request: Request) -> str:
    """Of a row's record, whatever its line."""
    return f"{request.key}-{request.sample}.row"
