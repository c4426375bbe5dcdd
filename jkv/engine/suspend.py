"""Suspended rows: records on disk from which a stopped job resumes unfinished rows."""

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
from jkv.utils.errors import error_message
from jkv.utils.files import sync
from jkv.utils.notes import note

LOGITS = "logits"  # name of the next-token logits, beside the arrays of a cache


class SuspendedRows:
    """Records of one process's unfinished rows, in a folder that only this process uses.

    Idea: HiFC, which swaps whole sequences to flash. A record is one file: the row's cache with its codes as they are,
    the logits, and the tokens so far. Draws depend only on the seed and a token's position, so nothing else is needed.
    A record is written in one pass, never changed, and either complete or absent. It is deleted when its row has a
    result.

    Attributes:
        folder: None where rows cannot be suspended; all rows then restart.
        resumed: tokens of each row that was resumed, by `Request.part`.
        rows: rows that were suspended.
        nbytes: bytes of their arrays.
        there: names of the records that can be resumed.
    """

    def __init__(self, folder: Path | None, params: Params, config: CacheConfig, left: Iterable[Request] = ()) -> None:
        """List the records of an earlier run.

        Args:
            folder: folder of the records, or None where rows cannot be suspended.
            config: the cache.
            left: rows that have no result yet. Other records and incomplete files are deleted.
        """
        self.folder, self.params, self.config = folder, params, config
        self.resumed: dict[tuple[int, int], int] = {}  # tokens of each resumed row, by `Request.part`
        self.rows = self.nbytes = 0  # suspended rows, and bytes of their arrays
        found = {x.name for x in folder.iterdir()} if folder is not None and folder.is_dir() else set()
        self.there = found and found & set(map(_name, left))
        for name in found - self.there:
            self._delete(name)

    def take(self, request: Request, bucket: Bucket, running: Cache) -> Filled | None:
        """Load the record of a row.

        A record that cannot be used is reported on stderr and deleted.

        Args:
            request: the row.
            bucket: bucket of the batch that the row enters.
            running: cache of that batch.

        Returns:
            The row with its cache and tokens, or None without a usable record.
        """
        if self.folder is None or not self.there or (name := _name(request)) not in self.there:
            return None
        try:
            filled = self._read(self.folder / name, request, bucket, running)
        except (OSError, ValueError, KeyError, TypeError) as error:
            note(f"the row of line {request.line} begins anew: {error_message(error)}")
            self._delete(name)
            return None
        self.resumed[request.part] = len(filled.drawn[0])
        return filled

    def _read(self, path: Path, request: Request, bucket: Bucket, running: Cache) -> Filled:
        """Read a record.

        Raises:
            FormatError: the record is damaged, or of another row, model, cache or batch.
        """
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
        """Write the records of rows that stand at the end of a block.

        Rows with the most tokens come first, because time may run out.

        Args:
            state: decode state of the batch.
            rows: slot, request and generated tokens of each row.
            bucket: bucket of the batch.

        Raises:
            OSError: too little space on the disk. At least as much as is written stays free, for results.
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
        """Delete the records of rows that have a result now, by `Request.key`."""
        for name in [x for x in self.there if x.partition("-")[0] in keys]:
            self._delete(name)

    def _delete(self, name: str) -> None:
        """Delete a record, and the folder after the last one."""
        assert self.folder is not None
        self.there.discard(name)
        with contextlib.suppress(OSError):  # a later run deletes what stays
            (self.folder / name).unlink()
            if not self.there:
                self.folder.rmdir()

    def _about(self, request: Request, bucket: Bucket) -> dict[str, Any]:
        """Return what a record must have been made for.

        `held` is the number of prompt tokens in a held prefix, outside of the row's own cache.
        """
        return {
            "key": request.key,
            "sample": request.sample,
            "cache": self.config.name,
            "held": bucket.held.get(request.part, 0),
        }


def _name(request: Request) -> str:
    """Return the file name of a row's record, which does not depend on its line."""
    return f"{request.key}-{request.sample}.row"
