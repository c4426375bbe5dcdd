"""Prefills: how a prompt enters an empty cache."""

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
    """Tokens that are run after a prompt for their queries only; their keys and values are discarded.

    Attributes:
        ids: token ids of each row.
        span: prompt positions [first, end) of each row that the queries are about.
    """

    ids: list[list[int]]
    span: list[tuple[int, int]]


Say = Callable[[Any, list[list[int]], int], list[list[int]]]
PROBED = "probed"  # column that a probe fills, if the score has it


@value
class AttentionGradient:
    """Weights query_i * key_hgj of attention probabilities p[i,j] of query head (h,g), by their effect on the output.

    Attributes:
        query: f32[B,N], |d sum_t |y_t|^2 / d a_i|: y is the last layer's output, a the sum of this layer's heads after
            the output projection.
        key: f32[B,H,G,S], |W_hg v_j|: W_hg are the columns of the output projection for one query head.
    """

    query: Array
    key: Array


class Probe:
    """Extra queries after a prompt, and the column that they compute. Subclasses implement `texts` and `observe`.

    Attributes:
        graded: `observe` receives `AttentionGradient`, which takes a backward pass through the model.
    """

    graded: ClassVar[bool] = False

    def check(self, config: Any, model: ModelConfig) -> None:
        """Raise ValueError if this probe cannot work with the rest of a CacheConfig."""

    def texts(self, params: Params, rows: list[list[int]], say: Say) -> list[ProbeTokens]:
        """Return the token sequences to run one after the other after the prompts.

        Sequences of one padded length share a compiled program.

        Args:
            params: the model.
            rows: token ids of each prompt.
            say: say(model, rows, n) generates n tokens greedily after each row.
        """
        raise NotImplementedError

    def observe(self, ev: Evidence, span: Array, old: Array, worth: AttentionGradient | None) -> Array:
        """Return the column f32[B,H,S] after the probe's queries, `ev.new`.

        Args:
            ev: the evidence; `ev.seen` and `ev.prompt` count the tokens before the probe.
            span: i32[B,2], from `ProbeTokens.span`.
            old: f32[B,H,S], the column before these queries.
            worth: weights of the attention if the probe is `graded`, else None.
        """
        raise NotImplementedError


class Reading(Protocol):
    """The prompts of one call and the compiled programs that prefill them; what `Prefill.__call__` works with."""

    @property
    def params(self) -> Params: ...

    @property
    def rows(self) -> list[list[int]]: ...  # token ids of each prompt

    def of(self, rows: list[list[int]]) -> Reading:
        """Return a copy for other prompts."""
        ...

    def draft(self, params: Params, config: Any) -> Reading:
        """Return a copy for another model and CacheConfig."""
        ...

    def empty(self) -> Any:
        """Allocate an empty cache of the config."""
        ...

    def prefill(self) -> tuple[Any, Array]:
        """Prefill and return cache and logits; every layer compresses as soon as it has attended, after each chunk."""
        ...

    def dense(self) -> tuple[Any, Array]:
        """Prefill in one piece without compression, all tokens in the recent windows; return cache and logits."""
        ...

    def texts(self, probe: Probe) -> list[ProbeTokens]:
        """Return the sequences that the probe runs after the prompts; ValueError if the context is too short."""
        ...

    def probe(self, dense: Any, probe: Probe, texts: list[ProbeTokens]) -> Any:
        """Run the probe's sequences on the uncompressed cache and return it with the probe's column filled."""
        ...

    def statistic(self, dense: Any) -> np.ndarray:
        """Return `Score.statistic` of every layer of the uncompressed cache, f[L,B,...]."""
        ...

    def compress(self, empty: Any, dense: Any) -> Any:
        """Flush the uncompressed cache once into the empty one, resized by the statistic if the budget has one."""
        ...


@part
class Prefill:
    """How a prompt enters an empty cache. This class: one compressing pass, whole or in chunks.

    Subclasses override `__call__`, or set the class variables and override `pruning`.

    Attributes:
        splits: a prompt prefilled in two pieces gives the same cache, if no token is evicted in between.
        defers: the whole prompt stays uncompressed until it is known, then it is compressed once.
        skips: some prompt tokens may never run through the model.
        coded: prompt queries attend to keys and values as they will be stored.
        probe: extra queries that fill the column `PROBED`, or None.
        beside: what it does besides one pass, as the predicate of a sentence in error messages.
    """

    splits: ClassVar[bool] = True
    defers: ClassVar[bool] = False
    skips: ClassVar[bool] = False
    coded: ClassVar[bool] = False
    probe: ClassVar[Probe | None] = None
    beside: ClassVar[str] = ""

    def bound(self, params: Params) -> Self:
        """Return this prefill with the weights trained for the model; ValueError if they belong to another model."""
        return self

    def pruning(self, model: ModelConfig, layer: int) -> Any:
        """Return the `jkv.cache.spec.Pruning` of the tokens that continue after a layer, or None if all do."""
        return None

    def check(self, config: Any, model: ModelConfig, chunk: int) -> None:
        """Raise ValueError if this prefill cannot work with a CacheConfig, or in chunks of `chunk` tokens."""

    def __call__(self, reading: Reading) -> tuple[Any, Array]:
        """Prefill the prompts. Returns the cache after them and the logits of the next token."""
        return reading.prefill()
