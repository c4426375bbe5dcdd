"""Prefill replay: one dense forward pass over prompts, reused to prefill one cache after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.online_softmax import with_sinks
from jkv.arrays.pytree import value
from jkv.attention.dense import attend_window
from jkv.attention.mask import causal
from jkv.cache.cache import Cache, LayerCache, Observation, Queries, Window, tree_bytes
from jkv.cache.padding import bucket, pad
from jkv.cache.spec import LayerConfig
from jkv.core.compilation import ANY, Cost, Run, call, flow, program
from jkv.core.decode_loop import copied
from jkv.core.layer_step import as_window, embedded, flushed, last_logits, mixed, none, observation_of
from jkv.methods.config import CacheConfig
from jkv.models import Params
from jkv.models import layer as block
from jkv.models.layers.recurrent_state import State, roomy
from jkv.prompts.allocation import empty
from jkv.prompts.prefill import Prompts, prefilled

LIMIT = 2**30  # bytes of kept forward passes


@value
class Pass:
    """A forward pass over right-aligned rows: the part of a prefill that all caches share.

    Attributes:
        x: [B,T,E] per attention layer, its input.
        lse: f32[B,H,G,T] per attention layer, the log-sum-exp of its queries.
        states: Final states of recurrent layers.
        pos: i32[B,T], positions.
        ids: i32[B,T], token ids.
        logits: f32[B,V], the next-token logits.
    """

    x: tuple[Array, ...]
    lse: tuple[Array, ...]
    states: tuple[State, ...]
    pos: Array
    ids: Array
    logits: Array


@flow(arguments=(None, ANY, None), results=None)
def forward(params: Params, cache: Cache, ids: Array, run: Run = call) -> Pass:
    """Run the forward pass over i32[B,T]. `cache` is empty and provides the initial states and the kernels."""
    x, pos, _, _ = run(embedded, params.ends, ids, cache.counts, cache.fill, None, stay=None, later=False)
    inputs: tuple[Array, ...] = ()
    sums: tuple[Array, ...] = ()
    states: tuple[State, ...] = ()
    for i in range(cache.model.depth):
        one = params.block(i)
        if cache.model.attends(i):
            inputs += (x,)
            x, lse = run(attending, one, x, pos, kind=cache.plan[len(sums)].kernels)
            sums += (lse,)
        else:
            x, state = run(mixed, one, run(copied, cache.states[len(states)]), x, pos)
            states += (state,)
    return Pass(x=inputs, lse=sums, states=states, pos=pos, ids=ids, logits=run(last_logits, params.ends, x))


@program(arguments=(None, None, None), results=None, static_argnames=("kind",))
def attending(one: Params, x: Array, pos: Array, kind: str) -> tuple[Array, Array]:
    """Run an attention layer on x [B,T,E] at pos i32[B,T]; return its output and the log-sum-exp of its queries."""
    model, dtype = one.config, x.dtype
    rope = model.ropes[0]

    def run(_: int, new: Any) -> tuple[Array, Array]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        k, v = rope.rotate(new.k, pos[:, None]).astype(dtype), new.v.astype(dtype)
        part = attend_window(q, k, v, causal(pos, model.windows[0]), pos, model.scale, kind)
        part = with_sinks(part, new.sinks)
        return part.finish(), part.lse

    return block(one, 0, x, pos, run, none)


@flow(arguments=(None, ANY, None), results=ANY, donate_argnames=("cache",))
def replayed(params: Params, cache: Cache, known: Pass, run: Run = call) -> Cache:
    """Prefill an empty cache from a forward pass: `prefill` without the attention and the MLPs."""
    counts = cache.counts.given((known.pos >= 0).sum(1).astype(jnp.int32), False)
    # Recompute only the projections of each layer, then flush them into its tiers.
    layers: tuple[LayerCache, ...] = ()
    blocks = (params.block(i) for i in range(cache.model.depth) if cache.model.attends(i))
    for one, layer, plan, x, lse in zip(blocks, cache.layers, cache.plan, known.x, known.lse, strict=True):
        window, queries, ring = run(projected, one, layer, plan, x, lse, known.pos, known.ids)
        layer, lower = replace(layer, queries=None), plan.lower(layers)
        how = {"model": one.config, "fresh": True, "prunes": False}
        layer, _ = run(flushed, layer, window, queries, plan, counts, lower, **how)
        layers += (replace(layer, queries=ring),)
    states = tuple(run(fitted, *pair) for pair in zip(known.states, cache.states, strict=True))
    return replace(cache, layers=layers, states=states, counts=counts, fill=jnp.int32(cache.stay))


@program(arguments=(ANY, ANY), results=ANY)
def fitted(known: State, own: State) -> State:
    """Adapt a state of the forward pass to a cache that flushes after another number of steps."""
    return roomy(known, own)


@program(arguments=(None, ANY, None, None, None, None, None), results=ANY)
def projected(
    one: Params, layer: LayerCache, plan: LayerConfig, x: Array, lse: Array, pos: Array, ids: Array
) -> tuple[Window, Observation, Queries | None]:
    """Compute the input of a layer's flush from its input x [B,T,E] and the known log-sum-exp of its queries.

    What `layer_step.attended` gives to the flush, without computing attention.
    """
    rope, dtype = one.config.ropes[0], layer.recent.k.dtype

    def run(_: int, new: Any) -> tuple[Array, Any]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        made = observation_of(layer, plan, Queries(q=q, pos=pos, lse=lse), None, False)
        unused = jnp.zeros((*q.shape[:3], 1, new.v.shape[-1]), dtype)  # the block's output
        return unused, (as_window(one, new, pos, ids, plan, rope, dtype), *made)

    return block(one, 0, x, pos, run, none)[1]


@dataclass(frozen=True, kw_only=True)
class Known(Prompts):
    """Prompts with a known forward pass, for caches whose prefill is dense.

    Attributes:
        known: Returns the forward pass, or None if it is not kept.
    """

    known: Callable[[], Pass] | None = None

    def of(self, rows: list[list[int]]) -> Prompts:
        return replace(self, rows=rows, known=None)

    def draft(self, params: Params, config: CacheConfig) -> Prompts:
        return replace(self, params=params, config=config, length=None, then=None, known=None)

    def prefill(self) -> tuple[Cache, Array]:
        return self._replayed(self.empty()) or super().prefill()

    def dense(self) -> tuple[Cache, Array]:
        return self._replayed(self.uncompressed()) or super().dense()

    def _replayed(self, cache: Cache) -> tuple[Cache, Array] | None:
        alike = self.whole and cache.model is self.params.config
        if self.known is None or not alike or any(p.expires or p.pruning or p.coded for p in cache.plan):
            return None
        known = self.known()
        return self.cost.run(replayed, self.params, cache, known), jnp.copy(known.logits)  # which decoding consumes


@dataclass(frozen=True)
class Prefills:
    """Prefill the same prompts of one model for one cache after another.

    The dense forward passes are computed once and kept while they take at most `limit` bytes. Prompts that do not fit,
    and caches whose prefill is not dense, go through the ordinary prefill.

    Attributes:
        limit: Bytes of kept forward passes.
        passes: The kept forward passes.
    """

    limit: int = LIMIT
    passes: dict[Any, Pass] = field(default_factory=dict)

    def __call__(self, params: Params, config: CacheConfig, ids: np.ndarray, reserve: int) -> tuple[Cache, Array]:
        """Prefill i32[B,T] into a cache.

        Args:
            params: The model.
            config: The cache.
            ids: i32[B,T], the prompts.
            reserve: Tokens to reserve after the prompts.

        Returns:
            The cache, and the next-token logits f32[B,V].
        """
        key, length = (config.kernels, ids.tobytes()), bucket(ids.shape[1])

        def known() -> Pass:
            if key not in self.passes:
                plan = CacheConfig(kernels=config.kernels)
                cache = empty(plan, params.config, len(ids), length, 0, params.embed.dtype)
                self.passes[key] = Cost().run(forward, params, cache, pad(ids.tolist(), length))
            return self.passes[key]

        taken = sum(tree_bytes((x.x, x.lse)) for x in self.passes.values())
        fits = key in self.passes or taken + size(params, len(ids), length) <= self.limit
        kind = partial(Known, known=known if fits else None)
        return prefilled(params, config, ids.tolist(), reserve, config.chunk or 0, kind=kind)[:2]


def size(params: Params, rows: int, length: int) -> int:
    """Return the bytes of a `Pass` over `rows` rows of a padded length, without its states and logits."""
    model = params.config
    return model.layers * rows * length * (model.width * params.embed.dtype.itemsize + model.heads * model.groups * 4)
