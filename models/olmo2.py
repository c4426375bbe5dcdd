"""OLMo 2: norms after both halves of a layer, and over all heads of the queries and of the keys."""

from collections.abc import Mapping
from typing import Any

import jax
from einops import rearrange
from jax import Array

from .config import ModelConfig, read
from .llama import TENSORS as LLAMA
from .llama import Attend, Projected, embed, head, linear, mlp, newest, out, rms, split
from .qwen3 import NORMS
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {"q_norm.weight": (c.heads * c.groups * c.head_dim,), "k_norm.weight": (c.heads * c.head_dim,)}


TENSORS = Names(
    block={
        "qkv": LLAMA.block["qkv"],
        **NORMS,
        "o": LLAMA.block["o"],
        "post1": ("post_attention_layernorm.weight",),
        "gate_up": LLAMA.block["gate_up"],
        "down": LLAMA.block["down"],
        "post2": ("post_feedforward_layernorm.weight",),
    },
    shapes=_shapes,
)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type olmo2; ValueError names an unsupported field."""
    theta = {} if hf.get("rope_theta") or hf.get("rope_parameters") else {"rope_theta": 5e5}
    return read({"rms_norm_eps": 1e-5} | dict(hf) | theta, "olmo2")


def project(params: Params, i: int, x: Array, pos: Array) -> Projected:
    """Compute layer i's queries, keys and values before RoPE from x [B, T, E]; q and k are normed."""
    w, c = params.layers[i], params.config
    q, k, v = split(c, linear(w["qkv"], x))
    b, h, g, t, _ = q.shape
    q = rms(w["q_norm"], rearrange(q, "b h g t d -> b t (h g d)"), c.eps)
    k = rms(w["k_norm"], rearrange(k, "b h t d -> b t (h d)"), c.eps)
    q = rearrange(q, "b t (h g d) -> b h g t d", h=h, g=g)
    return Projected(x=x, q=q, k=rearrange(k, "b t (h d) -> b h t d", h=h), v=v)


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    w, c = params.layers[i], params.config
    p = project(params, i, x, pos)
    with jax.named_scope("attend"):
        o, aux = attend(i, p)
    x = newest(x, o) + rms(w["post1"], out(w, o.astype(x.dtype)), c.eps)
    with jax.named_scope("mlp"):
        return x + rms(w["post2"], mlp(w, x, c.act), c.eps), aux
