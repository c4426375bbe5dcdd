"""Drafts by the model that verifies them, through a part of its own cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jkv.cache.cache import Cache, tree_bytes
from jkv.cache.spec import LayerConfig
from jkv.core.self_draft_cache import Tiers, alone, beside, excerpt
from jkv.methods.config import CacheConfig
from jkv.speculative.autoregressive import Drawing, Draws, Known
from jkv.speculative.draft_length import NODES
from jkv.speculative.proposer import Refusal, Verifier


@dataclass
class Excerpts(Drawing):
    """Guesses by the model that verifies, through what a selector picks of its cache (TriForce, 2404.11912).

    What the selector of `config` picks of each tier for the first token after a flush is copied, and serves until the
    next flush; the recent window is copied for each guess. Nothing is read twice, the prompt included, and what is held
    is what is picked. It draws as the verifier does, with the same noise.

    Raises Refusal for a cache of which units of slots cannot be copied, or a selector that leaves layers whole.
    """

    config: CacheConfig
    since: int = field(default=0, init=False, repr=False)  # the flush after which the copy was made: tokens before it
    tiers: tuple[Tiers, ...] = field(default=(), init=False, repr=False)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        if verifier is not None:
            self._plan(verifier.state.cache)
        self.tiers = ()
        super().begin(rows, new, verifier)

    def draw(self, rows: list[list[int]], most: int, verifier: Verifier | None = None, known: Known = ()) -> Draws:
        assert verifier is not None
        params, state, sampling = verifier.params, verifier.state, verifier.sampling
        cache, since = state.cache, int(state.count) - int(state.cache.fill)
        bare = replace(state, cache=cache.bare, out=state.out[:, :0], trace=None)
        if not self.tiers or self.since != since:
            self.tiers, self.since = (), since  # the old copy goes before the new one is made
            self.tiers = excerpt(params, tuple(x.view for x in self._plan(cache)), bare, sampling)
        untiered = replace(cache.bare, layers=tuple(replace(x, tiers=()) for x in cache.layers))
        copy = beside(replace(bare, cache=untiered), new=NODES)  # of one size: each would be programs of its own
        layers = tuple(replace(x, tiers=y) for x, y in zip(copy.cache.layers, self.tiers, strict=True))
        own = replace(copy.cache, layers=layers, plan=alone(cache.plan), name=cache.name, new=cache.new)
        self.nbytes = max(self.nbytes, tree_bytes(layers))
        before = [row[:-1] if on else row for row, on in zip(rows, state.alive.tolist(), strict=True)]
        found, after = self.decoded(params, replace(copy, cache=own), sampling, before, most, known, drawn=1)
        self.tiers = tuple(x.tiers for x in after.layers)
        return found

    def branch(self, rows: list[list[int]]) -> Excerpts:
        behind = None if self.behind is None else self.behind.branch(rows)
        branch = replace(self, behind=behind)
        branch.odds, branch.pace = self.odds, self.pace
        return branch

    def _plan(self, cache: Cache) -> tuple[LayerConfig, ...]:
        """The plan of a cache whose tiers are read by the selector; Refusal where they cannot be."""
        return tuple(self._layer(one, cache, i) for i, one in enumerate(cache.plan))

    def _layer(self, one: LayerConfig, cache: Cache, i: int) -> LayerConfig:
        select = self.config.select and self.config.select.for_layer(cache.model, i)
        if select is None:
            raise Refusal(f"draft={self.config}: layer {i} would be copied whole; give a selector of all layers")
        if one.pooled is not None:
            raise Refusal(
                f"draft={self.config}: the heads of {cache.name} share slots, of which no head has pages; leave draft= "
                "out, or take a cache without pooled"
            )
        far = [tier.unit for tier in one.tiers if any(tier.far)]
        if any(unit != select.unit for unit in far):
            raise Refusal(
                f"draft={self.config}: codes come from the host in units of {far[0]} tokens, and it picks "
                f"{select.unit}; take page={far[0]}"
            )
        return replace(one, tiers=tuple(replace(tier, select=select) for tier in one.tiers))
