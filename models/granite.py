"""Granite 3: Llama with multipliers for embeddings, attention, both halves of a layer, and logits."""

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

from .config import Fields, ModelConfig, read
from .gemma3 import embed
from .llama import TENSORS, Attend, head, mlp, newest, out, project, rms
from .weights.params import Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]


def _extra(f: Fields, width: int) -> dict[str, Any]:
    return {
        "scale": f.number("attention_multiplier", 1.0, float),
        "embed_scale": f.number("embedding_multiplier", 1.0, float),
        "residual_scale": f.number("residual_multiplier", 1.0, float),
        "head_scale": 1 / f.number("logits_scaling", 1.0, float),
    }


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type granite; ValueError names an unsupported field."""
    return read(hf, "granite", extra=_extra)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    w, c = params.layers[i], params.config
    p = project(params, i, x, pos)
    with jax.named_scope("attend"):
        o, aux = attend(i, p)
    x = newest(x, o) + c.residual_scale * out(w, o.astype(x.dtype))
    with jax.named_scope("mlp"):
        return x + c.residual_scale * mlp(w, rms(w["norm2"], x, c.eps), c.act), aux
