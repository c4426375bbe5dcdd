"""Llama 2, 3.x and SmolLM2, and the building blocks of the other families."""

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
    """One layer's queries, keys and values before RoPE, and the normed input they are computed from."""

    x: Array  # [B, T, E]
    q: Array  # [B, H, G, T, D]
    k: Array  # [B, H, T, D]
    v: Array  # [B, H, T, Dv]
    sinks: Array | None = None  # [H G]: extra softmax logit per query head, with value 0


Attend = Callable[[int, Projected], tuple[Array, Any]]  # -> o [B, H, G, n, D] of the newest n rows, aux


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type llama; ValueError names an unsupported field."""
    return read(hf, "llama")


def along(w: Array, x: Array) -> Array:
    """Add leading axes to w so that it broadcasts against x without implicit rank promotion."""
    first = x.ndim - w.ndim
    return jax.lax.broadcast_in_dim(w, (1,) * first + w.shape, range(first, x.ndim))


def rms(w: Array, x: Array, eps: float) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) * w over the last axis; statistics in float32, product in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return along(w, x) * wide.astype(x.dtype)


def embed(params: Params, ids: Array) -> Array:
    """Embed ids i32[B, T] -> x [B, T, E]."""
    return rows(params.embed, ids)


def split(c: ModelConfig, qkv: Array) -> tuple[Array, Array, Array]:
    """Split [B, T, H, G + 2, D] into q [B, H, G, T, D], k and v [B, H, T, D]."""
    every = rearrange(qkv, "b t h g d -> b h g t d")
    return every[:, :, : c.groups], every[:, :, c.groups], every[:, :, c.groups + 1]


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    q, k, v = split(c, linear(w["qkv"], x))
    return Projected(x=x, q=q, k=k, v=v)


def out(w: Mapping[str, Array], o: Array) -> Array:
    """Project attention output o [B, H, G, T, D] -> [B, T, E]."""
    return linear(w["o"], rearrange(o, "b h g t d -> b t (h g d)"))


def mlp(w: Mapping[str, Array], x: Array, act: str) -> Array:
    """Compute down(act(gate x) * up x), [B, T, E] -> [B, T, E]."""
    both = linear(w["gate_up"], x)
    y = ACTS[act](both[..., 0, :]) * both[..., 1, :]
    return linear(w["down"], y.reshape(*x.shape[:-1], -1))


def newest(x: Array, o: Array) -> Array:
    """Return the newest n rows of x [B, T, E], those that attention output o [B, H, G, n, D] covers."""
    return x[:, x.shape[1] - o.shape[3] :]


def feed(w: Mapping[str, Array], x: Array, c: ModelConfig) -> Array:
    """Run the MLP of a block on normed x [B, T, E]."""
    return mlp(w, x, c.act)


def block(
    params: Params, i: int, x: Array, p: Projected, attend: Attend, feed: Any = feed, norm: Any = rms
) -> tuple[Array, Any]:
    """Run the rest of a layer from its queries, keys and values.

    Args:
        params: The model.
        i: Index of the layer.
        x: [B, T, E], input of the layer.
        p: Its queries, keys and values.
        attend: attend(i, p) -> (o [B, H, G, n, D], aux) for the newest n rows.
        feed: feed(weights, normed x, config) -> [B, n, E]; default: the MLP.
        norm: norm(weight, x, eps) before the MLP; default: `rms`.

    Returns:
        [B, n, E] and aux.
    """
    w, c = params.layers[i], params.config
    with jax.named_scope("attend"):
        o, aux = attend(i, p)
    x = newest(x, o) + out(w, o.astype(x.dtype))
    with jax.named_scope("mlp"):
        return x + feed(w, norm(w["norm2"], x, c.eps), c), aux


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i.

    Args:
        params: The model.
        i: Index of the layer.
        x: [B, T, E], input of the layer.
        pos: i32[B, T], positions.
        attend: attend(i, projected) -> (o [B, H, G, n, D], aux) for the newest n rows.

    Returns:
        [B, n, E] and aux.
    """
    return block(params, i, x, project(params, i, x, pos), attend)


def unembed(params: Params, x: Array) -> Array:
    """Compute logits f32[B, T, V] from normed x [B, T, E], with the embedding if the head is tied to it."""
    scale, y = params.config.head_scale, linear(params.embed if params.head is None else params.head, x, jnp.float32)
    return y if scale == 1 else y * scale


def head(params: Params, x: Array) -> Array:
    """Compute logits f32[B, T, V] from x [B, T, E], with the final norm."""
    return unembed(params, rms(params.norm, x, params.config.eps))
