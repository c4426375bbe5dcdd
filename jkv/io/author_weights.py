"""Method weights in the formats their authors publish: read and checked, never executed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jkv.io.errors import FormatError, refusing
from jkv.io.files import read_json
from jkv.io.safetensors import read_file, read_folder

HEADS = "full_attention_heads.tsv"
_FASTKVZIP = {  # tensor of a layer's gate -> its name here
    "q_proj.weight": "query.kernel",
    "q_proj.bias": "query.bias",
    "k_proj.weight": "key.kernel",
    "q_norm.weight": "query_norm.scale",
    "k_norm.weight": "key_norm.scale",
    "k_base": "sinks",
    "b": "shift",
}


def kvzap(folder: str | Path) -> dict[str, np.ndarray]:
    """Read the surrogate models of KVzap from a folder.

    The folder has a config.json (n_modules, input_dim, output_dim, hidden_dim) and one safetensors file: a
    torch.nn.Linear per layer, or two in a torch.nn.Sequential if hidden_dim is set.

    Returns:
        The f32 arrays of `nn.Surrogate` by name, with leading axis L.

    Raises:
        FormatError: The folder is anything else.
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
    parts = {"out.kernel": (f"{last}weight", (outputs, hidden or inputs)), "out.bias": (f"{last}bias", (outputs,))}
    if hidden is not None:
        parts |= {"hidden.0.kernel": ("0.weight", (hidden, inputs)), "hidden.0.bias": ("0.bias", (hidden,))}
    names = {f"layers.{i}.{end}" for end, _ in parts.values() for i in range(count)}
    if odd := sorted(names ^ set(source.tensors)):
        what = "is missing" if odd[0] in names else "is none of its tensors"
        raise FormatError(folder, f"{odd[0]!r} {what}", way_out)
    made = {}
    for name, (end, shape) in parts.items():
        found = {key: source.tensors[key]() for key in (f"layers.{i}.{end}" for i in range(count))}
        x = _stacked(folder, found, shape, way_out)
        made[name] = x.swapaxes(1, 2) if name.endswith("kernel") else x
    return made


def _stacked(source: str | Path, found: Mapping[str, np.ndarray], shape: tuple[int, ...], way_out: str) -> np.ndarray:
    """Stack one tensor of every layer to f32[L,...]; FormatError for another shape, NaN or infinity."""
    made = []
    for name, x in found.items():
        x = np.asarray(x, np.float32)
        if x.shape != shape or not np.isfinite(x).all():
            cause = f"{name!r} is {list(x.shape)}, not {list(shape)}, or holds NaN or infinity"
            raise FormatError(source, cause, way_out)
        made.append(x)
    return np.stack(made)


def duoattention(folder: str | Path) -> tuple[np.ndarray, int, int]:
    """Read a head pattern of DuoAttention from a folder.

    The folder has full_attention_heads.tsv (a line per layer, a number per kv head) and a config.json (sink_size,
    recent_size).

    Returns:
        f32[L,H] in [0, 1], how much each kv head needs the full context; the sink size; the recent window, both in
        tokens.

    Raises:
        FormatError: The folder is anything else.
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


def fastkvzip(file: str | Path) -> dict[str, np.ndarray]:
    """Read the gates of Fast KVzip from a safetensors file.

    The authors publish torch.save files, such as qwen3-8b/q4_dim16_sink16.pt, which are pickles and could run code. jkv
    reads the `module` of one, a list of state dicts of the layers, converted to safetensors with names such as
    "module.0.b" (docs/training.md has the lines that convert one).

    Returns:
        The f32 arrays of `nn.SinkGate` by name, with leading axis L.

    Raises:
        FormatError: The file is anything else.
    """
    way_out = "give the module of a gate of Fast KVzip as safetensors (docs/training.md says how)"
    with refusing(file, "it is no file of safetensors", way_out):
        tensors = read_file(file)
    # Check that every layer has all tensors and nothing else.
    named = [re.fullmatch(r"module\.(\d{1,9})\.(.+)", name) for name in tensors]
    count = 1 + max((int(x[1]) for x in named if x), default=-1)
    names = {f"module.{i}.{name}" for name in _FASTKVZIP for i in range(min(count, len(tensors)))}
    if odd := sorted(names ^ set(tensors)) or ["module.0.b"][count:]:
        what = "is missing" if odd[0] not in tensors else "is none of its tensors"
        raise FormatError(file, f"{odd[0]!r} {what}", way_out)
    # Take the sizes from the first layer, then check and stack all layers.
    first = {name: np.shape(tensors[f"module.0.{name}"]()) for name in ("k_base", "b", "k_proj.weight")}
    if [len(x) for x in first.values()] != [4, 3, 2]:
        forms = ", ".join(str(list(x)) for x in first.values())
        raise FormatError(file, f"its k_base, b and k_proj.weight are {forms}, of 4, 3 and 2 axes each", way_out)
    (h, _, s, d), (*_, g), (_, e) = first.values()
    shapes = ((h * g * d, e), (h * g * d,), (h * d, e), (d,), (d,), (h, 1, s, d), (h, 1, g))
    own = ((h, g, d, e), (h, g, d), (h, d, e), (d,), (d,), (h, s, d), (h, g))
    made = {}
    for (name, to), shape, form in zip(_FASTKVZIP.items(), shapes, own, strict=True):
        found = {key: tensors[key]() for key in (f"module.{i}.{name}" for i in range(count))}
        x = _stacked(file, found, shape, way_out).reshape(count, *form)
        made[to] = np.moveaxis(x, -1, 1) if to.endswith("kernel") else x
    return made
