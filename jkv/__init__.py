"""Language-model inference in JAX through compressed KV caches.

>>> import jkv
>>> params = jkv.models.random(jkv.models.TINY)
>>> out = jkv.generate(params, "snapkv(budget=40, window=8) | int8", [5, 6, 7] * 40, max_new_tokens=4)
>>> len(out.tokens)
4
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jkv import models
    from jkv.cache import Cache
    from jkv.config import CacheConfig, TierSpec
    from jkv.generate import Result, extend, generate, prefill, stream
    from jkv.io.load import load
    from jkv.loop import step
    from jkv.methods import CATALOGUE, parse
    from jkv.report import Report

__all__ = [
    "CATALOGUE",
    "Cache",
    "CacheConfig",
    "Report",
    "Result",
    "TierSpec",
    "extend",
    "generate",
    "load",
    "models",
    "parse",
    "prefill",
    "step",
    "stream",
]

# The module of each name. It is imported when the name is first used: `jkv --help` need not wait for jax.
_HOMES = {
    "CATALOGUE": "methods",
    "Cache": "cache",
    "CacheConfig": "config",
    "Report": "report",
    "Result": "generate",
    "TierSpec": "config",
    "extend": "generate",
    "generate": "generate",
    "load": "io.load",
    "parse": "methods",
    "prefill": "generate",
    "step": "loop",
    "stream": "generate",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(import_module(f"jkv.{_HOMES[name]}"), name)
        return value
    if find_spec(f"jkv.{name}") is not None:
        return import_module(f"jkv.{name}")
    raise AttributeError(f"module 'jkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import of the module jkv.generate ends by giving it this name, which is the function's.
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
