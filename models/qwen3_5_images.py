"""Qwen3.5 as published: the text model of a multimodal checkpoint; the vision tower is not read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen3_5, qwen3_5_moe
from .config import Fields, ModelConfig
from .qwen3_5 import embed, head, layer, project, recur

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project", "recur"]

# Fields of images and their tokens
PICTURES = "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id".split()
WHOLE = ("eos_token_id", "bos_token_id", "tie_word_embeddings")  # fields of the whole config or of text_config
PARTS = {"qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}
BLOCKS = "model.language_model.layers"


def _read(c: ModelConfig, tensors: Any) -> Any:
    return qwen3_5_moe.each(BLOCKS, c, tensors) if c.experts else tensors


TENSORS = replace(
    qwen3_5.TENSORS,
    blocks=BLOCKS,
    embed="model.language_model.embed_tokens.weight",
    norm="model.language_model.norm.weight",
    unread=("model.visual.", "mtp."),
    read=_read,
)


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type qwen3_5 or qwen3_5_moe; ValueError names an unsupported field."""
    family = hf.get("model_type", "qwen3_5")
    f = Fields(hf, family)
    text = {name: x for name, x in f.mapping("text_config").items() if x is not None}
    text = {name: f.take(name, None) for name in WHOLE} | text
    for name in PICTURES:
        f.take(name, None)
    f.only("language_model_only", True, False, way_out="a flag: no picture is read here")
    f.only("quantization_config", way_out="load the unquantized checkpoint")
    f.done()
    return replace(PARTS[family].config(text), family=family)
