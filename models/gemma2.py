"""Gemma 2: soft caps on all logits, every other layer local, norms before and after both halves of a layer."""

import math
from collections.abc import Mapping
from typing import Any

from jax import Array

from .config import Fields, ModelConfig, by_layer_type, read, sliding_window
from .gemma3 import TENSORS as GEMMA3
from .gemma3 import block, embed, head, rms
from .llama import Attend, Projected, linear, split
from .qwen3 import NORMS
from .softcap import Capped
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

TENSORS = Names(block={field: names for field, names in GEMMA3.block.items() if field not in NORMS})


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return by_layer_type(f, layers, sliding_window(f), default)


def _cap(f: Fields, name: str, default: float) -> float | None:
    """Read a soft cap; null means none, but in transformers a missing field means the default."""
    return f.number(name, None if name in f.rest else default, float)


def _extra(f: Fields, width: int) -> dict[str, Any]:
    f.only("use_bidirectional_attention", False, way_out="only causal attention is implemented")
    scale = f.number("query_pre_attn_scalar", 256, float) ** -0.5
    inner, outer = _cap(f, "attn_logit_softcapping", 50.0), _cap(f, "final_logit_softcapping", 30.0)
    return {
        "scale": scale if inner is None else Capped(by=scale, cap=inner),
        "head_scale": 1.0 if outer is None else Capped(by=1.0, cap=outer),
        "embed_scale": math.sqrt(width),
    }


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type gemma2; ValueError names an unsupported field."""
    return read(hf, "gemma2", tied=True, head_dim=256, act="hidden_activation", windows=_windows, extra=_extra)


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]."""
    w, c = params.layers[i], params.config
    x = rms(w["norm1"], x, c.eps)
    q, k, v = split(c, linear(w["qkv"], x))
    return Projected(x=x, q=q, k=k, v=v)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend)
