"""Sampling settings of a generation, a request or a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DRAWS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # as `sampling.check` takes them


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, and when a row ends.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.
        seed: None is 0 in `jkv.generate`, and in a job the row's line number.
        max_new_tokens: largest number of generated tokens.
        stop: stop strings.
        n: samples per prompt.

    >>> import jkv
    >>> params, drawn = jkv.models.random(jkv.models.TINY), SamplingParams(temperature=0.7, seed=1, max_new_tokens=4)
    >>> len(jkv.generate(params, "int8", [5, 6, 7], sampling=drawn).tokens)
    4
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    n: int = 1

    @property
    def draws(self) -> dict[str, Any]:
        """Settings of the sampler by name."""
        return {name: getattr(self, name) for name in DRAWS}
