"""Qwen3: Llama with an RMS norm on every query and key head."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from .config import ModelConfig, read
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, block, embed, head, linear, rms, split
from .qwen2 import windows
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

NORMS = {"q_norm": ("self_attn.q_norm.weight",), "k_norm": ("self_attn.k_norm.weight",)}
TENSORS = Names(block={**LLAMA.block, **NORMS})


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen3; ValueError names an unsupported field."""
    return read(hf, "qwen3", windows=windows, head_dim=128)


def normed(params: Params, i: int, x: Array, norm: Callable[[Array, Array, float], Array]) -> Projected:
    """Compute queries, keys and values of x [B, T, E], with `norm` on x and on every query and key head."""
    w, c = params.layers[i], params.config
    x = norm(w["norm1"], x, c.eps)
    q, k, v = split(c, linear(w["qkv"], x))
    return Projected(x=x, q=norm(w["q_norm"], q, c.eps), k=norm(w["k_norm"], k, c.eps), v=v)


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]; q and k are normed."""
    return normed(params, i, x, rms)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend)
