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


class DraftRunner(Protocol):
    """Runs a draft model over the prompts of a prefill."""

    def draft(self, params: Params, config: Any) -> Any:
        """Return an uncompressed cache of the prompts for another model and CacheConfig, after the config's probe."""
        ...

    def statistic(self, dense: Any) -> np.ndarray:
        """Return `Score.statistic` of every layer of an uncompressed cache, f[L,B,...]."""
        ...


@dataclass(frozen=True, kw_only=True)
class PrefillTraits:
    """What a prefill does besides one compressing pass.

    Attributes:
        splits: a prompt prefilled in two pieces gives the same cache, if no token is evicted in between.
        chunks: the prompt may be prefilled in chunks.
        defers: the whole prompt stays uncompressed until it is known, then it is compressed once.
        skips: some prompt tokens may never run through the model.
        coded: prompt queries attend to keys and values as they will be stored.
        beside: what it does besides one pass, as the predicate of a sentence in error messages.
    """

    splits: bool = True
    chunks: bool = True
    defers: bool = False
    skips: bool = False
    coded: bool = False
    beside: str = ""


@part
class Prefill:
    """How a prompt enters an empty cache. This class: one compressing pass, whole or in chunks.

    Subclasses declare their `traits` and `probe`, and override `pruning` or `shorten`; `jkv.prompts.prefill` runs them.

    Attributes:
        traits: what else it does.
        probe: extra queries that fill the column `PROBED`, or None.
    """

    traits: ClassVar[PrefillTraits] = PrefillTraits()
    probe: ClassVar[Probe | None] = None

    def bound(self, params: Params) -> Self:
        """Return this prefill with the weights trained for the model; ValueError if they belong to another model."""
        return self

    def pruning(self, model: ModelConfig, layer: int) -> Any:
        """Return the `jkv.cache.spec.Pruning` of the tokens that continue after a layer, or None if all do."""
        return None

    def shorten(self, params: Params, rows: list[list[int]], runner: DraftRunner) -> list[list[int]]:
        """Return the token ids to read of each prompt.

        Args:
            params: the model.
            rows: token ids of each prompt.
            runner: runs a draft model over them.
        """
        return rows

    def check(self, config: Any, model: ModelConfig, chunk: int) -> None:
        """Raise ValueError if this prefill cannot work with a CacheConfig, or in chunks of `chunk` tokens."""
