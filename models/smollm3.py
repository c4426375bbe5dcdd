"""SmolLM3: Llama without RoPE in every fourth layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jkv.models.rope import Rope

from .config import Fields, ModelConfig, by_layer_type, one_rope, read
from .llama import TENSORS, embed, head, layer, project

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]


def _turns(f: Fields, layers: int) -> list[Any]:
    """Read `no_rope_layers`, in which 1 means RoPE and 0 none; the field stays, because `_ropes` reads it again."""
    period = f.number("no_rope_layer_interval", 4)
    turns = f.take("no_rope_layers", [int((i + 1) % period != 0) for i in range(layers)])
    if not isinstance(turns, list) or len(turns) != layers or not all(x in (0, 1) for x in turns):
        raise f.refuse("no_rope_layers", turns, f"it is num_hidden_layers = {layers} numbers, 1 or 0")
    f.rest["no_rope_layers"] = turns
    return turns


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    window = f.number("sliding_window", None)
    if not f.take("use_sliding_window", False):
        window = None
    f.take("max_window_layers", None)  # no code reads it
    default = ["full_attention" if turn or window is None else "sliding_attention" for turn in _turns(f, layers)]
    return by_layer_type(f, layers, window, default)


def _ropes(f: Fields, dim: int, context: int, windows: tuple[int | None, ...]) -> tuple[tuple[Rope, ...], int]:
    turns = f.take("no_rope_layers")
    ropes, context = one_rope(f, dim, context, windows)
    return tuple(rope if turn else replace(rope, inv_freq=()) for rope, turn in zip(ropes, turns, strict=True)), context


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type smollm3; ValueError names an unsupported field."""
    if hf.get("rope_theta") is None and not hf.get("rope_parameters"):
        hf = {**hf, "rope_theta": 2e6}
    return read(hf, "smollm3", tied=True, windows=_windows, ropes=_ropes)
