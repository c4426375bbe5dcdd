"""Fields of a request, each with the values that ask for nothing, as JSON may write them."""

from __future__ import annotations

from typing import Any

from jkv.engine.formats import NOTHING, ONLY, TEMPLATE

OWN: dict[str, tuple[Any, ...]] = {
    "temperature": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,), "n": (1,),
    "stop": ([], ""), "max_tokens": (10,), "max_completion_tokens": (10,), "seed": (), TEMPLATE: ({},),
}  # fmt: skip


def nothing(names: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    """(field, value) of all fields that batch jobs and servers know, and of these, of answers of 10 tokens."""
    known = {name: ("a",) for name in NOTHING if name != "model"} | ONLY | OWN | names
    values = [(name, x) for name, own in known.items() for x in (*own, None)]
    return values + [(name, float(x)) for name, x in values if type(x) is int]
