"""What a terminal and a notebook show of a cache."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.core import Tracer


def cache_facts(cache: Any) -> list[tuple[str, str]]:
    """Return the name and value of each fact about a Cache; they cost no program.

    Shapes, traced arrays and donated ones do not say how many tokens were seen.
    """
    seen, tokens = cache.counts.seen, "unknown"
    if isinstance(seen, Array) and not isinstance(seen, Tracer):
        tokens = "unknown, as jkv.step has used this cache" if seen.is_deleted() else ", ".join(map(str, seen.tolist()))
    recurrent = f", {len(cache.states)} recurrent" if cache.states else ""
    return [
        ("methods", cache.name or "unnamed"),
        ("tokens seen", tokens),
        ("bytes", f"{cache.nbytes:,}"),
        ("layers", f"{len(cache.layers)} of {cache.model.heads} kv heads{recurrent}"),
        ("rows", str(cache.counts.seen.shape[0])),
    ]
