"""Gemma 3, text only: local and global layers with separate RoPE, norms before and after both layer halves."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.models.rope import Rope

from .config import Fields, ModelConfig, by_layer_type, read, rope, sliding_window
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, along, mlp, newest, out, unembed
from .qwen3 import NORMS, normed
from .weights.linear import rows
from .weights.params import Names, Params

TENSORS = Names(
    block={
        **LLAMA.block,
        "norm2": ("pre_feedforward_layernorm.weight",),
        "post1": ("post_attention_layernorm.weight",),
        "post2": ("post_feedforward_layernorm.weight",),
        **NORMS,
    }
)


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    window, period = sliding_window(f), f.number("sliding_window_pattern", 6)
    period = f.number("_sliding_window_pattern", period)
    default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    return by_layer_type(f, layers, window, default)


def _ropes(f: Fields, dim: int, context: int, windows: tuple[int | None, ...]) -> tuple[tuple[Rope, ...], int]:
    """Read both RoPEs: global layers rotate slowly and may be scaled, local layers rotate fast and never are."""
    far = {"rope_theta": f.number("rope_theta", 1e6, float)} | f.take("rope_scaling", {})
    near = {"rope_theta": f.number("rope_local_base_freq", 1e4, float)}
    given = f.take("rope_parameters", {})
    if unknown := set(given) - {"full_attention", "sliding_attention"}:
        raise f.refuse("rope_parameters", sorted(unknown), "give one dict each for full_attention, sliding_attention")
    whole = rope(far | (given.get("full_attention") or {}), f.family, dim, context)
    local = rope(near | (given.get("sliding_attention") or {}), f.family, dim, whole.longest)
    return tuple(whole if window is None else local for window in windows), whole.longest


def _extra(f: Fields, width: int) -> dict[str, Any]:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        f.only(name, way_out="only null is implemented: Gemma 3 has no soft cap, Gemma 2 has")
    f.only("use_bidirectional_attention", False, way_out="only causal attention is implemented")
    return {"scale": f.number("query_pre_attn_scalar", 256, float) ** -0.5, "embed_scale": math.sqrt(width)}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type gemma3_text; ValueError names an unsupported field."""
    return read(
        hf,
        "gemma3_text",
        tied=True,
        head_dim=256,
        act="hidden_activation",
        windows=_windows,
        ropes=_ropes,
        extra=_extra,
    )


def rms(w: Array, x: Array, eps: float) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) * (1 + w) over the last axis in float32: bfloat16 cannot hold 1 + w."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * (1.0 + along(w.astype(jnp.float32), x))).astype(x.dtype)


def embed(params: Params, ids: Array) -> Array:
    """Embed ids i32[B, T] -> x [B, T, E], scaled by sqrt(E) rounded to the weights' dtype, as in training."""
    return rows(params.embed, ids) * jnp.asarray(params.config.embed_scale, params.embed.dtype)


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]; q and k are normed."""
    return normed(params, i, x, rms)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend)


def block(params: Params, i: int, x: Array, p: Projected, attend: Attend) -> tuple[Array, Any]:
    """Run the rest of a layer from its queries, keys and values, with norms before and after both halves.

    The caller's attend(i, p) returns (o [B, H, G, n, D], aux) for the newest n rows.
    """
    w, c = params.layers[i], params.config
    with jax.named_scope("attend"):
        o, aux = attend(i, p)
    x = newest(x, o) + rms(w["post1"], out(w, o.astype(x.dtype)), c.eps)
    with jax.named_scope("mlp"):
        return x + rms(w["post2"], mlp(w, rms(w["norm2"], x, c.eps), c.act), c.eps), aux


def head(params: Params, x: Array) -> Array:
    """Compute logits f32[B, T, V] from x [B, T, E], with the final norm."""
    return unembed(params, rms(params.norm, x, params.config.eps))
