"""ShadowKV: a prompt's keys in a subspace of its own, read by the mean keys of pages."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jkv.arrays.pytree import part
from jkv.methods.base import Dense, rank_by
from jkv.methods.config import TierSpec
from jkv.methods.eviction.keys import norms
from jkv.methods.quantization.per_prompt import OfPrompt, after_prompt
from jkv.methods.registry import Axes, Positive, method
from jkv.methods.selection.base import Ranked, Vote, logits
from jkv.protocols import Entered, Evidence, Look


@part
class Landmark(Ranked):
    """ShadowKV: read the `pages` pages j whose mean rotated key m_j has the largest attention weight.

    Weight: softmax_j(q . m_j / sqrt(D)) of each query head, the maximum over G. Summary: m [D] per page. Source:
    ShadowKV (2410.21465), which keeps pages apart that their mean represents badly: these are ranked by the score
    `unit_outliers`.
    """

    unit: int = 8
    pages: int = 256
    vote: Vote = Vote(soft=True)

    def summarize(self, new: Entered) -> Array:
        return new.k.mean(3)

    def score(self, look: Look) -> Array:
        return logits(look.q, look.summary)


def unit_outliers(ev: Evidence, *, unit: int) -> Array:
    """ShadowKV: units of neighbouring tokens that their mean key represents worst.

    rank = -cos(k, mean) of the unit's worst key over all kv heads. Units are cut from the oldest token after the sinks;
    what a tier already holds stays. Source: ShadowKV (2410.21465), where each kv head has its own units.
    """
    fixed = ev.slots + ev.plan.sinks
    k = ev.window.k[:, :, ev.plan.sinks :].astype(jnp.float32)
    b, h, n, d = k.shape
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -n % unit), (0, 0)))
    k = k.reshape(b, h, -1, unit, d)
    mean = k.mean(3, keepdims=True)
    cosine = (k * mean).sum(-1) / jnp.maximum(norms(k) * norms(mean), 1e-30)
    new = jnp.repeat(-cosine.min((1, 3)), unit, 1)[:, None, :n]
    return jnp.concatenate([jnp.full((b, 1, fixed), jnp.inf), new], 2)


@method(
    "2410.21465",
    "reconstruction: values stay on the device; outlier pages are the worst of all kv heads; generated ones are picked",
    "up to 6x larger batches and 3.04x the throughput on an A100, without a loss of accuracy",
)
def shadowkv(
    *,
    rank: int = 160,
    pages: Positive = 256,
    page: Positive = 8,
    outliers: int = 48,
    values: int = 16,
    recent: int = 32,
) -> Axes:
    """ShadowKV: a prompt's un-rotated keys, all kv heads together, as `rank` numbers in a subspace of its own.

    It keeps every token; a rank above the channels of all heads keeps all of each. A step reads the `pages` whose mean
    key has the most attention. The prompt's `outliers`, pages whose worst key is least like their mean, are plain
    floats and read in any case. values: bits of values, 2, 3, 4 or 8; 16 are the plain floats. What follows the prompt
    stays as it is.
    """
    apart = TierSpec(k=Dense(), v=Dense(), size=outliers * page, whole=True)
    prompt = after_prompt(OfPrompt(inner=Dense(), width=rank, centered=False), values, "read")["tiers"]
    select = Landmark(unit=page, pages=pages)
    return dict(
        score=rank_by(unit_outliers, uniform=True, unit=page), tiers=(apart, *prompt), select=select, recent=recent
    )
