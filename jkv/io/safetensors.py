"""Model folders in the Hugging Face layout, read and written: safetensors weights and JSON files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FormatError
from jkv.io.files import AGAIN, INDEX, read_json, refuse_pointer
from jkv.io.layouts import refuse_others
from jkv.io.model_source import Source
from jkv.io.tokenizer import Tokenizer
from jkv.io.vocabulary import read_tokenizer
from jkv.utils.json_results import beside, overwrite

_WHOLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_TYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "U8": np.uint8}


def read_folder(path: str | Path) -> Source:
    """Describe the model in the folder at `path`; raises FormatError that names the missing or broken file."""
    folder = Path(path)
    refuse_others(folder)
    config = read_json(folder / "config.json")
    if config is None:
        raise FormatError(folder, "it has no config.json", "give the folder of a Hugging Face style model")
    tensors: dict[str, Callable[[], np.ndarray]] = {}
    for shard, wanted, elsewhere in _shards(folder):
        found = _open_shard(shard, wanted)
        tensors |= {name: read for name, read in found.items() if name not in elsewhere}
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise FormatError(folder, f"config.json claims {layers:,} layers but there are {len(tensors):,} tensors", AGAIN)
    return Source.of(config, tensors, read_tokenizer(folder, config))


def write_folder(
    path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokenizer: Tokenizer | None
) -> None:
    """Write a model as `read_folder` reads it; config.json is written last, so a killed write leaves no model.

    Args:
        path: Folder, created if needed.
        config: Hugging Face config dict.
        tensors: Tensors by Hugging Face name.
        tokenizer: Tokenizer to write as well, or None.

    Raises:
        ValueError: A tensor holds NaN or infinity; nothing is written.
        OSError: A file cannot be written.
    """
    from safetensors.numpy import save_file

    if wrong := [name for name, x in tensors.items() if not np.isfinite(x).all()]:
        raise ValueError(f"{wrong[0]} holds NaN or infinity; nothing was written to {path}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    fresh = beside(folder / "model.safetensors")
    try:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, fresh)
        fresh.replace(folder / "model.safetensors")
    finally:
        fresh.unlink(missing_ok=True)
    if tokenizer is not None:
        core, names = tokenizer.saved()
        overwrite(folder / "tokenizer.json", core)
        overwrite(folder / "tokenizer_config.json", json.dumps(names, indent=1) + "\n")
    overwrite(folder / "config.json", json.dumps(dict(config), indent=1) + "\n")


def _shards(folder: Path) -> list[tuple[Path, set[str], set[str]]]:
    """List each weight file, the tensors it must have, and the indexed tensors that belong to another file.

    Tensors that the index leaves out are read too, because they belong to the model as well.
    """
    index = None if (folder / _WHOLE).is_file() else read_json(folder / INDEX)
    if index is None:
        return [(_lone_file(folder), set(), set())]
    entries = index.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise FormatError(folder / INDEX, "it has no weight_map", AGAIN)
    for name, file in entries.items():
        # A shard lies beside its index. Any other path could reach files outside the folder.
        if not isinstance(file, str) or "\\" in file or Path(file).name != file or not file.endswith(".safetensors"):
            raise FormatError(folder / INDEX, f"entry {name!r} names the file {file!r}", "do not use this folder")
        if not (folder / file).is_file():
            raise FormatError(folder, f"shard {file} named by {INDEX} is missing", AGAIN)
    own = {file: {name for name, place in entries.items() if place == file} for file in entries.values()}
    return [(folder / file, names, entries.keys() - names) for file, names in own.items()]


def _lone_file(folder: Path) -> Path:
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if folder / _WHOLE in files or len(files) == 1:
        return folder / _WHOLE if folder / _WHOLE in files else files[0]
    if files:
        raise FormatError(folder, f"it has {len(files)} .safetensors files but no {INDEX}", AGAIN)
    raise FormatError(folder, "it has no .safetensors file", AGAIN)


def read_file(path: str | Path) -> dict[str, Callable[[], np.ndarray]]:
    """Return readers of the tensors of one file, by name; raises FormatError."""
    return _open_shard(Path(path).expanduser())


def _open_shard(path: Path, wanted: Collection[str] = ()) -> dict[str, Callable[[], np.ndarray]]:
    """Return readers of the tensors of one file, by name; only the header is read now."""
    import ml_dtypes
    from safetensors import SafetensorError, safe_open

    types = _TYPES | {"BF16": ml_dtypes.bfloat16}
    try:
        refuse_pointer(path)
        names = set(safe_open(path, framework="np").keys())
        if missing := sorted(set(wanted) - names):
            raise FormatError(path, f"tensor {missing[0]!r} named by {INDEX} is not in it", AGAIN)
        header, start, data = _mapped(path)
        for name in sorted(names):
            coded = name.endswith(("_blocks", "_scales"))  # MXFP4
            if (kind := header[name]["dtype"]) not in (*_FLOATS, *["U8"] * coded):
                raise FormatError(path, f"tensor {name!r} has type {kind}", f"use weights of type {', '.join(_FLOATS)}")
    except (SafetensorError, OSError) as error:
        raise FormatError(path, f"it cannot be read as safetensors ({error})", AGAIN) from error

    def thunk(name: str) -> Callable[[], np.ndarray]:
        kind, shape, (at, _) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
        return lambda: np.frombuffer(data, types[kind], prod(shape), start + at).reshape(shape)

    return {name: thunk(name) for name in sorted(names)}


def _mapped(path: Path) -> tuple[dict[str, Any], int, mmap.mmap]:
    """Map a file that was already validated: its header, the offset of its data, and the mapped file.

    Mapping means that a process reads only the parts of a tensor that it uses.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        return header, 8 + size, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
