"""CAKE, ARKV: scores by the mean and variance of the attention from a window of queries."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.base import Pool, rank_by, window_attention
from jkv.methods.budgets.layers import Proportional
from jkv.methods.budgets.sizes import Size
from jkv.methods.eviction.wrappers import ByPhase
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Evidence, Needs, Score


@part
class Dispersed(Score):
    """CAKE: mean attention from the last n = `queries` queries plus its variance from query to query.

    rank_j = m_j + gamma v_j, averaged over G, with m_j = sum_i p[i,j] / n and v_j = sum_i (p[i,j] - m_j)^2 / (n - 1).
    The layer's statistic is E^(1/a) V^(1/b), (a, b) its `tempers`: E = -sum p log(p + 1e-10) and V = sum v_j over its
    query heads and the tokens before the window. Source: CAKE (2503.12491).
    """

    queries: int = 32
    gamma: float = 200.0
    tempers: tuple[float, float] = (1.0, 1.0)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def moments(self, ev: Evidence) -> tuple[Array, Array]:
        """m and v, f32[B,H,G,S]."""
        assert ev.kept is not None
        groups, n = ev.kept.q.shape[2], (ev.kept.pos >= 0).sum(1).astype(jnp.float32)[:, None, None, None]

        def step(p: Array, q_pos: Array, pos: Array, index: Array) -> tuple[Array, ...]:
            return tuple(x.sum(3)[:, :, i] for x in (p, p * p) for i in range(groups))

        sums = ev.fold(step, ev.kept)
        first, second = (jnp.stack(x, 2) for x in (sums[:groups], sums[groups:]))
        mean = first / jnp.maximum(n, 1)
        return mean, jnp.maximum(second - first * mean, 0) / jnp.maximum(n - 1, 1)

    def rank(self, ev: Evidence) -> Array:
        mean, variance = self.moments(ev)
        return (mean + self.gamma * variance).mean(2)

    def statistic(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        window = (ev.seen - self.queries)[:, None, None]

        def entropy(p: Array, q_pos: Array, pos: Array, index: Array) -> Array:
            p = jnp.where((pos < window)[:, :, None, None], p, 0)
            return -(p * jnp.log(p + 1e-10)).sum(-1)

        spread = ev.over_keys(entropy, ev.kept).sum((1, 2, 3))
        old = (ev.live & (ev.pos < window))[:, :, None]
        shift = jnp.where(old, self.moments(ev)[1], 0).sum((1, 2, 3))
        return spread ** (1 / self.tempers[0]) * shift ** (1 / self.tempers[1])


@part
class Tailed(Dispersed):
    """ARKV: as `Dispersed`, with the layer statistic E^(1/a) V^(1/b) K^(1/c), (a, b) its `tempers` and c its `tail`.

    K = sum of m4 / max(m2, 1e-8)^2 over the same heads and tokens, m2 and m4 the moments of p[i,j] about m_j.
    """

    gamma: float = 263.81
    tempers: tuple[float, float] = (7.774, 5.407)
    tail: float = 5.528

    def statistic(self, ev: Evidence) -> Array:
        assert ev.kept is not None
        groups, mean = ev.kept.q.shape[2], self.moments(ev)[0]

        def step(p: Array, q_pos: Array, pos: Array, index: Array) -> tuple[Array, ...]:
            off = p - jnp.take(mean, index, axis=-1)[:, :, :, None]
            off = jnp.where((q_pos >= 0)[:, None, None, :, None], off, 0)
            return tuple((off**n).sum(3)[:, :, i] for n in (2, 4) for i in range(groups))

        n = jnp.maximum((ev.kept.pos >= 0).sum(1), 1).astype(jnp.float32)[:, None, None, None]
        sums = ev.fold(step, ev.kept)
        m2, m4 = (jnp.stack(x, 2) / n for x in (sums[:groups], sums[groups:]))
        old = (ev.live & (ev.pos < (ev.seen - self.queries)[:, None, None]))[:, :, None]
        tails = jnp.where(old, m4 / jnp.square(jnp.maximum(m2, 1e-8)), 0).sum((1, 2, 3))
        return super().statistic(ev) * tails ** (1 / self.tail)


@method(
    "2503.12491",
    "final shares: a prompt is whole until all layers are asked; decode lagged by block - 1",
    "the same performance with 3.2% of the cache; decode over 10x as fast at 128K tokens",
)
def cake(
    size: Size,
    *,
    window: int = 32,
    pool: Positive = 5,
    gamma: float = 200.0,
    tempers: tuple[float, float] = (1.0, 1.0),
    step: int | None = None,
) -> Axes:
    """CAKE: layers whose attention is spread and moves get more of the budget; slots come in steps of `step` tokens."""
    size = size.above("cake", window, "its observation window")
    if len(tempers) != 2 or min(*tempers) <= 0 or (step is not None and step < 1) or gamma < 0:
        raise ValueError(f"cake: tempers={tempers}, step={step}, gamma={gamma}: two above 0, 1 or more, and 0 or more")
    prompt = Dispersed(queries=window, gamma=float(gamma), tempers=(float(tempers[0]), float(tempers[1])))
    return dict(
        score=Pool(score=ByPhase(score=prompt, path=rank_by(window_attention, queries=1)), width=pool),
        budget=Proportional(size=size, window=window, step=step),
        prefill=Deferred(),
        recent=window,
    )
