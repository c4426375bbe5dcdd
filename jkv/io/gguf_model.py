"""GGUF file to model: names, config, and the converter's rearrangements undone."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError
from jkv.io.gguf import File, Rows
from jkv.io.gguf_keys import AGAIN, FOLDER, Metadata
from jkv.io.gguf_parts import open_model
from jkv.io.gguf_vocab import build_tokenizer
from jkv.io.model_source import Source
from jkv.utils.notes import note

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
_MODEL_TYPES |= {"granite": "granite", "smollm3": "smollm3", "olmo2": "olmo2"}
_GEMMA = ("gemma2", "gemma3")
_TURNED = ("llama", "granite", "smollm3")  # the converter permutes the query and key rows of these
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
# Gemma normalizes before and after each half of a layer, which changes the meaning of ffn_norm; OLMo 2 only after.
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GRANITE = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
_LARGEST = {"gemma2": 46, "gemma3": 62}
_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
_TABLE = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")  # rotary frequencies, in old files
_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?([a-z_]+)\.(weight|bias)")
# Shared by all Llama 3 models; the file has only the table computed from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_gguf(path: str | Path) -> Source:
    """Describe the model in the GGUF file at `path`, joined with the other parts of a split model beside it.

    Raises:
        FormatError: A file is broken or missing, or of an unsupported kind.
    """
    return describe(open_model(path))


def describe(file: File) -> Source:
    """Describe the model in an open file; raises FormatError if it cannot be run exactly as the file specifies."""
    meta = Metadata(file)
    if meta.arch not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise FormatError(file.path, f"its architecture is {meta.arch!r}", f"use a model of one of these: {known}")
    meta.only("general.type", "model", cause="and no model", way_out="give the file of the model itself")
    config = _config(meta)
    tokenizer = build_tokenizer(meta)
    meta.done()
    from jkv.io.gguf_blocks import Blocks

    names = _names(file, meta.arch, config)
    tensors = {target: partial(_given, rows) for target, rows in names.items()}
    kinds = {target: rows.tensor.type for target, rows in names.items()}
    kept = {target: partial(Blocks, rows) for target, rows in names.items() if _codes(rows)}
    return replace(Source.of(config, tensors, tokenizer), blocks=kept, kinds=kinds, file=file.path)


def _codes(rows: Rows) -> bool:
    from jkv.io.gguf_blocks import KEPT

    return rows.tensor.type in KEPT and len(rows.shape) > 1


def _given(rows: Rows) -> Rows:
    return rows


def _config(meta: Metadata) -> dict[str, Any]:
    """Convert the metadata to a Hugging Face config."""
    file, arch, read = meta.file, meta.arch, meta.number
    # Sizes.
    heads, width = read("attention.head_count", int), read("embedding_length", int)
    if experts := meta.optional("expert_count", int):
        raise meta.refuse("expert_count", experts, "so it is a mixture of experts", "use a dense model")
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise FormatError(file.path, "it has no two-dimensional tensor token_embd.weight", AGAIN)
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
        "rope_theta": read("rope.freq_base", float, 1e4),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    # Check the claimed sizes, then add each family's own fields.
    blocks = {match[1] for match in map(_NAME.fullmatch, file.tensors) if match and match[1]}
    if len(blocks) != config["num_hidden_layers"]:
        claimed = f"it claims {config['num_hidden_layers']:,} layers but has tensors for {len(blocks):,}"
        raise FormatError(file.path, claimed, AGAIN)
    _check_heads(meta, config)
    config |= _windows(meta, config)
    if arch in _GEMMA:
        config |= _gemma(meta, config)
    else:
        config["hidden_act"] = "silu"
    if arch == "granite":
        meta.only("rope.scaling.finetuned", True, cause="so it turns no queries and keys")
        config |= {name: meta.optional(key, float) or 1.0 for name, key in _GRANITE.items()}
        config["attention_multiplier"] = meta.optional("attention.scale", float) or config["head_dim"] ** -0.5
        config["logits_scaling"] = read("logit_scale", float)
    # RoPE scaling comes from the metadata or from a table, never both.
    config["rope_scaling"] = _rope_scaling(meta)
    if _FACTORS in file.tensors:
        if config["rope_scaling"]:
            raise FormatError(file.path, f"it scales its positions by metadata and by {_FACTORS}", FOLDER)
        config["rope_scaling"] = _llama3_scaling(file, config)
    return config


def _check_heads(meta: Metadata, config: dict[str, Any]) -> None:
    """Raise FormatError for attention variants that are not supported."""
    dim = config["head_dim"]
    for part in ("", "_swa"):
        meta.only(f"rope.dimension_count{part}", dim, cause=f"so not all {dim} channels of a head are rotated")
        meta.only(f"attention.value_length{part}", dim, cause=f"but keys have {dim} channels: values must have as many")
    meta.only("attention.key_length_swa", dim, cause=f"but in other layers {dim}: all must have as many channels")
    meta.only("attention.causal", True, cause="so tokens see those behind them: only causal attention is computed")
    meta.only("embedding_length_out", config["hidden_size"], 0, cause="so it makes vectors of texts, and no tokens")
    if meta.arch in _TURNED:
        meta.only("tensor_data_layout", "Meta AI original pth", cause="an order of rows that is not known")


def _windows(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields of sliding window layers."""
    arch, layers = meta.arch, config["num_hidden_layers"]
    window = meta.optional("attention.sliding_window", int)
    if arch == "llama" and window:
        return {"sliding_window": window, "model_type": "mistral"}
    if arch == "olmo2" and window:
        raise meta.refuse("attention.sliding_window", window, "so it is an OLMo 3, with local layers", FOLDER)
    if arch not in _GEMMA:
        if window and window < config["max_position_embeddings"]:
            cause = "less than the context: layers of this architecture have no window here"
            raise meta.refuse("attention.sliding_window", window, cause, FOLDER)
        return {"sliding_window": None}
    local = _local(meta, layers) if window else [False] * layers
    return {"sliding_window": window, "layer_types": [f"{'sliding' if x else 'full'}_attention" for x in local]}


