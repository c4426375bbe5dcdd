"""Prefills: how a prompt gets into a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from jax import Array

from jkv.arrays.pytree import part, value
from jkv.protocols.evidence import Evidence

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@dataclass(frozen=True, kw_only=True)
class ProbeTokens:
    """Tokens that are read after a prompt for their queries alone; nothing of them is kept.

    ids: those of each row; span: the positions of the prompt [first, end) that they ask about, for each row.
    """

    ids: list[list[int]]
    span: list[tuple[int, int]]


Say = Callable[[Any, list[list[int]], int], list[list[int]]]
PROBED = "probed"  # the column that a probe fills, of whatever score has it


@value
class Worth:
    """What attention is worth to what a model says: p[i,j] of query head hg is worth p[i,j] query_i key_hgj.

    query f32[B,N]: |d sum_t |y_t|^2 / d a_i|, y behind the last layer and a what this one's heads add together, behind
    the matrix that they go out by; key f32[B,H,G,S]: |W_hg v_j|, W_hg the columns of that matrix for a query head.
    """

    query: Array
    key: Array


class Probe:
    """Queries that a prompt does not have, and what they find out about its tokens."""

    graded: ClassVar[bool] = False  # it asks what their attention is worth, which takes a pass back through the model

    def check(self, config: Any, model: ModelConfig) -> None:
        """Raise ValueError if it cannot work with the rest of a CacheConfig."""

    def texts(self, params: Params, rows: list[list[int]], say: Say) -> list[ProbeTokens]:
        """Read one by one after the prompts of these token ids; one program serves those of one padded length.

        say(model, rows, n): the n tokens that a model generates greedily after each row.
        """
        raise NotImplementedError  # its own in every probe

    def observe(self, ev: Evidence, span: Array, old: Array, worth: Worth | None) -> Array:
        """f32[B,H,S]: the column after these queries, ev.new, from the old one; span i32[B,2].

        ev.seen and ev.prompt count the tokens before the probe; worth: of its attention, if it is graded.
        """
        raise NotImplementedError  # its own in every probe


class Reading(Protocol):
    """The prompts of one call, and the programs that read them into caches."""

    @property
    def params(self) -> Params: ...

    @property
    def rows(self) -> list[list[int]]: ...  # token ids

    def of(self, rows: list[list[int]]) -> Reading:
        """The same of other prompts."""
        ...

    def draft(self, params: Params, config: Any) -> Reading:
        """The same by another model and config."""
        ...

    def empty(self) -> Any:
        """An empty cache of the config."""
        ...

    def prefill(self) -> tuple[Any, Array]:
        """Cache and logits; every layer compresses as soon as it has attended, after each chunk."""
        ...

    def dense(self) -> tuple[Any, Array]:
        """Cache and logits of the prompts in one piece, of which all stays in the recent windows."""
        ...

    def texts(self, probe: Probe) -> list[ProbeTokens]:
        """What the probe reads after the prompts; ValueError where the model's context has no room for it."""
        ...

    def probe(self, dense: Any, probe: Probe, texts: list[ProbeTokens]) -> Any:
        """The dense cache after the probe has filled its column by these texts."""
        ...

    def statistic(self, dense: Any) -> np.ndarray:
        """f[L,B,...]: what every layer says of its prompt (`Score.statistic`)."""
        ...

    def compress(self, empty: Any, dense: Any) -> Any:
        """The empty cache, of the sizes of a statistic if its budget wants one, after one flush of the other."""
        ...


@part
class Prefill:
    """How a prompt gets into an empty cache. This one: in one pass, whole or in chunks."""

    splits: ClassVar[bool] = True  # a prompt in two pieces gives the same cache, if no token leaves in between
    defers: ClassVar[bool] = False  # all of a prompt stays until all is known, and then it is compressed once
    skips: ClassVar[bool] = False  # tokens of a prompt may never be read
    coded: ClassVar[bool] = False  # queries of a prompt see keys and values as they will be stored
    probe: ClassVar[Probe | None] = None  # queries that the prompt does not have: they fill the column `PROBED`
    beside: ClassVar[str] = ""  # what it does beside one pass, as the predicate of a sentence

    def bound(self, params: Params) -> Self:
        """The same with the weights that it needs of a model; ValueError if they were trained for another."""
        return self

    def pruning(self, model: ModelConfig, layer: int) -> Any:
        """The `memory.layer.Pruning` of the tokens that go on after a layer, or None: all do."""
        return None

    def check(self, config: Any, model: ModelConfig, chunk: int) -> None:
        """Raise ValueError if it cannot work with the rest of a CacheConfig, or in chunks of `chunk` tokens."""

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        """The cache after the prompts, and the logits of what comes next."""
        return reading.prefill()
