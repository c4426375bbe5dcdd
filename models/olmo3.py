"""OLMo 3: OLMo 2 with three local layers before each global one; only global layers scale their RoPE."""

from collections.abc import Mapping
from typing import Any

from jkv.models.rope import Rope

from .config import Fields, ModelConfig, by_layer_type, read, rope, sliding_window
from .olmo2 import TENSORS, embed, head, layer, project

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    default = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    return by_layer_type(f, layers, sliding_window(f), default)


def _ropes(f: Fields, dim: int, context: int, windows: tuple[int | None, ...]) -> tuple[tuple[Rope, ...], int]:
    near = {"rope_theta": f.number("rope_theta", 5e5, float)}
    far, given = near | f.mapping("rope_scaling"), f.mapping("rope_parameters")
    if unknown := set(given) - {"full_attention", "sliding_attention"}:
        raise f.refuse("rope_parameters", sorted(unknown), "give one dict each for full_attention, sliding_attention")
    whole = rope(far | (given.get("full_attention") or {}), f.family, dim, context)
    local = rope(near | (given.get("sliding_attention") or {}), f.family, dim, whole.longest)
    return tuple(whole if window is None else local for window in windows), whole.longest


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type olmo3; ValueError names an unsupported field."""
    return read({"rms_norm_eps": 1e-5} | dict(hf), "olmo3", windows=_windows, ropes=_ropes)
