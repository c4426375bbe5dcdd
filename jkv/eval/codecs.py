"""What a codec costs, a forward pass a text: every token attends to all before it as their codes decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.core.blocks import attended, embedded, mixed
from jkv.core.cache import Cache
from jkv.core.compiled import ANY, Cost, Run, call, flow, program
from jkv.core.loop import copied
from jkv.core.positions import pad
from jkv.eval.attention import to_spare
from jkv.generation.report import divergence, tier_bits
from jkv.generation.sizes import empty
from jkv.methods import as_config
from jkv.methods.checks import check
from jkv.methods.config import CacheConfig
from jkv.methods.prefills import Coded
from jkv.models import Params, family

SLICE = 64  # tokens whose logits exist at once


@flow(arguments=(None, ANY, None), results=None)
def read(params: Params, cache: Cache, ids: Array, run: Run = call) -> Array:
    """The last block's output [B,T,E] for texts i32[B,T], read into an empty cache that is not kept."""
    x, pos, _, _ = run(embedded, params.ends, ids, cache.counts, cache.fill, None, stay=None, later=False)
    layers, states = iter(zip(cache.layers, cache.plan, strict=True)), iter(cache.states)
    for i in range(cache.model.depth):
        one = params.block(i)
        if cache.model.attends(i):
            layer, plan = next(layers)
            x = run(attended, one, layer, plan, x, pos, None, fresh=True, rows=None, placed=False)[0]
        else:
            x = run(mixed, one, run(copied, next(states)), x, pos)[0]
    return x


@program(arguments=(None, None, None, None), results=None)
def compared(ends: Params, full: Array, own: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """KL in nats, whether both prefer the same, and the negative log-likelihood of i32[B,n], each [B,n].

    full, own [B,n,E]: what the last block says of the tokens before.
    """
    full, own = (family(ends.config).head(ends, x) for x in (full, own))
    nll = -jnp.take_along_axis(jax.nn.log_softmax(own), tokens[..., None], -1)[..., 0]
    return (*divergence(full, own), nll)


class Codecs:
    """Texts i32[n,T] read by the full cache, once, and then by any codec; what follows `prefix` tokens counts.

    A text at a time. Every token is coded, its own key and value too, but for those at the end that fill no unit.
    """

    def __init__(self, params: Params, ids: np.ndarray, prefix: int) -> None:
        self.params, self.ids, self.prefix = params, ids, prefix
        self.full = [self._read(as_config(None), row)[0] for row in ids]

    def _read(self, config: CacheConfig, row: np.ndarray) -> tuple[Array, Cache]:
        config = replace(config, recent=0, prefill=Coded())
        check(config, self.params.config)
        config = config.bound(self.params)
        cache = empty(config, self.params.config, 1, len(row), 0, self.params.embed.dtype)
        return Cost().run(read, self.params, cache, pad([row.tolist()], len(row))), cache

    def by_layer(self, config: CacheConfig) -> dict[str, Any]:
        """KL if one layer alone is coded, the others exact; and `spare`, the layers that cost most."""
        every = range(self.params.config.layers)
        costs = [self(replace(config, exact_layers=tuple(j for j in every if j != i)))["kl"] for i in every]
        return {"by_layer": costs, "spare": to_spare(costs)}

    def __call__(self, config: CacheConfig) -> dict[str, Any]:
        """KL and agreement with the full cache, and perplexity, by text too; bits of a number of keys and of values."""
        found, bits = [], (0.0, 0.0)
        for row, full in zip(self.ids, self.full, strict=True):
            own, cache = self._read(config, row)
            bits = tier_bits(cache)
            parts = zip(*self._compared(full, own, row), strict=True)
            found.append([float(np.concatenate(x, 1).mean(dtype=float)) for x in parts])
        kl, agree, nll = np.array(found).T
        return {
            "kl": round(float(kl.mean()), 6),
            "agree": round(float(agree.mean()), 4),
            "ppl": round(float(np.exp(nll.mean())), 4),
            "nll": round(float(nll.mean()), 5),
            "kl_by_text": kl.round(6).tolist(),
            "nll_by_text": nll.round(5).tolist(),
            "bits": list(bits),
        }

    def _compared(self, full: Array, own: Array, row: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Slice by slice; the last one is moved back to be as long as all, and gives its new tokens."""
        n = min(SLICE, len(row) - self.prefix)
        for start in range(self.prefix - 1, len(row) - 1, n):
            at = min(start, len(row) - 1 - n)
            parts = (full[:, at : at + n], own[:, at : at + n], jnp.asarray(row[None, at + 1 : at + n + 1]))
            made = compared(self.params.ends, *parts)
            yield tuple(np.asarray(x)[:, start - at :] for x in made)
