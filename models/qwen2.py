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
    """Read the windows: layers from `max_window_layers` on have one, if `use_sliding_window` is set."""
    window, full = sliding_window(f), f.take("max_window_layers", 28)
    if not f.take("use_sliding_window", False):
        window = None
    default = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    return by_layer_type(f, layers, window, default)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen2; ValueError names an unsupported field."""
    return read(hf, "qwen2", windows=windows, bias=(True,))


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    qkv = linear(w["qkv"], x)
    q, k, v = split(c, qkv + along(w["bias"], qkv))
    return Projected(x=x, q=q, k=k, v=v)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend)
