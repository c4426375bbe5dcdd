"""Multi-head latent attention without latent norms: Llama as `jkv train xecomla` converts it.

    c_t = W_DKV x_t,  k_th = [rot(W_R x_t) | W_UK,h c_t],  v_th = W_UV,h c_t,  q_th = [rot(W_QR,h x_t) | W_QN,h x_t]

Each block has one dense MLP. Without a norm between them, W_DKV and W_UK, W_UV can be factors of a model's own matrices
(X-EcoMLA, 2503.11132).
"""

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig
from .deepseek_v2 import TENSORS as V2
from .deepseek_v2 import absent, attention_shapes, embed, head, latent, layer, project, split_latent
from .weights.params import Names

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

NORMS = ("q_a_norm", "kv_norm")
TENSORS = Names(
    block={name: ends for name, ends in V2.block.items() if name not in NORMS},
    shapes=attention_shapes,
    read=split_latent,
    absent=absent,
)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type mla; ValueError names an unsupported field."""
    return latent(hf, "mla")
