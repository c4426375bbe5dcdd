"""Qwen3.5 with experts, text only: MoE in every block, plus a shared expert with its own gate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from . import qwen3_5
from .config import Fields, ModelConfig
from .layers.moe import experts_of
from .moe_router import Experts
from .qwen3_5 import embed, head, hybrid, layer, project, recur
from .weights.params import Tensors

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project", "recur"]

FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def each(at: str, c: ModelConfig, tensors: Tensors) -> Tensors:
    """Split tensors that hold all experts, gate and up [N, 2 F, E], down [N, E, F], into one per expert."""
    e, out = c.experts, dict(tensors)
    assert e is not None
    sizes = {"gate_up_proj": (2 * e.hidden, c.width), "down_proj": (c.width, e.hidden)}

    def one(name: str, n: int, rows: slice) -> Any:
        got, wanted = tensors[name](), (e.count, *sizes[name.rpartition(".")[2]])
        if got.shape != wanted:
            raise ValueError(f"{name} has shape {got.shape}, the config needs {wanted}")
        return got[n][rows]

    rows = {"gate_proj": slice(e.hidden), "up_proj": slice(e.hidden, None), "down_proj": slice(None)}
    for i in e.at:
        for end in sizes:
            name = f"{at}.{i}.mlp.experts.{end}"
            if out.pop(name, None) is not None:
                parts = [part for part in rows if part.removesuffix("_proj") in end]
                for n in range(e.count):
                    out |= {
                        f"{at}.{i}.mlp.experts.{n}.{part}.weight": partial(one, name, n, rows[part]) for part in parts
                    }
    return out


TENSORS = replace(qwen3_5.TENSORS, read=partial(each, qwen3_5.TENSORS.blocks))


def experts(f: Fields, blocks: Sequence[int], count: int, active: int, **more: Any) -> Experts:
    """Read the experts of `blocks`; `count` and `active` are the family's defaults."""
    count, active = f.number("num_experts", count), f.number("num_experts_per_tok", active)
    hidden, shared = f.number("moe_intermediate_size", 512), f.number("shared_expert_intermediate_size", 512)
    return replace(experts_of(f, count, active, hidden, shared=shared, **more), at=tuple(blocks))


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen3_5_moe_text; ValueError names an unsupported field."""
    unused = {"intermediate_size": hf.get("moe_intermediate_size", 512)}  # no block has a dense MLP
    return hybrid(unused | dict(hf), "qwen3_5_moe_text", FIELDS, lambda f, depth: experts(f, range(depth), 256, 8))
