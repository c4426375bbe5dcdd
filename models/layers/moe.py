"""Blocks with experts: a router, and the products of the experts that tokens go through."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.models.config import Fields, ModelConfig
from jkv.models.llama import TENSORS as LLAMA
from jkv.models.llama import linear, mlp
from jkv.models.moe_router import Experts, route
from jkv.models.weights.params import EACH

Weights = Mapping[str, Array]
ATTENTION = {name: LLAMA.block[name] for name in ("norm1", "qkv", "o", "norm2")}
MOST = 4096  # experts


def names(router: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """The fields of a block with experts, of whose tensors each stands for one of every expert: a star is its number.

    >>> names("gate.weight", "*.w1", "*.w3", "*.w2")["each_down"]
    ('*.w2',)
    """
    return {"router": (router,), EACH + "gate_up": (gate, up), EACH + "down": (down,)}


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of a tensor of such blocks by the end of its name, as checkpoints store it."""
    e = c.experts
    assert e is not None
    one, back = (e.hidden, c.width), (c.width, e.hidden)
    out: dict[str, tuple[int, ...]] = {"gate.weight": (e.count, c.width)}
    out |= {f"experts.*.{n}.weight": one for n in ("gate_proj", "up_proj", "w1", "w3")}
    return out | {f"experts.*.{n}.weight": back for n in ("down_proj", "w2")}


def everywhere(c: ModelConfig, but: Sequence[int] = ()) -> ModelConfig:
    """The config with experts in all blocks but some; of the size of its MLPs, where none is known."""
    assert c.experts is not None
    blocks = tuple(i for i in range(c.layers) if i not in but)
    return replace(c, experts=replace(c.experts, at=blocks, hidden=c.experts.hidden or c.hidden))


def experts_of(f: Fields, count: int, active: int, hidden: int = 0, **more: Any) -> Experts:
    """Experts, of blocks that are not known yet; ValueError for more active ones than there are."""
    if active > count:
        raise f.refuse("num_experts_per_tok", active, f"there are {count} experts")
    if count > MOST:
        raise f.refuse("num_experts", count, f"{MOST:,} are the most that any model has, so it is a mistake")
    return Experts(at=(), count=count, active=active, hidden=hidden, **more)


def feed(w: Weights, x: Array, c: ModelConfig, one: Callable[[Weights, Array], Array] | None = None) -> Array:
    """What follows attention in a block: one MLP, or the experts and the shared MLP, [B,T,E] -> [B,T,E].

    one(weights of an expert, x [m,E]) -> [m,E]; default: a gated MLP.
    """
    if c.experts is None or "router" not in w:
        return mlp(w, x, c.act)
    flat = x.reshape(-1, x.shape[-1])
    logits = linear(w["router"], flat, jnp.float32)
    if "router_bias" in w:
        logits = logits + w["router_bias"][None]
    index, weight = route(c.experts, logits, w.get("router_shift"))
    own = {name.removeprefix(EACH): each for name, each in w.items() if name.startswith(EACH)}
    y = through(one or partial(mlp, act=c.act), own, flat, index, weight).reshape(x.shape)
    return y + shared(w, x, c.act) if c.experts.shared else y


def shared(w: Weights, x: Array, act: str) -> Array:
    """The MLP that every token goes through, times sigmoid(gate x) where the family has such a gate [1,E]."""
    y = mlp(w, x, act)
    if "shared_gate" not in w:
        return y
    return y * jax.nn.sigmoid(linear(w["shared_gate"], x, jnp.float32)).astype(y.dtype)


def through(one: Callable[[Weights, Array], Array], own: Weights, x: Array, index: Array, weight: Array) -> Array:
    """The sum over K of weight f32[M,K] times what expert index i32[M,K] makes of a token of x [M,E].

    own: arrays [N,...], of which `one` takes an expert's. Tokens are sorted by expert and go through in tiles of one
    expert each, as many as there are: no expert without a token is read, and beside the sorted results [M K,E] nothing
    is larger than a tile or an expert.
    """
    m, k = index.shape
    count = jax.tree.leaves(own)[0].shape[0]
    tile = tile_size(m, m * k, count)
    flat = index.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[flat].add(1)
    tiles = -(-sizes // tile)
    first, ends = jnp.cumsum(sizes) - sizes, jnp.cumsum(tiles)
    rows = jnp.pad(order // k, (0, tile))

    def step(i: Array, y: Array) -> Array:
        e = jnp.searchsorted(ends, i, side="right")
        start = first[e] + (i - ends[e] + tiles[e]) * tile
        mine = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, e, 0, keepdims=False), own)
        got = one(mine, x[jax.lax.dynamic_slice_in_dim(rows, start, tile)])
        # What a tile holds beyond its expert's tokens, the next tile, which begins there, writes again.
        return jax.lax.dynamic_update_slice_in_dim(y, got, start, 0)

    y = jax.lax.fori_loop(0, ends[-1], step, jnp.zeros((m * k + tile, x.shape[1]), x.dtype))
    back = jnp.argsort(order).reshape(m, k)
    return jnp.einsum("mk,mke->me", weight, y[back].astype(jnp.float32)).astype(x.dtype)


def tile_size(tokens: int, pairs: int, count: int) -> int:
    """Tokens of a tile: one where a token is alone, as its experts differ; else about an expert's share of the pairs.

    Measured on two cores with XLA for CPUs, float32, 4 of 32 experts of 3 x [768, 1024]. One token: tiles of 1 take
    2.5 ms and of 8 3.9 ms, where all experts for all tokens take 13.7 ms and `ragged_dot` 117 ms. 512 tokens: tiles of
    16, 32, 64 and 128 take 161, 120, 103 and 110 ms, all experts 366 ms and `ragged_dot` 1975 ms.
    """
    return 1 if tokens == 1 else min(64, 8 * max(1, pairs // (8 * count)))
