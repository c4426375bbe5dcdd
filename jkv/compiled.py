"""Ahead-of-time compilation, so that a receipt can tell compile seconds and peak memory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import jax

# Programs kept. One of a 30-layer model takes 100 to 450 MB on a CPU; a process that keeps thousands of small ones runs
# out of memory maps, and XLA then crashes. A prompt length and a cache need two.
LIMIT = 16
PROGRAMS: dict[Any, Compiled] = {}  # the one used last comes last


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
    """The program of a jitted function for arguments of these shapes, and the seconds that compiling took just now.

    >>> double = jax.jit(lambda x: 2 * x)
    >>> program, seconds = compiled(double, jax.numpy.ones(3))
    >>> program(jax.numpy.ones(3)).tolist(), seconds > 0, compiled(double, jax.numpy.ones(3))[1]
    ([2.0, 2.0, 2.0], True, 0.0)
    """
    leaves, tree = jax.tree.flatten(args)
    key = (function, tree, tuple((x.shape, x.dtype) for x in leaves), tuple(static.items()))
    program, seconds = PROGRAMS.pop(key, None), 0.0
    if program is None:
        program = Compiled(function, args, static)
        seconds = program.seconds
    PROGRAMS[key] = program
    if len(PROGRAMS) > LIMIT:
        oldest = next(iter(PROGRAMS))
        del PROGRAMS[oldest]
        oldest[0].clear_cache()  # jax holds its programs too; what is in PROGRAMS survives this
    return program, seconds


def forget() -> None:
    """Drop all programs, such as those of a cache that will not be used again; the disk keeps them."""
    for function in {key[0] for key in PROGRAMS}:
        function.clear_cache()
    PROGRAMS.clear()


def use_disk_cache() -> None:
    """Keep compiled programs on disk between runs, where the user has not chosen a folder."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        root = Path(os.environ.get("JKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jkv")
        jax.config.update("jax_compilation_cache_dir", str(root.expanduser() / "programs"))
