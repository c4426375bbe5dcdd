"""Mistral: Llama with a sliding window in every layer."""

from collections.abc import Mapping
from typing import Any

from .config import Fields, ModelConfig, by_layer_type, read, sliding_window
from .llama import TENSORS, embed, head, layer, project

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]


def _windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    window = sliding_window(f)
    return by_layer_type(f, layers, window, ["full_attention" if window is None else "sliding_attention"] * layers)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type mistral; ValueError names an unsupported field."""
    return read(hf, "mistral", windows=_windows)
