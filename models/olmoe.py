"""OLMoE: many small experts in every block, with RMS norms over all query heads and over all key heads."""

from collections.abc import Mapping
from typing import Any

from einops import rearrange
from jax import Array

from .config import Fields, ModelConfig, read
from .layers.moe import ATTENTION, everywhere, experts_of, feed, shapes
from .llama import Attend, Projected, block, embed, head, linear, rms
from .qwen3 import NORMS
from .qwen3_moe import MLPS
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    q, k = c.heads * c.groups * c.head_dim, c.heads * c.head_dim
    return {**shapes(c), "q_norm.weight": (q,), "k_norm.weight": (k,)}


TENSORS = Names(sparse={**ATTENTION, **NORMS, **MLPS}, shapes=_shapes)


def _extra(f: Fields, width: int) -> dict[str, Any]:
    f.only("clip_qkv", way_out="only null is implemented: queries, keys and values are not clipped")
    count, active = f.number("num_experts", 64), f.number("num_experts_per_tok", 8)
    return {"experts": experts_of(f, count, active, normed=bool(f.take("norm_topk_prob", False)))}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type olmoe; ValueError names an unsupported field."""
    heads = {"num_key_value_heads": None} | dict(hf)  # default: as many as query heads
    return everywhere(read({"rms_norm_eps": 1e-5} | heads, "olmoe", extra=_extra))


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]; q and k are normed."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    qkv = linear(w["qkv"], x)  # [B, T, H, G + 2, D]
    q, k = (
        rearrange(qkv[..., : c.groups, :], "b t h g d -> b t (h g d)"),
        rearrange(qkv[..., c.groups, :], "b t h d -> b t (h d)"),
    )
    q = rearrange(rms(w["q_norm"], q, c.eps), "b t (h g d) -> b h g t d", h=c.heads, g=c.groups)
    k = rearrange(rms(w["k_norm"], k, c.eps), "b t (h d) -> b h t d", h=c.heads)
    return Projected(x=x, q=q, k=k, v=rearrange(qkv[..., c.groups + 1, :], "b t h d -> b h t d"))


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend, feed)
