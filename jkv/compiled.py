"""Ahead-of-time compilation, so that a receipt can tell compile seconds and peak memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax

PROGRAMS: dict[Any, Compiled] = {}


class Compiled:
    """One program: call it, or ask what it cost."""

    def __init__(self, function: Any, args: tuple[Any, ...], static: dict[str, Any]) -> None:
        start = time.perf_counter()
        self.program = function.lower(*args, **static).compile()
        self.seconds = time.perf_counter() - start
        memory = self.program.memory_analysis()
        self.temporary = int(memory.temp_size_in_bytes) if memory is not None else 0  # bytes beside in- and outputs

    def __call__(self, *args: Any) -> Any:
        return self.program(*args)


def compiled(function: Any, *args: Any, **static: Any) -> tuple[Compiled, float]:
    """The program of a jitted function for arguments of these shapes, and the seconds that compiling took just now."""
    leaves, tree = jax.tree.flatten(args)
    key = (function, tree, tuple((x.shape, x.dtype) for x in leaves), tuple(static.items()))
    if key in PROGRAMS:
        return PROGRAMS[key], 0.0
    PROGRAMS[key] = Compiled(function, args, static)
    return PROGRAMS[key], PROGRAMS[key].seconds


def use_disk_cache() -> None:
    """Keep compiled programs on disk between runs, where the user has not chosen a folder."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        root = Path(os.environ.get("JKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jkv")
        jax.config.update("jax_compilation_cache_dir", str(root.expanduser() / "programs"))
