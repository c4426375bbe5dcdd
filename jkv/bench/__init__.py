"""How fast this machine runs: caches beside each other, beside transformers, and against what the memory allows."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jkv.bench.engines import Transformers
    from jkv.bench.results import machine

__all__ = ["Transformers", "machine"]

_HOMES = {"Transformers": "engines", "machine": "results"}  # imported when first used: `jkv --help` waits for no jax


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"jkv.bench.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jkv.bench' has no attribute {name!r}")
