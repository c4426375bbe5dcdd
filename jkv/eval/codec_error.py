"""Codec error: KL, agreement and perplexity of forward passes that attend to decoded keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.pytree import part
from jkv.cache.cache import Cache
from jkv.cache.padding import pad
from jkv.core.compilation import ANY, Cost, Run, call, flow, program
from jkv.core.decode_loop import copied
from jkv.core.layer_step import attended, embedded, entering, mixed
from jkv.eval.attention_recall import to_spare
from jkv.generation.receipt import divergence, tier_bits
from jkv.methods import as_config
from jkv.methods.base import Dense
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.methods.prefill.deferred import Coded
from jkv.methods.quantization.rotation import Turned
from jkv.models import Params, family
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Code, Codec

Side = Literal["keys", "values"]
SIDES: tuple[Side, ...] = ("keys", "values")
BANDS = 4  # bands of key channels
FAR = 8  # a layer is an outlier above this multiple of the median
SLICE = 64  # tokens whose logits exist at once


@flow(arguments=(None, ANY, None, None), results=None, static_argnames=("first", "end", "fresh"))
def read(
    params: Params,
    cache: Cache,
    ids: Array,
    x: Array | None = None,
    first: int = 0,
    end: int | None = None,
    fresh: bool = True,
    run: Run = call,
) -> Array:
    """Run texts through layers that attend to a cache's decoded keys and values, without keeping the cache.

    Args:
        cache: The cache to attend through.
        ids: i32[B,T], token ids.
        x: [B,T,E], the input of layer `first`, or None for the embeddings.
        first: First layer to run.
        end: Layer to stop before; None for the last layer.
        fresh: Whether the cache is empty.

    Returns:
        [B,T,E], the output of the last layer that ran.
    """
    stay = None if fresh else cache.stay
    out, pos, _, steps = run(embedded, params.ends, ids, cache.counts, cache.fill, None, stay=stay, later=not fresh)
    out = out if x is None else x
    layers, states = iter(zip(cache.layers, cache.plan, strict=True)), iter(cache.states)
    for i in range(cache.model.depth if end is None else end):
        one = params.block(i)
        if cache.model.attends(i):
            layer, plan = next(layers)
            if i >= first:
                how = {"fresh": fresh, "rows": None, "placed": False}
                out = run(attended, one, layer, plan.view, out, pos, ids, steps, **how)[0]
        else:
            state = next(states)
            if i >= first:
                state = run(copied, state)
                state = state if fresh else run(entering, one, state, jnp.bool_(True))
                out = run(mixed, one, state, out, pos)[0]
    return out


@program(arguments=(None, None, None, None), results=None)
def compared(ends: Params, full: Array, own: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Compare two models' predictions of tokens i32[B,n].

    Args:
        ends: The weights of the embedding and the head.
        full: [B,n,E], last hidden states of the full cache before each token.
        own: [B,n,E], the same states of the compressed cache.

    Returns:
        KL in nats, whether both have the same top token, and the negative log-likelihood under `own`, each [B,n].
    """
    full, own = (family(ends.config).head(ends, x) for x in (full, own))
    nll = -jnp.take_along_axis(jax.nn.log_softmax(own), tokens[..., None], -1)[..., 0]
    return (*divergence(full, own), nll)


