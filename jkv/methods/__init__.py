"""Compression methods: the parts that papers are built from, and the catalogue that composes them from text.

What a method of one's own needs is here too: the axes as classes, `part` to declare one, `method` to name it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jkv.arrays.pytree import leaf, part
from jkv.methods.catalogue import METHODS
from jkv.methods.parser import as_config, known, pairs, parse, refusal
from jkv.methods.registry import method
from jkv.protocols import Born, Budget, Codec, Columns, Evidence, Merge, Needs, Prefill, Score, Selector

if TYPE_CHECKING:
    check: Any  # of jkv.eval, which no package below it may import

__all__ = [
    "METHODS",
    "Born",
    "Budget",
    "Codec",
    "Columns",
    "Evidence",
    "Merge",
    "Needs",
    "Prefill",
    "Score",
    "Selector",
    "as_config",
    "check",
    "known",
    "leaf",
    "method",
    "pairs",
    "parse",
    "part",
    "refusal",
]


def __getattr__(name: str) -> Any:
    if name == "check":
        return import_module("jkv.eval.method_laws").check
    raise AttributeError(f"module 'jkv.methods' has no attribute {name!r}")
