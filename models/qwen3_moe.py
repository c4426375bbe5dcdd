"""Qwen3-MoE: Qwen3 with experts in most blocks."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from .config import Fields, ModelConfig, is_whole_number, read
from .layers.moe import ATTENTION, everywhere, experts_of, feed, names, shapes
from .llama import Attend, block, embed, head
from .qwen2 import windows
from .qwen3 import NORMS, project
from .qwen3 import TENSORS as QWEN3
from .weights.params import Names, Params

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

MLPS = names("mlp.gate.weight", *(f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up", "down")))
TENSORS = Names(block=QWEN3.block, sparse={**ATTENTION, **NORMS, **MLPS}, shapes=shapes)


def _extra(f: Fields, width: int) -> dict[str, Any]:
    active, normed = f.number("num_experts_per_tok", 8), bool(f.take("norm_topk_prob", False))
    made = experts_of(f, number(f), active, f.number("moe_intermediate_size", 768), normed=normed)
    return {"experts": made}


def number(f: Fields) -> int:
    """Read the number of experts."""
    return f.number("num_local_experts", f.number("num_experts", 128 if "num_local_experts" not in f.rest else None))


def dense(hf: Mapping[str, Any], layers: int) -> list[int]:
    """Return the blocks without experts: those in mlp_only_layers, and all but every n-th.

    n is decoder_sparse_step.
    """
    f = Fields(hf, "qwen3_moe")
    named, step = f.take("mlp_only_layers", []), f.number("decoder_sparse_step", 1)
    if not isinstance(named, list) or not all(map(is_whole_number, named)):
        raise f.refuse("mlp_only_layers", named, "it is a list of blocks by number")
    return [i for i in range(layers) if i in named or (i + 1) % step]


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen3_moe; ValueError names an unsupported field."""
    rest = {k: v for k, v in hf.items() if k not in ("mlp_only_layers", "decoder_sparse_step")}
    c = read(rest, "qwen3_moe", windows=windows, extra=_extra)
    return everywhere(c, but=dense(hf, c.layers))


def layer(params: Params, i: int, x: Array, pos: Array, attend: Attend) -> tuple[Array, Any]:
    """Run layer i on x [B, T, E]; the caller's attend(i, projected) returns (o [B, H, G, n, D], aux)."""
    return block(params, i, x, project(params, i, x, pos), attend, feed)
