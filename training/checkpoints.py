"""The folder of a training run: settings, atomic checkpoints (orbax), metrics as JSON lines, and their curves."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from jkv.io.safetensors import read_json
from jkv.utils.file_locks import locked
from jkv.utils.json_results import overwrite
from jkv.utils.plotting import blank

WHAT, METRICS, CURVES, LOCK = "training.json", "metrics.jsonl", "curves.png", ".lock"


class Folder:
    """The folder of one training run, locked while it is open.

    Args:
        path: The folder.
        what: Everything that the result depends on.
        resume: Whether to resume an existing run.

    Raises:
        ValueError: The folder holds a run and `resume` is False; it holds a run with other settings, each named; or
            another process trains in it.
    """

    def __init__(self, path: str | Path, what: Mapping[str, Any], resume: bool) -> None:
        self.path = Path(path).expanduser().resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.path / LOCK, wait=False))
            except BlockingIOError:
                told = "another process trains in it: wait for it, or give another --out"
                raise ValueError(f"{self.path}: {told}") from None
            self._claim(what, resume)
            self._held = held.pop_all()
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax logs every save
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.manager: Any = ocp.CheckpointManager(self.path / "checkpoints", options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that other processes can resume the run."""
        self._held.close()

    def _claim(self, what: Mapping[str, Any], resume: bool) -> None:
        path = self.path
        what, old = json.loads(json.dumps(what)), read_json(self.path / WHAT)
        if old is not None and not resume:
            raise ValueError(f"{path} holds a training already: go on with it by --resume, or give another --out")
        if old is not None and (changed := sorted(k for k in {*old, *what} if old.get(k) != what.get(k))):
            told = ", ".join(f"{k} {old.get(k)} (now {what.get(k)})" for k in changed)
            raise ValueError(f"{path} holds another training, with {told}: ask for the same, or give another --out")
        overwrite(self.path / WHAT, json.dumps(what, indent=1) + "\n")

    def last(self, like: Any) -> Any:
        """Restore the newest complete checkpoint, or None, and drop metrics recorded after it.

        Args:
            like: A value with the structure of the checkpoint.
        """
        number, value = self.manager.latest_step(), None
        if number is not None:
            value = self.manager.restore(number, args=ocp.args.StandardRestore(jax.device_get(like)))
        kept = [row for row in self.metrics() if number is not None and row["number"] <= number]
        overwrite(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in kept))
        return value

    def save(self, number: int, value: Any) -> None:
        """Write a checkpoint unless one with this number exists."""
        if number not in self.manager.all_steps():
            self.manager.save(number, args=ocp.args.StandardSave(jax.device_get(value)))

    @contextlib.contextmanager
    def keeping(self, state: Callable[[], tuple[int, Any]]) -> Iterator[None]:
        """Save a checkpoint of `state()`, a number and a value, on exit, also after an error.

        An error of the save itself is printed, so that it does not hide the first one.
        """
        try:
            yield
        except BaseException:
            try:
                self.save(*state())
            except Exception as error:
                told = "the state could not be kept; --resume goes on from the last checkpoint before it"
                print(f"{self.path}: {told} ({error})", file=sys.stderr)
            raise
        self.save(*state())

    def add(self, row: Mapping[str, Any]) -> None:
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return all complete metric lines; damaged ones are reported and skipped, as only curves need them."""
        path, found = self.path / METRICS, []
        if not path.exists():
            return []
        with path.open("rb") as file:
            for at, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    found += [row] if row["number"] >= 0 and line.endswith(b"\n") else []
                except (ValueError, TypeError, KeyError, RecursionError):
                    if line.endswith(b"\n"):  # an incomplete last line is expected after a kill
                        told = "is damaged and left out; only the curves want it"
                        print(f"{path}: line {at} {told}", file=sys.stderr)
        return found

    def draw(self) -> Path:
        """Plot all metrics: warm-up losses by layer, the others by step; long curves with a running mean."""
        found = self.metrics()
        names = sorted({k for row in found for k, x in row.items() if isinstance(x, float)})
        figure = blank(6.4, 2.2 * max(1, len(names)))
        for axes, name in zip(figure.subplots(max(1, len(names)), squeeze=False)[:, 0], names, strict=False):
            rows = [row for row in found if name in row]
            x, y = (np.array([row[key] for row in rows]) for key in ("number", name))
            many, n = len(rows) > 100, len(rows) // 20
            axes.plot(x, y, linewidth=1, alpha=0.3 if many else 1)
            if many:
                axes.plot(x[n - 1 :], np.convolve(y, np.ones(n) / n, "valid"), color="C0", linewidth=2)
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
        figure.supxlabel("layers warmed, then steps")
        fresh = self.path / f".{CURVES}.png"
        figure.savefig(fresh, dpi=120)
        fresh.replace(self.path / CURVES)
        return self.path / CURVES
