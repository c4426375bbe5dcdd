"""Language-model inference in JAX through compressed KV caches.

>>> import jkv
>>> params = jkv.models.random(jkv.models.TINY)
>>> out = jkv.generate(params, "snapkv(budget=40, window=8) | int8", [5, 6, 7] * 40, max_new_tokens=4)
>>> len(out.tokens)
4
"""

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
