"""Deferred compression of a prompt: probes and statistics on its uncompressed cache, then one flush per layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from jkv.arrays.online_softmax import with_sinks
from jkv.attention.dense import attend_window
from jkv.attention.evidence import evidence
from jkv.attention.mask import causal
from jkv.cache.cache import Cache, Counts, LayerCache, Observation, Queries, Window
from jkv.cache.spec import LayerConfig
from jkv.core.compilation import ANY, Run, call, flow, program
from jkv.core.decode_loop import copied
from jkv.core.flush import flush, ranked
from jkv.core.gradients import moved, slopes
from jkv.core.layer_step import as_window, embedded, mixed, none
from jkv.models import ModelConfig, Params
from jkv.models import layer as block
from jkv.models.weights.linear import decoded
from jkv.protocols import PROBED, AttentionGradient, Columns, Probe


@flow(arguments=(None, ANY, None, None, None), results=ANY, donate_argnames=("cache",))
def probe(params: Params, cache: Cache, ids: Array, span: Array, by: Probe, run: Run = call) -> Cache:
    """Run a probe's tokens after an uncompressed prompt, and return the cache with the probe's column filled.

    Args:
        params: the model.
        cache: a cache made by `CacheConfig.uncompressed`; it is donated.
        ids: i32[B,T] the probe's token ids; their keys and values are discarded.
        span: i32[B,2], from `ProbeTokens.span`.
        by: the probe.
        run: how programs are run, see `flow`.
    """
    model = cache.model
    x, pos, _, _ = run(embedded, params.ends, ids, cache.counts, cache.fill, None, stay=None, later=False)
    found = slopes(params, cache, x, pos, run) if by.graded else [None] * len(cache.layers)
    layers: tuple[LayerCache, ...] = ()
    states = iter(cache.states)
    for i in range(model.depth):
        one = params.block(i)
        if not model.attends(i):
            x, _ = run(mixed, one, run(copied, next(states)), x, pos)
            continue
        layer, plan = cache.layers[len(layers)], cache.plan[len(layers)]
        x, columns = run(probed, one, layer, plan, x, pos, ids, cache.counts, span, found[len(layers)], by)
        layers += (replace(layer, recent=replace(layer.recent, columns=columns)),)
    return replace(cache, layers=layers)


@program(arguments=(None, ANY) + (None,) * 8, results=(None, ANY))
def probed(
    one: Params,
    layer: LayerCache,
    plan: LayerConfig,
    x: Array,
    pos: Array,
    ids: Array,
    counts: Counts,
    span: Array,
    slope: Array | None,
    by: Probe,
) -> tuple[Array, Columns]:
    """Run an attention block on a probe's tokens.

    Args:
        one: the block.
        layer: its uncompressed cache.
        plan: its config.
        x: [B,T,E] input.
        pos: i32[B,T] positions.
        ids: i32[B,T] token ids.
        counts: tokens of each row before the probe.
        span: i32[B,2], from `ProbeTokens.span`.
        slope: f32[B,T], from `slopes`, if the probe is graded; else None.
        by: the probe.

    Returns:
        The output, and the columns of the layer's window after these queries.
    """
    model = one.config
    rope, dtype, before = model.ropes[0], layer.recent.k.dtype, layer.recent.pos.shape[1]

    def run(_: int, new: Any) -> tuple[Array, Columns]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        window = layer.recent.then(as_window(one, new, pos, ids, plan, rope, dtype))
        part = attend_window(q, window.k, window.v, causal(pos, plan.window), window.pos, model.scale, plan.kernels)
        part = with_sinks(part, new.sinks)
        ev = evidence(layer, window, Observation(new=Queries(q=q, pos=pos, lse=part.lse)), counts, plan, model)
        worth = (
            None if slope is None else AttentionGradient(query=slope, key=moved(window, decoded(one.layers[0]["o"])))
        )
        columns = {
            name: by.observe(ev, span, x, worth) if name.rpartition(".")[2] == PROBED else x
            for name, x in ev.columns.items()
        }
        return part.finish(), {name: x[:, :, :before] for name, x in columns.items()}

    return block(one, 0, x, pos, run, none)


@flow(arguments=(ANY, ANY), results=ANY, donate_argnames=("empty",))
def compress(empty: Cache, whole: Cache, run: Run = call) -> Cache:
    """Flush an uncompressed cache once into an empty one, layer by layer.

    Args:
        empty: the empty cache, which is donated.
        whole: a cache made by `CacheConfig.uncompressed`.
        run: how programs are run, see `flow`.
    """
    layers: tuple[LayerCache, ...] = ()
    for i, (a, b, plan) in enumerate(zip(empty.layers, whole.layers, empty.plan, strict=True)):
        lower, model, group = plan.lower(layers), empty.model.attending(i), ()
        if plan.together > 1:
            first = i - plan.tiers[0].lender
            group = tuple(x.recent for x in whole.layers[first : first + plan.together])
        layers += (run(compressed, replace(a, queries=None), b, plan, whole.counts, lower, group, model=model),)
    fill = jnp.int32(empty.stay)
    return replace(empty, layers=layers, states=whole.states, counts=whole.counts, fill=fill)


@program(
    arguments=(ANY, ANY, None, None, ANY, ANY), results=ANY, static_argnames=("model",), donate_argnames=("layer",)
)
def compressed(
    layer: LayerCache,
    whole: LayerCache,
    plan: LayerConfig,
    counts: Counts,
    lower: LayerCache | None,
    group: tuple[Window, ...],
    model: ModelConfig,
) -> LayerCache:
    """Flush the window of an uncompressed layer into an empty one; `lower` and `group` as in `flush`."""
    layer, observation = replace(layer, queries=whole.queries), Observation.of(whole.queries, plan.needs)
    return flush(layer, whole.recent, observation, counts, plan, model, True, lower, group)


@flow(arguments=(ANY,), results=None, static_argnames=("ranks",))
def statistics(whole: Cache, ranks: bool = False, run: Run = call) -> Array:
    """Return f32[L,B,...] of an uncompressed cache: `Score.statistic` of each layer, or the ranks of its tokens."""
    model = whole.model
    layers = enumerate(zip(whole.layers, whole.plan, strict=True))
    return jnp.stack(
        [run(statistic, x, plan, whole.counts, model=model.attending(i), ranks=ranks) for i, (x, plan) in layers]
    )


@program(arguments=(ANY, None, None), results=None, static_argnames=("model", "ranks"))
def statistic(layer: LayerCache, plan: LayerConfig, counts: Counts, model: ModelConfig, ranks: bool) -> Array:
    """Return the statistic of one layer, f32[B,...], or the ranks of its tokens f32[B,Hs,S]."""
    ev = evidence(layer, layer.recent, Observation.of(layer.queries, plan.needs), counts, plan, model)
    return ranked(ev, plan) if ranks else plan.score.statistic(ev)
