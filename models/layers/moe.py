"""MoE blocks: the router, and the products of the experts that tokens use."""

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
MOST = 4096  # maximum number of experts


def names(router: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Return the tensor names of a block with experts; a star stands for the expert's number.

    >>> names("gate.weight", "*.w1", "*.w3", "*.w2")["each_down"]
    ('*.w2',)
    """
    return {"router": (router,), EACH + "gate_up": (gate, up), EACH + "down": (down,)}


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a MoE block's tensors, by the end of their name, as checkpoints store them."""
    e = c.experts
    assert e is not None
    one, back = (e.hidden, c.width), (c.width, e.hidden)
    out: dict[str, tuple[int, ...]] = {"gate.weight": (e.count, c.width)}
    out |= {f"experts.*.{n}.weight": one for n in ("gate_proj", "up_proj", "w1", "w3")}
    return out | {f"experts.*.{n}.weight": back for n in ("down_proj", "w2")}


def everywhere(c: ModelConfig, but: Sequence[int] = ()) -> ModelConfig:
    """Return the config with experts in all blocks except `but`; their hidden size defaults to that of the MLPs."""
    assert c.experts is not None
    blocks = tuple(i for i in range(c.layers) if i not in but)
    return replace(c, experts=replace(c.experts, at=blocks, hidden=c.experts.hidden or c.hidden))


def experts_of(f: Fields, count: int, active: int, hidden: int = 0, **more: Any) -> Experts:
    """Build Experts without block indices; ValueError for more active experts than there are, or far too many."""
    if active > count:
        raise f.refuse("num_experts_per_tok", active, f"there are {count} experts")
    if count > MOST:
        raise f.refuse("num_experts", count, f"{MOST:,} are the most that any model has, so it is a mistake")
    return Experts(at=(), count=count, active=active, hidden=hidden, **more)


def feed(w: Weights, x: Array, c: ModelConfig, one: Callable[[Weights, Array], Array] | None = None) -> Array:
    """Run the second half of a block: one MLP, or the experts plus the shared MLP, [B,T,E] -> [B,T,E].

    Args:
        w: Weights of the block.
        x: [B,T,E], normed input.
        c: Model config.
        one: one(weights of an expert, x [m,E]) -> [m,E]; default: a gated MLP.
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
    """Run the MLP that every token uses, times sigmoid(gate x) if the family has this gate [1,E]."""
    y = mlp(w, x, act)
    if "shared_gate" not in w:
        return y
    return y * jax.nn.sigmoid(linear(w["shared_gate"], x, jnp.float32)).astype(y.dtype)


def through(one: Callable[[Weights, Array], Array], own: Weights, x: Array, index: Array, weight: Array) -> Array:
    """Run each token through its experts and sum their outputs with the router's weights.

    Tokens are sorted by expert and run in tiles of one expert each. The number of tiles depends on the tokens: an
    expert without tokens is not read, and besides the sorted outputs [M K,E] nothing larger than a tile or an expert is
    allocated.

    Args:
        one: one(weights of an expert, x [m,E]) -> [m,E].
        own: Weights of all experts, arrays [N,...].
        x: [M,E], tokens.
        index: i32[M,K], experts of each token.
        weight: f32[M,K], their weights.

    Returns:
        [M,E] in the dtype of x.
    """
    m, k = index.shape
    count = jax.tree.leaves(own)[0].shape[0]
    tile = tile_size(m, m * k, count)
    # Sort the (token, expert) pairs by expert and lay out the tiles.
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
        # Rows past the expert's own tokens are overwritten by the next tile, which starts there.
        return jax.lax.dynamic_update_slice_in_dim(y, got, start, 0)

    y = jax.lax.fori_loop(0, ends[-1], step, jnp.zeros((m * k + tile, x.shape[1]), x.dtype))
    # Restore the order of the pairs and sum over the experts of each token.
    back = jnp.argsort(order).reshape(m, k)
    return jnp.einsum("mk,mke->me", weight, y[back].astype(jnp.float32)).astype(x.dtype)


def tile_size(tokens: int, pairs: int, count: int) -> int:
    """Return the tokens per tile: 1 for a single token, else about an expert's share of the pairs, at most 64.

    A single token uses 1 because its experts all differ. Measured on two cores with XLA for CPUs, float32, 4 of 32
    experts of 3 x [768, 1024]. One token: tiles of 1 take 2.5 ms and of 8 3.9 ms, where all experts for all tokens take
    13.7 ms and `ragged_dot` 117 ms. 512 tokens: tiles of 16, 32, 64 and 128 take 161, 120, 103 and 110 ms, all experts
    366 ms and `ragged_dot` 1975 ms.

    Args:
        tokens: Number of tokens.
        pairs: Number of (token, expert) pairs.
        count: Number of experts.
    """
    return 1 if tokens == 1 else min(64, 8 * max(1, pairs // (8 * count)))
