"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from .config import Fields, ModelConfig, by_layer_type, read, sliding_window
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, along, block, embed, head, linear, rms, split
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

BIAS = {"bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")}
TENSORS = Names(block={**LLAMA.block, **BIAS})


def windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have a window, and only where `use_sliding_window` is set."""
    window, full = sliding_window(f), f.take("max_window_layers", 28)
    if not f.take("use_sliding_window", False):
        window = None
    default = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    return by_layer_type(f, layers, window, default)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config dict with model_type qwen2; ValueError names a field that is not supported."""
    return read(hf, "qwen2", windows=windows, bias=(True,))


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Queries, keys and values of layer i for the rows x [B, T, E] at pos i32[B, T]."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    qkv = linear(w["qkv"], x)
    q, k, v = split(c, qkv + along(w["bias"], qkv))
    return Projected(x=x, q=q, k=k, v=v)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Layer i of x [B, T, E] at pos i32[B, T]; `attend(i, projected) -> (o [B, H, G, T, D], aux)` is the caller's."""
    return block(params, i, x, project(params, i, x, pos), attend)
