"""Mixed precision: important tokens get more bits; ZipCache, MiKV, ARKV, ZipVL."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.base import Dense, Pool, Wrapper, across, rank_by, window_attention
from jkv.methods.budgets.layers import Inside
from jkv.methods.budgets.sizes import All, Size
from jkv.methods.config import TierSpec
from jkv.methods.eviction.cake import Tailed
from jkv.methods.eviction.h2o import Accumulated
from jkv.methods.eviction.salience import Salience, Sticky
from jkv.methods.eviction.wrappers import AcrossHeads, ByPhase
from jkv.methods.prefill.deferred import Deferred
from jkv.methods.quantization.calibrated import Equalised, with_folder
from jkv.methods.quantization.groups import Widest
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.per_channel_scale import Separable
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Evidence


def integer_tier(bits: int, group: int, size: float | None = None) -> TierSpec:
    """A tier of keys by channel and values by token in so many bits; 16 are the plain floats."""
    if bits == 16:
        return TierSpec(k=Dense(), v=Dense(), size=size)
    return TierSpec(k=Affine(bits=bits, axis="channel", group=group), v=Separable(bits=bits, group=group), size=size)


@method(
    "2405.14256",
    "approximation: integers, scales of `group` tokens; nothing is evicted or coded twice",
    "4.98x smaller with 0.38% less on GSM8k, Mistral-7B",
)
def zipcache(
    *, high: int = 4, low: int = 2, share: float = 0.6, group: Positive = 20, recent: int = 0, block: Positive = 100
) -> Axes:
    """ZipCache: the salient `share` of the tokens in `high` bits, the others in `low`; 16 bits are the plain floats."""
    if not 0 < share <= 1:
        raise ValueError(f"zipcache: share={share}: the fraction of tokens in {high} bits, above 0 and at most 1")
    tiers = integer_tier(high, group, float(share)), integer_tier(low, group)
    return dict(score=Sticky(score=Salience()), tiers=tiers, recent=recent, block=block)


@method(
    "2402.18096",
    "reconstruction: the balancer of keys is the model's, not a prompt's; demoted at a flush, coded once",
    "of lines to retrieve 99.8% with half of the entries at 3 bits, 43% with that half gone, Llama-2-7B",
)
def mikv(
    *,
    keep: float = 0.25,
    bits: Positive = 4,
    group: int = Widest(32),
    recent: int = 32,
    balance: bool = False,
    moments: str | None = None,
) -> Axes:
    """MiKV: what H2O would evict stays at `bits` bits; the heavy `keep` of all tokens is exact, or in another codec.

    balance: the keys of the others are coded in channels that are as large as those of queries, by the folder
    `moments` of `jkv calibrate moments`.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"mikv: keep={keep}: the fraction of tokens that stays as it is, above 0 and at most 1")
    low = Affine(bits=bits, group=group)
    keys = with_folder(moments, Equalised(inner=low)) if balance else low
    return dict(score=Accumulated(), tiers=(TierSpec(size=float(keep)), TierSpec(k=keys, v=low)), recent=recent)


@method(
    "-",
    "reconstruction: demoted as soon as a prompt is read, and once; 8-bit integers for its fp8",
    "about 97% of the accuracy in a quarter of the memory",
)
def arkv(
    size: Size,
    *,
    share: float | None = None,
    window: int = 32,
    pool: Positive = 5,
    gamma: float = 263.81,
    step: int | None = None,
) -> Axes:
    """ARKV: a layer's best tokens stay as they are, as many as it asks for (or a `share`); the others get 8 bits."""
    size = size.above("arkv", window, "its observation window")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"arkv: share={share}: the fraction of the budget that stays as it is, above 0 and at most 1")
    if step is not None and step < 1:
        raise ValueError(f"arkv: step={step}: tokens by which the exact tiers of layers differ, 1 or more")
    low = Affine(bits=8)
    score = ByPhase(score=Tailed(queries=window, gamma=float(gamma)), path=rank_by(window_attention, queries=1))
    asked = dict(budget=Inside(size=size, window=window, step=step), prefill=Deferred())
    return (asked if share is None else dict(budget=size)) | dict(
        score=Pool(score=score, width=pool),
        tiers=(TierSpec(size=1.0 if share is None else float(share)), TierSpec(k=low, v=low)),
        recent=window,
        block=max(((size.tokens or 512) - window) // 3, 1),
    )


@part
class Reaching(Wrapper):
    """ZipVL: any score, whose layer statistic is how many of the best old tokens hold a `share` of the total.

    The score must keep the same tokens for all heads; old are all tokens but the `newest`. Source: ZipVL (2410.08584).
    """

    share: float = 0.9
    newest: int = 64

    def rank(self, ev: Evidence) -> Array:
        return self.score.rank(ev)

    def statistic(self, ev: Evidence) -> Array:
        old = (ev.pos < (ev.seen - self.newest)[:, None, None]) & ev.live
        best = jnp.sort(jnp.where(old[:, 0], across(self.rank(ev))[:, 0], 0), -1, descending=True)
        total = jnp.cumsum(best, -1)
        before = jnp.concatenate([jnp.zeros_like(total[:, :1]), total[:, :-1]], -1)
        return (before < self.share * total[:, -1:]).sum(-1).astype(jnp.float32)


@method(
    "2410.08584",
    "reconstruction, for text: a prompt attends to all of itself; what is generated gets the lower bits",
    "prefill 2.6x as fast in half of the memory, 0.2% less on Video-MME, LongVA-7B",
)
def zipvl(
    *, mass: float = 0.95, high: int = 4, low: int = 2, group: Positive = 20, window: int = 64, step: int = 240
) -> Axes:
    """ZipVL: in each layer the fewest tokens that have `mass` of the attention get `high` bits, the others `low`."""
    if not 0 < mass <= 1 or step < 1:
        raise ValueError(f"zipvl: mass={mass}, step={step}: above 0 and at most 1; 1 token or more")
    score = Reaching(
        score=AcrossHeads(score=rank_by(window_attention, queries=window)), share=float(mass), newest=window
    )
    return dict(
        score=Sticky(score=score),
        budget=Inside(size=All(), window=window, step=step),
        prefill=Deferred(),
        tiers=(integer_tier(high, group, 1.0), integer_tier(low, group)),
        recent=window,
    )
