"""Qwen3-Next: the blocks of Qwen3.5 with experts in most; checkpoints group a mixer's tensors by key head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from . import qwen3_5, qwen3_moe
from .config import ModelConfig
from .qwen3_5 import embed, head, hybrid, layer, project, recur
from .qwen3_5_moe import FIELDS, each, experts
from .weights.params import Tensors

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project", "recur"]

SPARSE = ("mlp_only_layers", "decoder_sparse_step")


def split_projections(c: ModelConfig, tensors: Tensors) -> Tensors:
    """Split the two mixer tensors that checkpoints group by key head into one tensor per projection.

    They are [G (2 N + 2 R P), E] with queries, keys, values and gates, and [G 2 R, E] with strengths and step sizes.
    """
    m, blocks = c.mixers, qwen3_5.TENSORS.blocks
    assert m is not None
    out, each_heads = dict(each(blocks, c, tensors)), m.heads // m.groups
    values = each_heads * m.head_dim
    cuts = {
        "qkvz": np.cumsum([0, m.state, m.state, values, values]).tolist(),
        "ba": np.cumsum([0, each_heads, each_heads]).tolist(),
    }

    def rows(name: str, cut: list[int], parts: list[int]) -> Any:
        got, wanted = np.asarray(tensors[name]()), (m.groups * cut[-1], c.width)
        if got.shape != wanted:
            raise ValueError(f"{name} has shape {got.shape}, the config needs {wanted}")
        grouped = got.reshape(m.groups, cut[-1], c.width)
        return np.concatenate([grouped[:, cut[k] : cut[k + 1]].reshape(-1, c.width) for k in parts])

    for i in m.at:
        for packed, parts in (("qkvz", {"qkv": [0, 1, 2], "z": [3]}), ("ba", {"b": [0], "a": [1]})):
            at = f"{blocks}.{i}.linear_attn.in_proj_"
            if out.pop(f"{at}{packed}.weight", None) is not None:
                for end, of in parts.items():
                    out[f"{at}{end}.weight"] = lambda n=f"{at}{packed}.weight", c=cuts[packed], of=of: rows(n, c, of)
    return out


TENSORS = replace(qwen3_5.TENSORS, read=split_projections)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen3_next; ValueError names an unsupported field."""

    def made(f: Any, depth: int) -> Any:
        normed, without = bool(f.take("norm_topk_prob", True)), qwen3_moe.dense(f.rest, depth)
        for name in SPARSE:
            f.take(name, None)
        blocks = [i for i in range(depth) if i not in without]
        return experts(f, blocks, 512, 10, normed=normed)

    return hybrid({"intermediate_size": 5632} | dict(hf), "qwen3_next", (*FIELDS, *SPARSE, "norm_topk_prob"), made)
