"""Gemma 3 of 4B and more: the text model of a multimodal checkpoint; the vision tower is not read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gemma3
from .config import Fields, ModelConfig
from .gemma3 import embed, head, layer, project

__all__ = ["TENSORS", "config", "embed", "head", "layer", "project"]

TENSORS = replace(
    gemma3.TENSORS,
    blocks="language_model.model.layers",
    embed="language_model.model.embed_tokens.weight",
    norm="language_model.model.norm.weight",
    head="language_model.lm_head.weight",
    unread=("vision_tower.", "multi_modal_projector."),
)
# Defaults of transformers' Gemma3TextConfig, which the text_config of models of 4B and more leaves out.
DEFAULTS = dict(
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131072,
)
# Fields of images and their tokens
PICTURES = """vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id
    eoi_token_id image_token_id""".split()
WHOLE = ("eos_token_id", "bos_token_id", "tie_word_embeddings")  # fields of the whole config or of text_config


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config dict with model_type gemma3; ValueError names an unsupported field."""
    f = Fields(hf, "gemma3")
    text = {name: x for name, x in f.mapping("text_config").items() if x is not None or name == "sliding_window"}
    text = {name: f.take(name, None) for name in WHOLE} | text
    for name in PICTURES:
        f.take(name, None)
    f.only("quantization_config", way_out="load the unquantized checkpoint, or a GGUF file of the same model")
    f.done()
    return replace(gemma3.config(DEFAULTS | text), family="gemma3")
