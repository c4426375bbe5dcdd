"""Llama 2, 3.x and SmolLM2; the pieces here serve the other families too."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from jkv.arrays.pytree import value

from .config import ModelConfig, read
from .weights.linear import linear, rows
from .weights.params import Names, Params

TENSORS = Names(
    block={
        "norm1": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "o": ("self_attn.o_proj.weight",),
        "norm2": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
    }
)

ACTS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


@value
class Projected:
    """One layer's queries, keys and values, before rotation, and the normed input that they are made of."""

    x: Array  # [B, T, E]
    q: Array  # [B, H, G, T, D]
    k: Array  # [B, H, T, D]
    v: Array  # [B, H, T, Dv]
    sinks: Array | None = None  # [H G]: in the softmax of each query head a logit more, of a value 0


Attend = Callable[[int, Projected], tuple[Array, Any]]  # -> o [B, H, G, n, D] of the newest n rows, and an extra


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config dict with model_type llama; ValueError names a field that is not supported."""
    return read(hf, "llama")


def along(w: Array, x: Array) -> Array:
    """w shaped to act on the last axes of x, so that no rank is promoted silently."""
    first = x.ndim - w.ndim
    return jax.lax.broadcast_in_dim(w, (1,) * first + w.shape, range(first, x.ndim))


def rms(w: Array, x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * w over the last axis; the statistics in float32, the product in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return along(w, x) * wide.astype(x.dtype)


def embed(params: Params, ids: Array) -> Array:
    """ids i32[B, T] -> x [B, T, E]."""
    return rows(params.embed, ids)


def split(c: ModelConfig, qkv: Array) -> tuple[Array, Array, Array]:
    """[B, T, H, G + 2, D] -> q [B, H, G, T, D], k and v [B, H, T, D]."""
    every = rearrange(qkv, "b t h g d -> b h g t d")
    return every[:, :, : c.groups], every[:, :, c.groups], every[:, :, c.groups + 1]


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Queries, keys and values of layer i for the rows x [B, T, E] at pos i32[B, T]."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    q, k, v = split(c, linear(w["qkv"], x))
    return Projected(x=x, q=q, k=k, v=v)


def out(w: Mapping[str, Array], o: Array) -> Array:
    """Heads o [B, H, G, T, D] -> [B, T, E]."""
    return linear(w["o"], rearrange(o, "b h g t d -> b t (h g d)"))


def mlp(w: Mapping[str, Array], x: Array, act: str) -> Array:
    """down(act(gate x) * up x), [B, T, E] -> [B, T, E]."""
    both = linear(w["gate_up"], x)
    y = ACTS[act](both[..., 0, :]) * both[..., 1, :]
    return linear(w["down"], y.reshape(*x.shape[:-1], -1))


def newest(x: Array, o: Array) -> Array:
    """The rows of x [B, T, E] that attention gave an answer for, o [B, H, G, n, D]: the newest n go on."""
    return x[:, x.shape[1] - o.shape[3] :]


def feed(w: Mapping[str, Array], x: Array, c: ModelConfig) -> Array:
    """What follows attention in a block, of normed x [B, T, E]."""
    return mlp(w, x, c.act)


def block(
    params: Params, i: int, x: Array, p: Projected, attend: Attend, feed: Any = feed, norm: Any = rms
) -> tuple[Array, Any]:
    """The rest of a layer, once its queries, keys and values are known: [B, T, E] and what `attend` returned."""
    w, c = params.layers[i], params.config
    with jax.named_scope("attend"):
        o, aux = attend(i, p)
    x = newest(x, o) + out(w, o.astype(x.dtype))
    with jax.named_scope("mlp"):
        return x + feed(w, norm(w["norm2"], x, c.eps), c), aux


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Layer i of x [B, T, E] at pos i32[B, T] -> [B, n, E] and aux, where the caller's attend(i, projected) returns
    (o [B, H, G, n, D], aux) for the newest n rows."""
    return block(params, i, x, project(params, i, x, pos), attend)


def unembed(params: Params, x: Array) -> Array:
    """Normed x [B, T, E] -> logits f32[B, T, V], with the embedding where the model ties its head to it."""
    scale, y = params.config.head_scale, linear(params.embed if params.head is None else params.head, x, jnp.float32)
    return y if scale == 1 else y * scale


def head(params: Params, x: Array) -> Array:
    """x [B, T, E] -> logits f32[B, T, V]."""
    return unembed(params, rms(params.norm, x, params.config.eps))
