"""Language-model inference in JAX through compressed KV caches.

>>> import jkv
>>> params = jkv.models.random(jkv.models.TINY)
>>> out = jkv.generate(params, "snapkv(budget=40, window=8) | int8", [5, 6, 7] * 40, max_new_tokens=4)
>>> len(out.tokens)
4
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jkv import models
    from jkv.cache.cache import Cache
    from jkv.generation.api import extend, generate, prefill, stream
    from jkv.generation.cache_file import load_cache, save_cache
    from jkv.generation.chat import Chat
    from jkv.generation.generate import Result
    from jkv.generation.receipt import Receipt
    from jkv.generation.sampling_params import SamplingParams
    from jkv.generation.score import Scored, score
    from jkv.generation.step import branch, step
    from jkv.io.from_pytree import from_tree
    from jkv.io.load import load
    from jkv.methods import METHODS, parse
    from jkv.methods.config import CacheConfig, TierSpec
    from jkv.prefix_cache.chunk_reuse import ChunkCache
    from jkv.prefix_cache.store import PrefixCache

    # of jkv.eval, which no room below it may import through here
    harness: Any
    compare: Any

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Cache",
    "CacheConfig",
    "Chat",
    "Receipt",
    "Result",
    "SamplingParams",
    "TierSpec",
    "branch",
    "compare",
    "extend",
    "from_tree",
    "generate",
    "harness",
    "load",
    "load_cache",
    "models",
    "parse",
    "prefill",
    "ChunkCache",
    "Scored",
    "PrefixCache",
    "save_cache",
    "score",
    "step",
    "stream",
]

# The module of each name. It is imported when the name is first used: `jkv --help` need not wait for jax.
_HOMES = {
    "METHODS": "methods",
    "Cache": "cache.cache",
    "CacheConfig": "methods.config",
    "Chat": "generation.chat",
    "Receipt": "generation.receipt",
    "SamplingParams": "generation.sampling_params",
    "Result": "generation.generate",
    "TierSpec": "methods.config",
    "branch": "generation.step",
    "compare": "eval.comparison",
    "extend": "generation.api",
    "from_tree": "io.from_pytree",
    "generate": "generation.api",
    "harness": "eval.harness",
    "load": "io.load",
    "load_cache": "generation.cache_file",
    "save_cache": "generation.cache_file",
    "parse": "methods",
    "prefill": "generation.api",
    "Scored": "generation.score",
    "ChunkCache": "prefix_cache.chunk_reuse",
    "PrefixCache": "prefix_cache.store",
    "score": "generation.score",
    "step": "generation.step",
    "stream": "generation.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = value = getattr(import_module(f"jkv.{_HOMES[name]}"), name)
        return value
    if find_spec(f"jkv.{name}") is not None:
        return import_module(f"jkv.{name}")
    raise AttributeError(f"module 'jkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
