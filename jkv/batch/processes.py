"""Processes of one job: they divide its rows, or share a mesh and run the same programs in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jkv.batch.output_rows import Counts, tally
from jkv.core.sharding import MeshPlan


def spans(over: MeshPlan | None) -> bool:
    """Return whether a mesh has devices of other processes."""
    return over is not None and len({d.process_index for d in over.mesh.devices.flat}) > 1


def gathered(x: np.ndarray) -> np.ndarray:
    """Gather an i64 array from all processes to i64[processes,...]."""
    if jax.process_count() == 1:
        return x[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x.view(np.int32))).view(np.int64)  # jax has no int64 by default


def any_of(stop: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that is True on all processes as soon as `stop` is True on one."""
    return lambda: bool(gathered(np.array([stop()], np.int64)).any())


class Heard:
    """Rows that another process writes; see `output.Rows`."""

    def __init__(self) -> None:
        self.done: dict[int, Counts] = {}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count rows without writing them."""
        self.done |= map(tally, rows)

    def close(self) -> None:
        """Do nothing."""
