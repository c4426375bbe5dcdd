"""Rows of the catalogue: training-free eviction."""

from __future__ import annotations

from typing import Any

from jkv.catalogue import Axes, row, size
from jkv.scores.attention import Accumulated, Persistence
from jkv.scores.position import Protect


@row("2407.20485", "exact in one piece; decision lagged by block - 1")
def a2sf(
    *, budget: int | None = None, keep: float | None = None, bytes: Any = None, decay: float = 0.95, sinks: int = 0
) -> Axes:
    """A2SF: accumulated attention that forgets, by the factor `decay` a query."""
    if not 0 <= decay < 1:
        raise ValueError(f"a2sf: decay={decay}: from 0 (the last query decides) to below 1 (h2o never forgets)")
    return dict(score=Protect(score=Accumulated(decay=float(decay)), sinks=sinks), budget=size(budget, keep, bytes))


@row("2305.17118", "reconstruction; drops in batches as the paper does")
def scissorhands(
    *,
    budget: int | None = None,
    keep: float | None = None,
    bytes: Any = None,
    history: int = 400,
    sinks: int = 1,
    recent: int = 10,
) -> Axes:
    """Scissorhands: tokens that fell below uniform attention in the fewest of the last `history` queries."""
    return dict(
        score=Protect(score=Persistence(queries=history), sinks=sinks),
        budget=size(budget, keep, bytes),
        recent=recent,
        block=max((budget or 128) // 2, 1),
    )
