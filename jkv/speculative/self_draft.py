"""Self-drafting through a selected part of the verifier's own cache (TriForce)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jkv.cache.cache import Cache, tree_bytes
from jkv.cache.spec import LayerConfig
from jkv.core.self_draft_cache import Tiers, beside, draft_plan, excerpt
from jkv.methods.config import CacheConfig
from jkv.speculative.autoregressive import Drawing, Draws, Known
from jkv.speculative.draft_length import NODES
from jkv.speculative.proposer import Refusal, Verifier


@dataclass
class Excerpts(Drawing):
    """Drafting by the verifying model, through the part of its cache that a selector picks (TriForce, 2404.11912).

    The pages that `config`'s selector picks in each tier for the first token after a flush are copied, and used until
    the next flush. The recent window is copied for each proposal. Nothing is prefilled twice, and only the copies take
    memory. Tokens are sampled with the verifier's settings and noise.

    Attributes:
        config: its selector picks the pages.
        since: generated tokens at the flush that the copies belong to.
        tiers: the copies, per layer.

    Raises:
        Refusal: if the cache's pages cannot be copied, or the selector does not select in every layer.
    """

    config: CacheConfig
    since: int = field(default=0, init=False, repr=False)
    tiers: tuple[Tiers, ...] = field(default=(), init=False, repr=False)

    def begin(self, rows: list[list[int]], new: int, verifier: Verifier | None = None) -> None:
        """Check the verifier's cache."""
        if verifier is not None:
            self._plan(verifier.state.cache)
        self.tiers = ()
        super().begin(rows, new, verifier)

    def draw(self, rows: list[list[int]], most: int, verifier: Verifier | None = None, known: Known = ()) -> Draws:
        """Decode from the copies and the recent window."""
        assert verifier is not None
        params, state, sampling = verifier.params, verifier.state, verifier.sampling
        cache, since = state.cache, int(state.count) - int(state.cache.fill)
        bare = replace(state, cache=cache.bare, out=state.out[:, :0], trace=None)
        # Copy the selected pages after each flush.
        if not self.tiers or self.since != since:
            self.tiers, self.since = (), since  # free the old copies first
            self.tiers = excerpt(params, tuple(x.view for x in self._plan(cache)), bare, sampling)
        # Copy the recent windows, and decode.
        untiered = replace(cache.bare, layers=tuple(replace(x, tiers=()) for x in cache.layers))
        copy = beside(replace(bare, cache=untiered), new=NODES)  # a fixed size, because each size is another program
        layers = tuple(replace(x, tiers=y) for x, y in zip(copy.cache.layers, self.tiers, strict=True))
        own = replace(copy.cache, layers=layers, plan=draft_plan(cache.plan), name=cache.name, new=cache.new)
        self.nbytes = max(self.nbytes, tree_bytes(layers))
        before = [row[:-1] if on else row for row, on in zip(rows, state.alive.tolist(), strict=True)]
        found, after = self.decoded(params, replace(copy, cache=own), sampling, before, most, known, drawn=1)
        self.tiers = tuple(x.tiers for x in after.layers)
        return found

    def branch(self, rows: list[list[int]]) -> Excerpts:
        """Return a drafter that shares the calibration and will make its own copies."""
        behind = None if self.behind is None else self.behind.branch(rows)
        branch = replace(self, behind=behind)
        branch.odds, branch.pace = self.odds, self.pace
        return branch

    def _plan(self, cache: Cache) -> tuple[LayerConfig, ...]:
        """Return the layer plans with tiers read by this selector; Refusal if they cannot be."""
        return tuple(self._layer(one, cache, i) for i, one in enumerate(cache.plan))

    def _layer(self, one: LayerConfig, cache: Cache, i: int) -> LayerConfig:
        """Return the plan of layer i with tiers read by this selector; Refusal if they cannot be."""
        select = self.config.select and self.config.select.for_layer(cache.model, i)
        if select is None:
            raise Refusal(f"drafter={self.config}: layer {i} would be copied whole; give a selector of all layers")
        if one.pooled is not None:
            raise Refusal(
                f"drafter={self.config}: the heads of {cache.name} share slots, of which no head has pages; leave "
                "drafter= out, or take a cache without pooled"
            )
        far = [tier.unit for tier in one.tiers if any(tier.far)]
        if any(unit != select.unit for unit in far):
            raise Refusal(
                f"drafter={self.config}: codes come from the host in units of {far[0]} tokens, and it picks "
                f"{select.unit}; take page={far[0]}"
            )
        return replace(one, tiers=tuple(replace(tier, select=select) for tier in one.tiers))
