"""The engines that benchmarks compare with: the packages that they need, and the caches that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from benchmarks import llama, presses
from jkv import methods
from jkv.cli.options import CACHES
from jkv.utils.optional_deps import install


@dataclass(frozen=True)
class Engine:
    """Another engine to compare with.

    Attributes:
        packages: Python packages that must be installed.
        extra: Extra of jkv that installs them.
        caches: Caches that are compared by default.
        shared: Checks that the engine has a cache; None if its cache is full whatever jkv's is.
        codes: Whether it reads a .gguf file's own blocks instead of float weights.
    """

    packages: tuple[str, ...]
    extra: str
    caches: tuple[str, ...] = CACHES
    shared: Callable[[str, int], Any] | None = None
    codes: bool = False


ENGINES = {
    "transformers": Engine(("torch", "transformers"), "parity"),
    "kvpress": Engine(("torch", "transformers", "kvpress"), "kvpress", ("full", "snapkv(keep=0.25)"), presses.shared),
    "llama.cpp": Engine(("xllamacpp",), "llama", ("full", "int8", "int4"), llama.shared, codes=True),
}


def check_engine(vs: str, specs: Iterable[str] = ()) -> None:
    """Raise ValueError if an engine is unknown, is not installed, does not run here, or lacks one of these caches."""
    if vs not in ENGINES:
        raise ValueError(f"--vs {vs}: the engines are {', '.join(ENGINES)}; another cache: jkv bench decode --vs CACHE")
    engine = ENGINES[vs]
    if missing := [name for name in engine.packages if find_spec(name) is None]:
        raise ValueError(f"beside {vs}: {' and '.join(missing)} is missing; {install(engine.extra)}")
    if jax.default_backend() != "cpu":
        raise ValueError(f"beside {vs}: it runs on the CPU here; set JAX_PLATFORMS=cpu so that jkv does too")
    if engine.shared is not None:
        for spec in specs:
            engine.shared(str(methods.parse(spec)), 1)
