"""Multi-head latent attention without norms of latents, and one MLP a block: what `jkv train xecomla` makes of llama.

    c_t = W_DKV x_t,  k_th = [rot(W_R x_t) | W_UK,h c_t],  v_th = W_UV,h c_t,  q_th = [rot(W_QR,h x_t) | W_QN,h x_t]

Without a norm between them W_DKV and W_UK, W_UV may be the factors of a model's own matrices (X-EcoMLA, 2503.11132).
"""

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig
from .deepseek_v2 import TENSORS as V2
from .deepseek_v2 import absent, apart, attention_shapes, embed, head, latent, layer, project
from .weights.params import Names

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

NORMS = ("q_a_norm", "kv_norm")
TENSORS = Names(
    block={name: ends for name, ends in V2.block.items() if name not in NORMS},
    shapes=attention_shapes,
    read=apart,
    absent=absent,
)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config dict with model_type mla; ValueError names a field that is not supported."""
    return latent(hf, "mla")
