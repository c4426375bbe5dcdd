"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused matrices, partial RoPE and LongRoPE.

Transformers rotates with the short factors while a text fits the original context, and with the long ones from the next
token on, including keys it has seen. Keys in a compressed cache cannot follow, so the declared context decides: the
long factors if `max_position_embeddings` exceeds the original context. For a model of short texts only, use the same
config with `max_position_embeddings` = `original_max_position_embeddings` and its previous `attention_factor`.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from jkv.models.rope import Rope

from .config import Fields, ModelConfig, one_rope, read
from .llama import TENSORS as LLAMA
from .llama import embed, head, layer, project
from .weights.params import Names

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

FUSED = {"qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)}
PART, OLD = "partial_rotary_factor", "original_max_position_embeddings"


def _parts(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    kv = c.heads * c.head_dim
    return {"qkv_proj.weight": (c.groups * kv, kv, kv), "gate_up_proj.weight": (c.hidden, c.hidden)}


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {end: (sum(rows), c.width) for end, rows in _parts(c).items()}


TENSORS = Names(block={**LLAMA.block, **FUSED}, shapes=_shapes, parts=_parts)


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    return (f.number("sliding_window", None),) * layers


def _ropes(
    part: float, f: Fields, dim: int, context: int, windows: tuple[int | None, ...]
) -> tuple[tuple[Rope, ...], int]:
    old, given = f.number(OLD, context), f.mapping("rope_scaling") or f.mapping("rope_parameters")
    turning = int(dim * part)
    if turning < 2 or turning % 2:
        raise f.refuse(PART, part, f"{turning} of {dim} channels would turn, and channels turn in pairs")
    kind = given.get("rope_type") or given.get("type")
    if kind not in ("longrope", "su", "yarn"):  # plain RoPE; Phi-3 configs name LongRoPE by any of the three
        f.rest["rope_parameters"] = given
        return one_rope(f, turning, context, windows)
    theta = f.number("rope_theta", 1e4, float)
    return (_long({"rope_theta": theta, OLD: old} | given, f.family, turning, context),) * len(windows), context


def _long(given: Mapping[str, Any], family: str, turning: int, context: int) -> Rope:
    """Read LongRoPE (2402.13753): a factor per frequency; cos and sin times sqrt(1 + ln s / ln old)."""
    f = Fields(given, family, where="rope_scaling.")
    for name in ("type", "rope_type"):
        f.take(name, None)
    old, theta = f.number(OLD), f.number("rope_theta", kind=float)
    lists = {name: f.take(name) for name in ("short_factor", "long_factor")}
    for name, x in lists.items():
        numbers = isinstance(x, list) and all(type(y) in (int, float) and 0 < y < math.inf for y in x)
        if not numbers or len(x) != turning // 2:
            raise f.refuse(name, x, f"it is {turning // 2} positive numbers, one for each pair of channels that turns")
    factor = f.number("factor", context / old, float)
    gain = math.sqrt(1 + math.log(factor) / math.log(old)) if factor > 1 < old else 1.0
    scale = f.number("attention_factor", gain, float)
    f.done()
    factors = lists["long_factor" if context > old else "short_factor"]
    freqs = tuple(theta ** (-2 * i / turning) / x for i, x in enumerate(factors))
    return Rope(inv_freq=freqs, longest=context, scale=scale)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type phi3; ValueError names an unsupported field."""
    f = Fields({PART: hf.get(PART)}, "phi3")
    part, rest = f.number(PART, 1.0, float, most=1), {k: v for k, v in hf.items() if k != PART}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(given := hf.get(name), dict):
            part = Fields({PART: given.get(PART)}, "phi3", where=f"{name}.").number(PART, part, float, most=1)
            rest[name] = {k: v for k, v in given.items() if k != PART}
    return read({"rms_norm_eps": 1e-5} | rest, "phi3", windows=_windows, ropes=partial(_ropes, part))
