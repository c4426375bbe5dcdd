"""Weights of methods as their authors publish them: read, checked, never run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jkv.io.errors import FormatError, refusing
from jkv.io.safetensors import read_folder, read_json

HEADS = "full_attention_heads.tsv"


def kvzap(folder: str | Path) -> dict[str, np.ndarray]:
    """Surrogates of KVzap, f32: out [L,H,W] and offset [L,H], and for those of two layers into [L,W,E] and bias [L,W].

    A folder with a config.json (n_modules, input_dim, output_dim, hidden_dim) and one safetensors file of
    torch.nn.Linear, in torch.nn.Sequential where there are two. FormatError for anything else.
    """
    source = read_folder(folder)
    wanted = ("n_modules", "input_dim", "output_dim")
    sizes = [source.config.get(name) for name in wanted]
    hidden = source.config.get("hidden_dim")
    way_out = "give the folder of a KVzap model as it was published"
    if not all(isinstance(n, int) and n > 0 for n in sizes) or not isinstance(hidden, int | None):
        raise FormatError(folder, f"its config.json has no whole numbers {', '.join(wanted)}, hidden_dim", way_out)
    count, inputs, outputs = (int(n) for n in sizes if n is not None)
    last = "" if hidden is None else "2."
    parts = {"out": (f"{last}weight", (outputs, hidden or inputs)), "offset": (f"{last}bias", (outputs,))}
    if hidden is not None:
        parts |= {"into": ("0.weight", (hidden, inputs)), "bias": ("0.bias", (hidden,))}
    names = {f"layers.{i}.{end}" for end, _ in parts.values() for i in range(count)}
    if odd := sorted(names ^ set(source.tensors)):
        what = "is missing" if odd[0] in names else "is none of its tensors"
        raise FormatError(folder, f"{odd[0]!r} {what}", way_out)
    made = {}
    for name, (end, shape) in parts.items():
        found = [np.asarray(source.tensors[f"layers.{i}.{end}"](), np.float32) for i in range(count)]
        for i, x in enumerate(found):
            if x.shape != shape or not np.isfinite(x).all():
                cause = f"'layers.{i}.{end}' is {list(x.shape)}, not {list(shape)}, or holds NaN or infinity"
                raise FormatError(folder, cause, way_out)
        made[name] = np.stack(found)
    return made


def duoattention(folder: str | Path) -> tuple[np.ndarray, int, int]:
    """Of DuoAttention how much each kv head needs everything, f32[L,H] in [0, 1]; and its sinks and newest tokens.

    A folder with full_attention_heads.tsv (a row a layer, a number a head) and a config.json (sink_size, recent_size).
    FormatError for anything else.
    """
    path, way_out = Path(folder), "give a folder of DuoAttention's attn_patterns"
    config = read_json(path / "config.json") or {}
    sinks, recent = config.get("sink_size"), config.get("recent_size")
    if not (isinstance(sinks, int) and isinstance(recent, int) and sinks >= 0 and recent > 0):
        raise FormatError(path, "it has no config.json with sink_size and recent_size", way_out)
    with refusing(path / HEADS, "it is no table of numbers", way_out):
        heads = np.loadtxt(path / HEADS, dtype=np.float32, delimiter="\t", ndmin=2)
    if not heads.size or not np.isfinite(heads).all():
        raise FormatError(path / HEADS, "it is empty, or holds NaN or infinity", way_out)
    return np.clip(heads, 0, 1), sinks, recent
