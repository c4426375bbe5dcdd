"""DeepSeek V3: V2 with sigmoid router scores and a load-balancing bias."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .config import Fields, ModelConfig
from .deepseek_v2 import TENSORS as V2
from .deepseek_v2 import embed, experts, head, latent, layer, project

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

TENSORS = replace(V2, sparse={**V2.sparse, "router_shift": ("mlp.gate.e_score_correction_bias",)})


def _routing(f: Fields) -> dict[str, Any]:
    f.only("scoring_func", "sigmoid", way_out="only sigmoid is implemented")
    f.only("topk_method", "noaux_tc", way_out="only noaux_tc is implemented")
    groups, chosen = f.number("n_group", 8), f.number("topk_group", 4)
    normed, gain = bool(f.take("norm_topk_prob", True)), f.number("routed_scaling_factor", 2.5, float)
    return {"score": "sigmoid", "normed": normed, "gain": gain, "groups": groups, "chosen": chosen, "best": 2}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type deepseek_v3; ValueError names an unsupported field."""
    return latent(hf, "deepseek_v3", partial(experts, _routing))