def _local(meta: Metadata, layers: int) -> list[bool]:
    """Return which Gemma layers are local: by a list, or all but the last of each period."""
    key = "attention.sliding_window_pattern"
    period = meta.take(key, 2 if meta.arch == "gemma2" else 6)
    if isinstance(period, np.ndarray) and period.dtype == bool and len(period) == layers:
        return period.tolist()
    if type(period) is not int or not 0 < period < 1 << 32:
        raise meta.refuse(key, period, f"neither a period nor {layers} times true or false")
    return [bool((i + 1) % period) for i in range(layers)]


def _gemma(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    # The largest model of a generation, recognized by its layer count, scales queries by hidden size / heads, the
    # others by the head dimension.
    share = config["hidden_size"] // config["num_attention_heads"]
    own = config["num_hidden_layers"] != _LARGEST[meta.arch]
    found = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config["head_dim"] if own else share}
    if meta.arch == "gemma3":
        return found | {"rope_local_base_freq": meta.number("rope.freq_base_swa", float, 1e4)}
    return found | {f"{x}_logit_softcapping": meta.number(f"{x}_logit_softcapping", float) for x in ("attn", "final")}


def _rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    """Return the RoPE scaling as llama.cpp reads it: linear if no type is named, with the key of old files too."""
    kind = meta.text("rope.scaling.type", "linear")
    factor, old = (meta.optional(key, float) for key in ("rope.scaling.factor", "rope.scale_linear"))
    if factor and old and factor != old:
        raise meta.refuse("rope.scale_linear", old, f"but {meta.name('rope.scaling.factor')} is {factor!r}", FOLDER)
    factor = (factor or old or 1.0) if kind != "none" else 1.0
    original = meta.optional("rope.scaling.original_context_length", int)
    gain = meta.optional("rope.scaling.attn_factor", float) or 1.0
    yarn = kind == "yarn"
    if kind not in ("none", "linear", "yarn") or (yarn and meta.arch == "gemma3"):
        known = "none and linear" + (" and yarn" if meta.arch != "gemma3" else "")
        raise meta.refuse("rope.scaling.type", kind, f"which is not supported: {known} are", FOLDER)
    # llama.cpp ignores these keys in these architectures, Hugging Face uses them: only values that agree are accepted.
    same = {"beta_fast": (32.0,), "beta_slow": (1.0,), "ext_factor": (float(yarn), -1.0)}
    same["attn_factor"] = (float(np.float32(_gain(factor if yarn else 1.0))),)
    for key, values in same.items():
        cause = f"where readers of such files agree on {values[0]:g} alone"
        meta.only(f"rope.scaling.yarn_{key}", *values, cause=cause)
    if not yarn and gain != 1:
        raise meta.refuse("rope.scaling.attn_factor", gain, "which is supported for yarn only", FOLDER)
    if factor == 1 and gain == 1:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if yarn:
        scaling |= {"attention_factor": gain * _gain(factor)} if gain != 1 else {}
        scaling |= {"original_max_position_embeddings": original} if original else {}
    return scaling


def _gain(factor: float) -> float:
    """Return the factor that YaRN applies to cos and sin."""
    return 1 + 0.1 * math.log(max(factor, 1.0))


def _llama3_scaling(file: File, config: dict[str, Any]) -> dict[str, Any]:
    """Recover the Llama 3 parameters from the table in rope_freqs.weight, which divides each frequency."""
    table = file.array(_FACTORS).astype(np.float64)
    half = config["head_dim"] // 2
    if table.shape != (half,) or not np.all(np.isfinite(table)) or table.min() < 0.99:
        raise FormatError(file.path, f"{_FACTORS} is not {half} numbers of at least 1", AGAIN)
    factor = float(table.max())
    wavelength = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(table, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise FormatError(file.path, f"{_FACTORS} is not a Llama 3 table", FOLDER)
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _names(file: File, arch: str, config: dict[str, Any]) -> dict[str, Rows]:
    """Map Hugging Face names to tensors, with the converter's changes undone.

    A tensor without a Hugging Face name means a variant that would be run wrongly, so it raises FormatError.
    """
    block = _GEMMA_BLOCK if arch in (*_GEMMA, "olmo2") else _BLOCK
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, Rows] = {}
    if tables := [name for name in file.tensors if _TABLE.fullmatch(name)]:
        note(f"{file.path}: {tables[0]} and the like are left unread ({len(tables)} tensors): metadata say the same")
    for name, tensor in file.tensors.items():
        if name == _FACTORS or name in tables:
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
            how = {"less": 1.0}  # Gemma stores norm weights minus one; the converter added it
        prefix = "" if layer is None else f"model.layers.{int(layer)}."
        found[f"{prefix}{target}.{kind}"] = file.rows(name, **how)
    return found


def _unpermuted(path: Path, name: str, rows: int, heads: int) -> np.ndarray:
    """Return the file row of each row: the converter interleaves the two rotary halves of each head for Llama."""
    if rows % (2 * heads):
        raise FormatError(path, f"tensor {name!r} has {rows} rows, which {heads} heads cannot share", AGAIN)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
