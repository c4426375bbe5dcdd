"""SnapKV and its kin: attention from the last queries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from jkv.arrays.gather import take_along
from jkv.arrays.pytree import part
from jkv.attention.mask import visible
from jkv.methods.base import Pool, Protect, Wrapper, across, mass, prompt_column, rank_by, window_attention
from jkv.methods.budgets.layers import Pyramid
from jkv.methods.budgets.sizes import Keep, Size
from jkv.methods.config import RELATIVE
from jkv.methods.eviction.wrappers import AcrossHeads
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Born, Columns, Evidence, Needs, Score

if TYPE_CHECKING:
    from jkv.models import ModelConfig


def even_attention(ev: Evidence) -> Array:
    """FINCH: attention from the newest queries, normalised by how many tokens each query sees.

    s_j = sum_i n_i p[i,j], averaged over G, n_i the number of tokens that query i sees. So later queries, which spread
    their attention over more tokens, count as much as earlier ones. Source: FINCH (2408.00167).
    """
    assert ev.kept is not None
    window = ev.plan.window

    def seen(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
        return jnp.broadcast_to(visible(q_pos, pos, window)[:, :, None], p.shape).astype(jnp.float32).sum(-1)

    count = jnp.maximum(ev.over_keys(seen, ev.kept), 1)
    return mass(ev, replace(ev.kept, lse=ev.kept.lse - jnp.log(count)), "mean")


@part
class PathMass(Score):
    """RPC: attention from the last `queries` queries to generated tokens, without the recent window.

    s_j = sum_i softmax_j(q_i . k_j scale) over these tokens, averaged over G; tokens of a prompt, in this turn or an
    earlier one, get 0. Source: RPC (2505.13866).
    """

    queries: int = 32

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def birth(self, new: Born) -> Columns:
        return prompt_column(new)

    def rank(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        last, longest = (ev.seen - ev.plan.recent)[:, None, None], ev.plan.longest
        # Mark the positions of prompt tokens in a table.
        at = jnp.where(ev.live & (ev.columns["given"] > 0), ev.pos, longest)
        told = jnp.zeros((*at.shape[:2], longest + 1), bool)
        told = jnp.put_along_axis(told, at, True, -1, inplace=False).at[:, :, longest].set(False)

        def of_path(p: Array, pos: Array) -> Array:
            path = (pos < last) & ~take_along(told, jnp.clip(pos, 0, longest), -1)
            return jnp.where(path[:, :, None, None], p, 0)

        # Renormalise the softmax over the generated tokens.
        total = ev.over_keys(lambda p, q_pos, pos, index: of_path(p, pos).sum(-1), ev.kept)
        asked = replace(ev.kept, lse=ev.kept.lse + jnp.log(jnp.maximum(total, 1e-30)))
        return ev.fold(lambda p, q_pos, pos, index: of_path(p, pos).mean(2).sum(2), asked)


@part
class Critical(Wrapper):
    """CriticalKV: keep the best `share` by the score, then the tokens that contribute most to the layer's output.

    The rank of the others is (s_j + `epsilon`) mean over G of |W_h v_j|_1, W_h the columns of the layer's output matrix
    for query head h. The share is of everything that is kept, the recent window included. Source: CriticalKV
    (2502.03805), as its authors gave it to the field's reference library.
    """

    share: float = 0.5
    epsilon: float = 1e-4

    def for_layer(self, model: ModelConfig, layer: int) -> Score:
        if model.latent:
            raise ValueError(
                f"criticalkv: values of this {model.family} model are latents, and what they add to the output is not "
                "one product; take the score alone, such as snapkv"
            )
        return replace(self, score=self.score.for_layer(model, layer))

    def birth(self, new: Born) -> Columns:
        b, h, t, d = new.v.shape
        out = new.out.astype(jnp.float32).reshape(new.out.shape[0], h, -1, d)

        # One head at a time, because the products of all heads are as large as their outputs.
        def head(
            x: tuple[Array, Array],
        ) -> Array:
            v, w = x
            moved = [jnp.abs(jnp.einsum("btd,ed->bte", v, w[:, g])).sum(-1) for g in range(w.shape[1])]
            return jnp.stack(moved).mean(0)

        sizes = jax.lax.map(head, (new.v.astype(jnp.float32).swapaxes(0, 1), out.swapaxes(0, 1)))
        return self.score.birth(new) | {"moves": sizes.swapaxes(0, 1)}

    def observe(self, ev: Evidence) -> Columns:
        return ev.columns | self.score.observe(ev)

    def rank(self, ev: Evidence) -> Array:
        rank = self.score.rank(ev)
        moves = ev.columns["moves"] if rank.shape[1] > 1 else across(ev.columns["moves"])
        goes = (ev.may_go & ev.live)[:, : rank.shape[1]] & jnp.isfinite(rank)
        order = jnp.argsort(jnp.where(goes, -rank, jnp.inf), axis=-1, stable=True)
        place = jnp.argsort(order, axis=-1)
        whole = (ev.limit + ev.plan.exact).astype(jnp.float32)
        first = jnp.floor(self.share * whole).astype(jnp.int32) - ev.plan.exact
        others = (rank + self.epsilon) * moves
        return jnp.where(goes, jnp.where(place < first[:, None, None], jnp.inf, others), rank)


@method(
    "2404.14469",
    "exact in one piece; while generating, the last queries at each flush decide",
    "like the full cache on 16 long-context sets; 3.6x the speed in 8.2x less memory at 16K tokens",
)
def snapkv(
    size: Size,
    *,
    window: Positive = 32,
    pool: Positive = 5,
    kind: str = "avg",
) -> Axes:
    """SnapKV: attention from the last `window` queries, pooled over neighbours."""
    return dict(
        score=Pool(score=rank_by(window_attention, queries=window), width=pool, kind=kind),
        budget=size,
        recent=window,
    )


@method(
    "2408.00167",
    "exact in one piece, for a question of `window` tokens; in chunks it is read once, after all of them",
    "long inputs up to 93x smaller with their meaning kept, without fine-tuning",
)
def finch(size: Size, *, window: Positive = 32) -> Axes:
    """FINCH: attention from the question, a prompt's last `window` tokens, times how many tokens each of them sees.

    Positions within the cache; what is generated is kept on top.
    """
    return dict(score=rank_by(even_attention, queries=window), budget=size, tiers=RELATIVE, recent=window, append=1.0)


@method(
    "2502.03805",
    "as snapkv, which it wraps here; a pool of heads (pooled) ranks all of them so, not each by its part",
    "more than half of the loss of SnapKV and others gone on 29 sets (no figure of memory in the abstract)",
)
def criticalkv(
    size: Size, *, window: Positive = 32, pool: Positive = 5, share: float = 0.5, epsilon: float = 1e-4
) -> Axes:
    """CriticalKV: half of the budget by SnapKV's score, the rest by it times what a value adds to the layer's output.

    epsilon: added to the mean attention, so that a large value counts though nobody looked.
    """
    if not 0 <= share <= 1 or epsilon < 0:
        raise ValueError(f"criticalkv: share={share}, epsilon={epsilon}: a part of the budget, from 0 to 1; 0 or more")
    seen = Pool(score=rank_by(window_attention, queries=window), width=pool)
    score = Critical(score=seen, share=float(share), epsilon=float(epsilon) * window)  # the score is a sum of so many
    return dict(score=score, budget=size, recent=window)


@method(
    "2401.06104",
    "prefill exact; while generating, the last query of each block decides",
    "nearly on par with the full model, in some cases with an eighth of the cache and 4.8x the throughput",
)
def tova(size: Size) -> Axes:
    """TOVA: attention from the last query, one set of tokens for all heads."""
    return dict(score=AcrossHeads(score=rank_by(window_attention, queries=1)), budget=size, recent=0)


@method(
    "2505.13866",
    "lagged as the paper is; events come `recent` tokens early",
    "1.60x the throughput of QwQ-32B for 1.2% less on AIME 2024",
)
def rpc(*, share: float = 0.25, period: Positive = 1024, window: Positive = 32, pool: Positive = 7) -> Axes:
    """RPC: the prompt stays, and a `share` of the generated tokens, by the attention of the last `window`."""
    if not 0 < share < 1:
        raise ValueError(f"rpc: share={share}: the fraction of generated tokens that is kept, above 0 and below 1")
    path = Pool(score=AcrossHeads(score=PathMass(queries=window)), width=pool)
    return dict(
        score=Protect(score=path, prompt=True),
        budget=Keep(keep=1.0),
        append=float(share),
        recent=window,
        block=period,
    )


@method("2406.02069", "as snapkv", "like the full cache on LongBench with 12% of it; ahead of the others most at 0.7%")
def pyramidkv(size: Size, *, window: Positive = 32, pool: Positive = 5, beta: Positive = 20) -> Axes:
    """PyramidKV: SnapKV's score, more tokens in the lower layers; the size is their mean."""
    size = size.above("pyramidkv", window, "its observation window")
    return dict(
        score=Pool(score=rank_by(window_attention, queries=window), width=pool),
        budget=Pyramid(size=size, window=window, beta=beta),
        recent=window,
    )


@method(
    "2407.11550",
    "as snapkv",
    "better than equal heads on RULER and LongBench, question known or not (no figure in the abstract)",
)
def adakv(
    size: Size,
    *,
    window: Positive = 32,
    pool: Positive = 7,
    floor: float = 0.2,
) -> Axes:
    """Ada-KV: SnapKV's score with a maximum over neighbours; the heads of a layer compete for its slots."""
    return dict(
        score=Pool(score=rank_by(window_attention, queries=window), width=pool, kind="max"),
        budget=size,
        pooled=float(floor),
        recent=window,
    )
