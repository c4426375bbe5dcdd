"""The prefill: prompts in one piece or in chunks, and those that stay whole until probes and layers were asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.core.attend import attend_causal
from jkv.core.cache import Cache, Counts, LayerCache, Queries
from jkv.core.compiled import ANY, Cost, Run, call, flow, program, use_disk_cache
from jkv.core.evidence import evidence
from jkv.core.flush import flush, on_top, ranked
from jkv.core.layer import LayerConfig
from jkv.core.loop import absorb, absorb_own, as_window, copied, embedded, longer, mixed, none
from jkv.core.positions import bucket, pad
from jkv.generation.draft import greedy
from jkv.generation.prompts import check_length, check_total, reaching
from jkv.generation.sizes import divided, empty
from jkv.methods.checks import check
from jkv.methods.config import CacheConfig
from jkv.methods.scores.probes import Sought
from jkv.methods.shorten import Shorten
from jkv.models import ModelConfig, Params
from jkv.models import layer as block
from jkv.protocols import Columns


def prefilled(
    params: Params,
    config: CacheConfig,
    rows: list[list[int]],
    room: int,
    chunk: int | None,
    then: Callable[[Params, Cache], None] | None = None,
) -> tuple[Cache, Array, Cost]:
    """The cache after prompts, the logits of what comes next, and what it cost; ValueError for what cannot work.

    then(params, cache): told what comes out, before it does, where its shapes are known.
    """
    use_disk_cache()
    model, config, cost = params.config, config.bound(params), Cost()
    chunk = config.chunk if chunk is None else chunk
    check(config, model, chunk)
    check_length(config, model, max(map(len, rows)), room)
    if config.shorten:
        rows = shortened(config.shorten, params, rows, cost)
    longest = max(map(len, rows))
    if config.unlimited:
        params = replace(params, config=reaching(model, longest + room))
    whole = not chunk or chunk >= longest
    length = bucket(longest) if whole else -(-longest // chunk) * chunk
    cache = empty(config, params.config, len(rows), length + room, room, params.embed.dtype)
    ids = pad(rows, length)
    if then and not config.budget.measures and len(params.embed.sharding.device_set) == 1:
        then(params, cache)
    if whole:
        return *read(params, config, cache, rows, ids, cost), cost
    logits = None
    for i in range(0, length, chunk):
        cache, logits = cost.run(absorb_own, params, cache, ids[:, i : i + chunk])
    assert logits is not None
    return cache, logits, cost


def extended(params: Params, cache: Cache, rows: list[list[int]], new: int) -> tuple[Cache, Array, Cost]:
    """The cache after more text in every row, with room for `new` tokens after it; as `prefilled` otherwise."""
    if len(rows) != cache.rows:
        raise ValueError(f"the cache has {cache.rows} rows and the prompt {len(rows)}: give one text a row, or fork it")
    longest = int(cache.seen.max()) + max(map(len, rows)) + new
    for plan in cache.plan[:1]:
        if plan.tiers and not plan.tiers[0].evicts and longest > plan.longest:
            raise ValueError(
                f"the cache was made for {plan.longest} tokens and would hold {longest}: prefill with a larger room="
            )
    _check_on_top(cache, rows, new)
    cost, model = Cost(), cache.model
    unlimited = any(plan.budget.bounded and any(t.at == "rank" for t in plan.tiers) for plan in cache.plan)
    check_total(model, unlimited, longest - new, new, "cache and prompt have")
    if unlimited:
        cache = replace(cache, model=reaching(model, bucket(longest)))
    params = replace(params, config=cache.model)
    cache, logits = cost.run(absorb, params, cache, pad(rows, bucket(max(map(len, rows)))), later=True)
    return cache, logits, cost


def _check_on_top(cache: Cache, rows: list[list[int]], new: int) -> None:
    """Raise ValueError if a cache that keeps what follows its prompt on top of the budget has no room for it."""
    for plan in cache.plan[:1]:
        more, nothing = jnp.array([len(row) for row in rows], jnp.int32), jnp.zeros(1, jnp.int32)
        room = on_top(plan, nothing, nothing + cache.new)
        asked = on_top(plan, cache.counts.later + more, cache.counts.generated + new)
        if plan.grows and int(asked.max()) > int(room[0]):
            raise ValueError(
                f"the cache has room for {int(room[0])} tokens on top of its budget, after its prompt, and would hold "
                f"{int(asked.max())}: prefill with a larger room="
            )


def read(
    params: Params, config: CacheConfig, cache: Cache, rows: list[list[int]], ids: Array, cost: Cost
) -> tuple[Cache, Array]:
    """An empty cache after rows in one piece, and after what their score reads behind them and their budget asks."""
    if not config.waits:
        return cost.run(absorb_own, params, cache, ids, fresh=True)
    whole, logits = dense(params, config, rows, ids, cost)
    if config.budget.measures:
        cache = shared(config, cache, whole, [len(row) for row in rows], cost)
    return cost.run(compress, cache, whole), logits


def dense(params: Params, config: CacheConfig, rows: list[list[int]], ids: Array, cost: Cost) -> tuple[Cache, Array]:
    """Rows in one piece, of which all stays, with what the score has learned from the texts that it reads behind."""
    whole = empty(config.uncut(ids.shape[1]), params.config, len(rows), ids.shape[1], 0, params.embed.dtype)
    whole, logits = cost.run(absorb_own, params, whole, ids, fresh=True)
    for part in config.score.probes(params, rows, greedy):
        asked = pad(part.ids, bucket(max(map(len, part.ids))))
        whole = cost.run(probe, params, whole, asked, jnp.asarray(part.about, jnp.int32))
    return whole, logits


def shared(config: CacheConfig, cache: Cache, dense: Cache, lengths: list[int], cost: Cost) -> Cache:
    """An empty cache as another, of the sizes that the layers of a prompt ask for; shares of each row are in it."""
    longest, asked = cache.plan[0].longest, np.asarray(cost.run(ask, dense, ranks=config.budget.ranks), float)
    config, shares = divided(config, cache, asked, lengths, longest, dense.dtype)
    made = empty(config, cache.model, len(lengths), longest, cache.new, dense.dtype)
    layers = zip(made.layers, jnp.asarray(shares, jnp.int32), strict=True)
    return replace(made, layers=tuple(replace(x, share=y) for x, y in layers))


@flow(arguments=(None, ANY, None, None), results=ANY, donate_argnames=("cache",))
def probe(params: Params, cache: Cache, ids: Array, about: Array, run: Run = call) -> Cache:
    """The cache after its score has seen the queries of tokens i32[B,T] that come next, of which nothing is kept.

    The cache was made by `CacheConfig.uncut`; about i32[B,2] is `Probe.about`.
    """
    model = cache.model
    x, pos, _, _ = run(embedded, params.ends, ids, cache.counts, cache.fill, stay=None, later=False)
    layers: tuple[LayerCache, ...] = ()
    states = iter(cache.states)
    for i in range(model.depth):
        one = params.block(i)
        if not model.attends(i):
            x, _ = run(mixed, one, run(copied, next(states)), x, pos)
            continue
        layer, plan = cache.layers[len(layers)], cache.plan[len(layers)]
        x, columns = run(probed, one, layer, plan, x, pos, cache.counts, about)
        layers += (replace(layer, recent=replace(layer.recent, columns=columns)),)
    return replace(cache, layers=layers)


@program(arguments=(None, ANY, None, None, None, None, None), results=(None, ANY))
def probed(
    one: Params, layer: LayerCache, plan: LayerConfig, x: Array, pos: Array, counts: Counts, about: Array
) -> tuple[Array, Columns]:
    """A block's output for x [B,T,E] at pos i32[B,T], and the columns of its layer's window after these queries."""
    model = one.config
    rope, dtype, before = model.ropes[0], layer.recent.k.dtype, layer.recent.pos.shape[1]

    def run(_: int, new: Any) -> tuple[Array, Columns]:
        q = rope.rotate(new.q, pos[:, None, None]).astype(dtype)
        window = longer(layer.recent, as_window(new, pos, plan, rope, dtype))
        part = attend_causal(q, window.k, window.v, pos, window.pos, model.scale, plan.window, kind=plan.kernels)
        asked, nobody = (None, Queries(q=q, pos=pos, lse=part.lse)), jnp.zeros_like(counts.seen)
        ev = evidence(layer, window, nobody, asked, counts.seen, counts.prompt, nobody, plan, rope, model, fresh=True)
        return part.finish(), {name: x[:, :, :before] for name, x in plan.score.probed(ev, about).items()}

    return block(one, 0, x, pos, run, none)


def _kept(layer: LayerCache, plan: LayerConfig) -> tuple[Queries | None, None]:
    """The last queries of a prompt that is whole, as a flush is given them."""
    n = plan.needs.queries
    return (layer.queries.newest(n) if n and layer.queries is not None else None), None


@flow(arguments=(ANY, ANY), results=ANY, donate_argnames=("empty",))
def compress(empty: Cache, whole: Cache, run: Run = call) -> Cache:
    """An empty cache after one flush of all that another, made by `CacheConfig.uncut`, holds in its windows."""
    layers: tuple[LayerCache, ...] = ()
    for i, (a, b, plan) in enumerate(zip(empty.layers, whole.layers, empty.plan, strict=True)):
        lower, model = plan.lower(layers), empty.model.attending(i)
        layers += (run(compressed, replace(a, queries=None), b, plan, whole.counts, lower, model=model),)
    fill = jnp.int32(empty.stay)
    return replace(empty, layers=layers, states=whole.states, counts=whole.counts, fill=fill)


@program(arguments=(ANY, ANY, None, None, ANY), results=ANY, static_argnames=("model",), donate_argnames=("layer",))
def compressed(
    layer: LayerCache,
    whole: LayerCache,
    plan: LayerConfig,
    counts: Counts,
    lower: LayerCache | None,
    model: ModelConfig,
) -> LayerCache:
    """An empty layer after one flush of all that another holds in its window."""
    layer = replace(layer, queries=whole.queries)
    return flush(layer, whole.recent, _kept(whole, plan), counts, plan, model.ropes[0], model, True, lower)


@flow(arguments=(ANY,), results=None, static_argnames=("ranks",))
def ask(whole: Cache, ranks: bool = False, run: Run = call) -> Array:
    """f32[L,B,...]: what each layer of a cache made by `CacheConfig.uncut` asks: `Score.ask`, or the ranks."""
    model = whole.model
    layers = enumerate(zip(whole.layers, whole.plan, strict=True))
    return jnp.stack(
        [run(asked_by, x, plan, whole.counts, model=model.attending(i), ranks=ranks) for i, (x, plan) in layers]
    )


@program(arguments=(ANY, None, None), results=None, static_argnames=("model", "ranks"))
def asked_by(layer: LayerCache, plan: LayerConfig, counts: Counts, model: ModelConfig, ranks: bool) -> Array:
    """f32[B,...] of one layer."""
    nobody = jnp.zeros_like(counts.seen)
    asked, rope = _kept(layer, plan), model.ropes[0]
    ev = evidence(layer, layer.recent, nobody, asked, counts.seen, counts.prompt, nobody, plan, rope, model, True)
    return ranked(ev, plan) if ranks else plan.score.ask(ev)


def shortened(shorten: Shorten, params: Params, rows: list[list[int]], cost: Cost) -> list[list[int]]:
    """The token ids of the prompts as they are read: the tokens that a draft, the model's first layers, looks at."""
    if max(map(len, rows)) <= shorten.tokens:
        return rows
    counting = shorten.counting(params.config)
    draft = params.first(counting.stop)
    config = CacheConfig(score=Sought(tokens=shorten.drafted, queries=shorten.window))
    cache, _ = dense(draft, config, rows, pad(rows, bucket(max(map(len, rows)))), cost)
    score = np.asarray(cost.run(ask, cache))[counting.start :].max(0)
    live = np.asarray(cache.layers[0].recent.pos) >= 0
    return [shorten.row(row, x[at]) for row, x, at in zip(rows, score, live, strict=True)]