def sliced(
    ends: Params, full: Array, own: Array, rows: np.ndarray, prefix: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield `compared` for the tokens of i32[B,T] from `prefix` on, `SLICE` tokens at a time.

    The last slice starts earlier, so that all have one shape, and yields only its new tokens.
    """
    length = rows.shape[1]
    n = min(SLICE, length - prefix)
    for start in range(prefix - 1, length - 1, n):
        at = min(start, length - 1 - n)
        made = compared(ends, full[:, at : at + n], own[:, at : at + n], jnp.asarray(rows[:, at + 1 : at + n + 1]))
        kl, agree, nll = (np.asarray(x)[:, start - at :] for x in made)
        yield kl, agree, nll


@jax.jit
def relative_error(full: Array, own: Array) -> Array:
    """Return the mean over tokens of |own - full|^2 / |full|^2 for f[B,T,E]."""
    full, own = full.astype(jnp.float32), own.astype(jnp.float32)
    return (((own - full) ** 2).sum(-1) / jnp.maximum((full**2).sum(-1), 1e-30)).mean()


def outlying(costs: Sequence[float]) -> list[int]:
    """Return the layers that cost over `FAR` times the median nonzero cost, at most a quarter of all layers.

    >>> outlying([0.1, 3.0, 0.1, 0.2, 0.1]), outlying([0.1, 0.2, 0.3, 0.4])
    ([1], [])
    """
    bound = FAR * float(np.median([x for x in costs if x] or [0]))
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    return sorted(i for i in order[: max(len(costs) // 4, 1)] if costs[i] > bound)


def only(config: CacheConfig, side: Side) -> CacheConfig:
    """Return the config with only `side` quantized and the other side exact."""

    def one(k: Codec | None, v: Codec | None) -> tuple[Codec | None, Codec | None]:
        return (k, v and Dense()) if side == "keys" else (k and Dense(), v)

    k, v = one(*config.codec)
    tiers = tuple(replace(t, k=k, v=v) for t in config.tiers for k, v in [one(t.k, t.v)])
    return replace(config, codec=(k or Dense(), v or Dense()), tiers=tiers)


@part
class Band(Turned):
    """Codec that applies `inner` to channels [first, end) of each half of the channels and keeps the others exact."""

    first: int = 0
    end: int = 0

    def encode(self, x: Array) -> Code:
        code = self.inner.encode(x)
        return replace(code, slots=(code.slots, x))

    def decode(self, code: Code) -> Array:
        coded, x = code.slots
        channel = jnp.arange(x.shape[1]) % (x.shape[1] // 2)
        here = (channel >= self.first) & (channel < self.end)
        return jnp.where(here, self.inner.decode(replace(code, slots=coded)), x)


def banded(config: CacheConfig, first: int, end: int) -> CacheConfig:
    """Return the config with only the key channels [first, end) of each half quantized, everything else exact."""

    def one(k: Codec | None) -> Codec | None:
        return k if k is None or k.exact else Band(inner=k, first=first, end=end)

    config = only(config, "keys")
    (k, v), tiers = config.codec, tuple(replace(tier, k=one(tier.k)) for tier in config.tiers)
    return replace(config, codec=(one(k) or k, v), tiers=tiers)


class Codecs:
    """Codec evaluation on texts i32[n,T]: one pass through the full cache, then one pass per config.

    Tokens after the first `prefix` count. Texts run one at a time. Every token is quantized, including a query's own
    key and value, except the last tokens if they do not fill a group.

    Args:
        params: The model.
        ids: i32[n,T], the texts.
        prefix: Tokens of each text that are not scored.
    """

    def __init__(self, params: Params, ids: np.ndarray, prefix: int) -> None:
        self.params, self.ids, self.prefix = params, ids, prefix
        self.exact = self._empty(as_config(None))
        self.full = [self._read(self.exact, row) for row in ids]

    def _empty(self, config: CacheConfig) -> Cache:
        config = replace(config, recent=0, prefill=Coded())
        check(config, self.params.config)
        config = config.bound(self.params)
        return CacheShape(config, self.params.config, 1, self.ids.shape[1], 0, self.params.embed.dtype).empty()

    def _read(self, cache: Cache, row: np.ndarray, x: Array | None = None, **blocks: int) -> Array:
        return Cost().run(read, self.params, cache, pad([row.tolist()], len(row)), x, **blocks)

    def by_layer(self, config: CacheConfig) -> dict[str, Any]:
        """Measure the KL if a single layer is quantized, and by side and by channel band.

        Returns:
            `by_layer`, `by_layer_keys` and `by_layer_values`: KL if one layer alone is quantized, both sides or one
            side;
            `spare`: the layers that cost most; `by_band`: KL if one quarter of the key channels is quantized in all
            layers, fastest rotating channels first.
        """
        ways = {"": config, **{f"_{side}": only(config, side) for side in SIDES}}
        means = self.alone([*ways.values()]).mean(2).round(6).tolist()
        found = {f"by_layer{way}": cost for way, cost in zip(ways, means, strict=True)}
        ends = [n * self.params.config.head_dim // 2 // BANDS for n in range(BANDS + 1)]
        bands = [self(banded(config, *band))["kl"] for band in pairwise(ends)]
        return found | {"spare": to_spare(means[0]), "by_band": bands}

    def alone(self, configs: Sequence[CacheConfig], say: Callable[[str], None] = lambda _: None) -> np.ndarray:
        """Measure the KL in nats if one layer alone is quantized and the others are exact.

        Args:
            configs: The configs to measure.
            say: Called with a progress message after each layer.

        Returns:
            f64[configs, layers, texts].
        """
        coded, model = [self._empty(config) for config in configs], self.params.config
        attending = [i for i in range(model.depth) if model.attends(i)]
        costs = np.zeros((len(configs), len(attending), len(self.ids)))
        before: list[Array | None] = [None] * len(self.ids)
        for i in range(model.depth):
            for text, (row, full) in enumerate(zip(self.ids, self.full, strict=True)):
                x = before[text]
                for way, cache in enumerate(coded if i in attending else []):
                    # This layer through the codec, all later ones exact.
                    own = self._read(cache, row, x, first=i, end=i + 1)
                    own = self._read(self.exact, row, own, first=i + 1)
                    kl = np.concatenate([kl for kl, _, _ in self._sliced(full, own, row)], 1)
                    costs[way, attending.index(i), text] = kl.mean(dtype=float)
                # The exact input of the next layer.
                before[text] = self._read(self.exact, row, x, first=i, end=i + 1)
            if i in attending:
                say(f"layer {attending.index(i) + 1}")
        return costs

    def moved(self, config: CacheConfig) -> list[float]:
        """Measure how far quantizing each layer changes its output on exact inputs: the mean of |y' - y|^2 / |y|^2.

        One pass over the texts, in which every attention layer runs twice. `outlying` names the layers to keep exact.
        """
        coded, model, texts = self._empty(config), self.params.config, []
        for row in self.ids:
            x, found = None, []
            for i in range(model.depth):
                full = self._read(self.exact, row, x, first=i, end=i + 1)
                if model.attends(i):
                    own = self._read(coded, row, x, first=i, end=i + 1)
                    found.append(float(relative_error(full[:, self.prefix :], own[:, self.prefix :])))
                x = full
            texts.append(found)
        return np.mean(texts, 0).tolist()

    def __call__(self, config: CacheConfig) -> dict[str, Any]:
        """Measure KL and agreement with the full cache, perplexity, and bits per number of keys and values.

        Per-text values are in `kl_by_text` and `nll_by_text`.
        """
        found, cache = [], self._empty(config)
        for row, full in zip(self.ids, self.full, strict=True):
            own = self._read(cache, row)
            parts = zip(*self._sliced(full, own, row), strict=True)
            found.append([float(np.concatenate(x, 1).mean(dtype=float)) for x in parts])
        kl, agree, nll = np.array(found).T
        return {
            "kl": round(float(kl.mean()), 6),
            "agree": round(float(agree.mean()), 4),
            "ppl": round(float(np.exp(nll.mean())), 4),
            "nll": round(float(nll.mean()), 5),
            "kl_by_text": kl.round(6).tolist(),
            "nll_by_text": nll.round(5).tolist(),
            "bits": self._bits(cache),
        }

    def _bits(self, cache: Cache) -> list[float]:
        """Return bits per number of keys and of values, averaged with the exact sink tokens."""
        exact, n = cache.plan[0].sinks, self.ids.shape[1]
        wide = 8 * cache.dtype.itemsize
        return [round((exact * wide + (n - exact) * bits) / n, 4) for bits in tier_bits(cache)]

    def _sliced(self, full: Array, own: Array, row: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return sliced(self.params.ends, full, own, row[None], self.prefix)
