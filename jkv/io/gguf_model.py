"""From a GGUF file to a model: names, configuration and the converter's rearrangements undone."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError
from jkv.io.gguf import File, Rows, open_file
from jkv.io.gguf_vocab import build_tokenizer
from jkv.io.source import Source

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
_MODEL_TYPES |= {"granite": "granite", "smollm3": "smollm3", "olmo2": "olmo2"}
_GEMMA = ("gemma2", "gemma3")
_TURNED = ("llama", "granite", "smollm3")  # whose rows of queries and keys the converter rearranges
_AGAIN = "download or convert it again"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma normalises before and after each half of a layer, which moves the meaning of ffn_norm; OLMo 2 only after.
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# Tables of rotary frequencies: they say nothing that the metadata does not, or are read apart.
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?([a-z_]+)\.(weight|bias)")
# What all Llama 3 models have; the file holds only the table made from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_gguf(path: str | Path) -> Source:
    """The model in the GGUF file at `path`; raises FormatError if it is broken or of a kind that cannot be run."""
    file = open_file(path)
    arch = file.meta.get("general.architecture")
    if arch not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise FormatError(path, f"its architecture is {arch!r}", f"use a model of one of these: {known}")
    config = _config(file, arch)
    from jkv.io.gguf_blocks import Blocks

    names = _names(file, arch, config)
    tensors = {target: partial(_given, rows) for target, rows in names.items()}
    kinds = {target: rows.tensor.type for target, rows in names.items()}
    kept = {target: partial(Blocks, rows) for target, rows in names.items() if _codes(rows)}
    tokenizer = build_tokenizer(file)
    return replace(Source.of(config, tensors, tokenizer), blocks=kept, kinds=kinds, file=file.path)


def _codes(rows: Rows) -> bool:
    from jkv.io.gguf_blocks import KEPT

    return rows.tensor.type in KEPT and len(rows.shape) > 1


def _given(rows: Rows) -> Rows:
    return rows


def _config(file: File, arch: str) -> dict[str, Any]:
    """The metadata as Hugging Face would have written it in config.json."""

    def read(key: str, kind: type, default: Any = None) -> Any:
        value = file.meta.get(f"{arch}.{key}", default)
        valid = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        if not valid or not 0 < value < 1 << 32:
            raise FormatError(file.path, f"metadata {arch}.{key} is {value!r}, not a positive number", _AGAIN)
        return kind(value)

    heads, width = read("attention.head_count", int), read("embedding_length", int)
    if f"{arch}.expert_count" in file.meta:
        raise FormatError(file.path, "it is a mixture of experts", "use a dense model")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise FormatError(file.path, "it has no two-dimensional tensor token_embd.weight", _AGAIN)
    config = {
        "model_type": _MODEL_TYPES[arch],
        "hidden_size": width,
        "intermediate_size": read("feed_forward_length", int),
        "num_hidden_layers": read("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", int, heads),
        "head_dim": read("attention.key_length", int, max(1, width // heads)),
        "vocab_size": table.shape[0],
        "max_position_embeddings": read("context_length", int),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon", float),
        "rope_theta": read("rope.freq_base", float, 1e6 if arch == "gemma3" else 1e4),
        "rope_scaling": _rope_scaling(file, arch),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    blocks = {match[1] for match in map(_NAME.fullmatch, file.tensors) if match and match[1]}
    if len(blocks) != config["num_hidden_layers"]:
        claimed = f"it claims {config['num_hidden_layers']:,} layers but has tensors for {len(blocks):,}"
        raise FormatError(file.path, claimed, _AGAIN)
    if read("rope.dimension_count", int, config["head_dim"]) != config["head_dim"]:
        raise FormatError(file.path, "only a part of each head is rotated", "use a model with full rotary positions")
    window = f"{arch}.attention.sliding_window" in file.meta and arch in ("llama", *_GEMMA)
    config["sliding_window"] = read("attention.sliding_window", int) if window else None
    if arch == "llama" and window:
        config["model_type"] = "mistral"
    if arch not in _GEMMA:
        config["hidden_act"] = "silu"
    elif arch == "gemma2":
        caps = {f"{x}_logit_softcapping": read(f"{x}_logit_softcapping", float) for x in ("attn", "final")}
        config |= _gemma(config, largest=46) | caps
    else:
        config |= _gemma(config, largest=62) | {
            "rope_local_base_freq": read("rope.freq_base_swa", float, 1e4),
            "sliding_window_pattern": 6,
        }
    if arch == "granite":
        config |= {name: read(key, float) for name, key in _GRANITE.items()}
    if "olmo2.attention.sliding_window" in file.meta:
        raise FormatError(file.path, "it is an OLMo 3, with local layers", "use the model's safetensors folder")
    if "rope_freqs.weight" in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    return config


def _gemma(config: dict[str, Any], largest: int) -> dict[str, Any]:
    # The largest of a generation (of so many layers) scales its queries by the width of a head's share, the others by
    # the head's own.
    share = config["hidden_size"] // config["num_attention_heads"]
    own = config["num_hidden_layers"] != largest
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config["head_dim"] if own else share}


def _rope_scaling(file: File, arch: str) -> dict[str, Any] | None:
    kind = file.meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = file.meta.get(f"{arch}.rope.scaling.factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float) or not 0 < factor < 1e6:
        raise FormatError(file.path, f"its rotary scaling is {kind!r} by {factor!r}", "use a model with linear scaling")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    original = file.meta.get(f"{arch}.rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if isinstance(original, int) else {})


def _llama3_scaling(file: File, config: dict[str, Any]) -> dict[str, Any]:
    """The Llama 3 parameters that give the table in rope_freqs.weight, which divides each frequency."""
    table = file.array("rope_freqs.weight").astype(np.float64)
    half = config["head_dim"] // 2
    if table.shape != (half,) or not np.all(np.isfinite(table)) or table.min() < 0.99:
        raise FormatError(file.path, f"rope_freqs.weight is not {half} numbers of at least 1", _AGAIN)
    factor = float(table.max())
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(table, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise FormatError(file.path, "rope_freqs.weight is not a Llama 3 table", "use the model's safetensors folder")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _names(file: File, arch: str, config: dict[str, Any]) -> dict[str, Rows]:
    """The tensors by Hugging Face name, what the converter did to each undone.

    A tensor without one means a variant that would be run wrongly.
    """
    block = _GEMMA_BLOCK if arch in (*_GEMMA, "olmo2") else _BLOCK
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, Rows] = {}
    for name, tensor in file.tensors.items():
        if _IGNORED.fullmatch(name):
            continue
        match = _NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, "", "")
        target = (_TOP if layer is None else block).get(part)
        if target is None:
            raise FormatError(
                file.path, f"tensor {name!r} is unknown for {arch}", "use another conversion of this model"
            )
        how: dict[str, Any] = {}
        if arch in _TURNED and part in heads:
            how = {"order": _unpermuted(file.path, name, tensor.shape[0], heads[part])}
        elif arch in _GEMMA and part.endswith("norm"):
            how = {"less": 1.0}  # Gemma stores its norm weights less one; the converter added it
        prefix = "" if layer is None else f"model.layers.{int(layer)}."
        found[f"{prefix}{target}.{kind}"] = file.rows(name, **how)
    return found


def _unpermuted(path: Path, name: str, rows: int, heads: int) -> np.ndarray:
    """Where each row lies after the converter's order for Llama: it interleaves the two rotary halves of each head."""
    if rows % (2 * heads):
        raise FormatError(path, f"tensor {name!r} has {rows} rows, which {heads} heads cannot share", _AGAIN)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
