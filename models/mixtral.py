"""Mixtral: Mistral with eight experts as MLP, two per token."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from .config import Fields, ModelConfig, by_layer_type, read
from .layers.moe import ATTENTION, everywhere, experts_of, feed, names, shapes
from .llama import Attend, block, embed, head, project
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

MLPS = names(
    "block_sparse_moe.gate.weight", *(f"block_sparse_moe.experts.*.{name}.weight" for name in ("w1", "w3", "w2"))
)
TENSORS = Names(sparse={**ATTENTION, **MLPS}, shapes=shapes)


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    window = f.number("sliding_window", None)
    return by_layer_type(f, layers, window, ["full_attention" if window is None else "sliding_attention"] * layers)


def _extra(f: Fields, width: int) -> dict[str, Any]:
    count, active = f.number("num_local_experts", 8), f.number("num_experts_per_tok", 2)
    return {"experts": experts_of(f, count, active)}


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type mixtral; ValueError names an unsupported field."""
    return everywhere(read(hf, "mixtral", windows=_windows, extra=_extra))


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend, feed)
