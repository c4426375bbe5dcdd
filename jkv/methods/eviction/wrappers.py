"""Wrappers of any score: across heads, per query, counted, normalised; sums of scores, and one per phase."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import leaf, part
from jkv.cache.cache import MERGED
from jkv.methods.base import Wrapper, across
from jkv.methods.eviction.keys import norms
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig, Params


@part
class AcrossHeads(Wrapper):
    """Keep the same tokens in all kv heads of a layer, by the mean of their ranks."""

    uniform = True  # type: ignore[assignment]

    def rank(self, ev: Evidence) -> Array:
        return across(self.score.rank(ev))


@part
class PerQuery(Wrapper):
    """Divide the score by the number of queries since the token's birth, its own included: a sum becomes a mean."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        age = ev.seen[:, None, None] - ev.pos[:, : rank.shape[1]]
        if ev.plan.window is not None:
            age = jnp.minimum(age, ev.plan.window)
        return rank / jnp.maximum(age, 1).astype(jnp.float32)


@part
class Even(Wrapper):
    """Divide the score by its mean over the live tokens."""

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        live = ev.live[:, : rank.shape[1]] & jnp.isfinite(rank)
        count = jnp.maximum(live.sum(-1, keepdims=True), 1).astype(jnp.float32)
        mean = jnp.where(live, rank, 0).sum(-1, keepdims=True) / count
        return rank / jnp.maximum(mean, 1e-30)


@part
class Remembered(Wrapper):
    """Store the rank and the key norm of each token for a merge, in the columns `worth` and `k_norm`."""

    def birth(self, new: Born) -> Columns:
        return self.score.birth(new) | {"worth": jnp.zeros(new.k.shape[:3], jnp.float32), "k_norm": norms(new.k)}

    def observe(self, ev: Evidence) -> Columns:
        ev = replace(ev, columns={**ev.columns, **self.score.observe(ev)})
        return {**ev.columns, "worth": jnp.broadcast_to(self.score.rank(ev), ev.pos.shape)}

    def rank(self, ev: Evidence) -> Array:
        return ev.columns["worth"][:, :1] if self.uniform else ev.columns["worth"]


class Several(Score):
    """A score composed of several. Each sees its own columns, prefixed by its index, and the queries that it needs.

    All kv heads keep the same tokens if one of the scores does so.
    """

    @property
    def parts(self) -> tuple[Score, ...]:
        """The component scores, in order."""
        raise NotImplementedError

    def having(self, parts: tuple[Score, ...]) -> Score:
        """Return this score with other components."""
        raise NotImplementedError

    @property
    def needs(self) -> Needs:
        return reduce(or_, (s.needs for s in self.parts))

    @property
    def uniform(self) -> bool:
        return any(s.uniform for s in self.parts)

    def bound(self, params: Params) -> Score:
        return self.having(tuple(s.bound(params) for s in self.parts))

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        return self.having(tuple(s.for_layer(model, layer) for s in self.parts))

    def birth(self, new: Born) -> Columns:
        return self.joined(s.birth(new) for s in self.parts)

    def expires(self, columns: Columns, pos: Array, slots: int = 0) -> Array | None:
        """The earliest expiry of any component."""
        ends = [s.expires(columns_of(columns, i), pos, slots) for i, s in enumerate(self.parts)]
        return reduce(jnp.minimum, found) if (found := [x for x in ends if x is not None]) else None

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns | self.joined(s.observe(own) for s, own in self.views(ev))

    def views(self, ev: Evidence) -> list[tuple[Score, Evidence]]:
        """Each component with the evidence that it may see."""
        return [(s, seen_by(s, ev, i)) for i, s in enumerate(self.parts)]

    @staticmethod
    def joined(columns: Iterable[Columns]) -> Columns:
        """Columns of all components, prefixed by their index."""
        return {f"{i}.{name}": x for i, own in enumerate(columns) for name, x in own.items()}


def columns_of(columns: Columns, place: int) -> Columns:
    """Columns of the component at index `place`, without the prefix.

    >>> columns_of({"0.mass": 1, "1.0.mass": 2}, 1)
    {'0.mass': 2}
    """
    mark = f"{place}."
    return {name.removeprefix(mark): x for name, x in columns.items() if name.startswith(mark)}


def seen_by(score: Score, ev: Evidence, place: int) -> Evidence:
    """Evidence as the component at index `place` sees it: its columns, here and in the lower layer, and its queries."""

    def own(x: Any) -> Any:
        return replace(x, columns=columns_of(x.columns, place))

    lower = ev.lower and replace(ev.lower, recent=own(ev.lower.recent), tiers=tuple(map(own, ev.lower.tiers)))
    kept = ev.kept.newest(score.needs.queries) if ev.kept is not None and score.needs.queries else None
    return replace(own(ev), window=own(ev.window), tiers=tuple(map(own, ev.tiers)), kept=kept, lower=lower)


@part
class Counted(Wrapper):
    """Count how many tokens were merged into each, in the column `merged`, which attention uses.

    An entry of n tokens in all has the logit q . k scale + log n, the logit of n equal keys together.
    """

    def birth(self, new: Born) -> Columns:
        return self.score.birth(new) | {MERGED: jnp.zeros(new.k.shape[:3], jnp.float32)}

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns | self.score.observe(ev)

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev)


@part
class Plus(Several):
    """A weighted sum of scores, and of their layer statistics. A rank of +inf or -inf in one of them is kept."""

    scores: tuple[Score, ...] = leaf()
    weights: tuple[float, ...]

    @property
    def parts(self) -> tuple[Score, ...]:
        return self.scores

    def having(self, parts: tuple[Score, ...]) -> Score:
        return replace(self, scores=parts)

    def statistic(self, ev: Evidence) -> Array:
        return self._sum([s.statistic(own) for s, own in self.views(ev)])

    def rank(self, ev: Evidence) -> Array:
        ranks = [s.rank(own) for s, own in self.views(ev)]
        return self._sum([across(x) if self.uniform else x for x in ranks])

    def _sum(self, terms: list[Array]) -> Array:
        total = reduce(
            jnp.add, [w * jnp.where(jnp.isfinite(x), x, 0) for w, x in zip(self.weights, terms, strict=True)]
        )
        total = jnp.where(reduce(or_, [x == jnp.inf for x in terms]), jnp.inf, total)
        return jnp.where(reduce(or_, [x == -jnp.inf for x in terms]), -jnp.inf, total)


@part
class ByPhase(Several):
    """One score for prompts, another (`path`) for flushes while generating. Both observe all queries.

    once: the first score ranks the first prompt only, and `path` everything after it.
    """

    score: Score = leaf()
    path: Score = leaf()
    once: bool = False

    def over(self, ev: Evidence) -> bool:
        """Whether `path` ranks."""
        return bool(ev.tiers) if self.once else ev.generating

    @property
    def parts(self) -> tuple[Score, ...]:
        return self.score, self.path

    def having(self, parts: tuple[Score, ...]) -> Score:
        return replace(self, score=parts[0], path=parts[1])

    def statistic(self, ev: Evidence) -> Array:
        return self.score.statistic(seen_by(self.score, ev, 0))

    def rank(self, ev: Evidence) -> Array:
        score, own = self.views(ev)[self.over(ev)]
        return across(score.rank(own)) if self.uniform else score.rank(own)
