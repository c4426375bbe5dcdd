"""Local model folders in the Hugging Face layout, read and written: safetensors weights, JSON around them."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jkv.host.results import beside, overwrite
from jkv.io.errors import FormatError, refusing
from jkv.io.source import Source
from jkv.io.tokenizer import Tokenizer

_AGAIN = "download the folder again"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LARGEST = 1 << 26  # bytes of a file of texts: the largest tokenizers have half of that
_FLOATS = ("F64", "F32", "F16", "BF16")
_TYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "U8": np.uint8}


def read_folder(path: str | Path) -> Source:
    """The model in the folder at `path`; raises FormatError naming the file that is missing or broken."""
    folder = Path(path)
    config = read_json(folder / "config.json")
    if config is None:
        raise FormatError(folder, "it has no config.json", "give the folder of a Hugging Face style model")
    tensors: dict[str, Callable[[], np.ndarray]] = {}
    for shard, wanted in _shards(folder).items():
        tensors |= _open_shard(shard, wanted)
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise FormatError(
            folder, f"config.json claims {layers:,} layers but there are {len(tensors):,} tensors", _AGAIN
        )
    return Source.of(config, tensors, _tokenizer(folder, config))


def write_folder(
    path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokenizer: Tokenizer | None
) -> None:
    """A model as `read_folder` reads it, config.json last: what a killed write leaves is no model.

    ValueError for a tensor that holds NaN or infinity; OSError.
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


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is no such file; raises FormatError if it is anything else."""
    content = _small(path)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError, OSError) as error:
        raise FormatError(path, f"it cannot be read as JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise FormatError(path, f"it holds a {type(value).__name__} where a JSON object belongs", _AGAIN)
    return value


def _small(path: Path) -> bytes | None:
    """The bytes of a file, None if there is none; raises FormatError for what has no end or is far too large."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise FormatError(path, "it is not a regular file", _AGAIN)
        if (size := path.stat().st_size) > _LARGEST:
            raise FormatError(path, f"it has {size:,} bytes; {_LARGEST:,} are the most", _AGAIN)
        return path.read_bytes()
    except OSError as error:
        raise FormatError(path, f"it cannot be read ({error.strerror})", _AGAIN) from error


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Which tensors to take from which file (None: all)."""
    index = read_json(folder / _INDEX)
    if index is None:
        return {file: None for file in _lone_files(folder)}
    entries = index.get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise FormatError(folder / _INDEX, "it has no weight_map", _AGAIN)
    shards: dict[Path, set[str] | None] = {}
    for name, file in entries.items():
        # A shard lies beside its index. Anything else could reach files outside of the folder.
        if not isinstance(file, str) or "\\" in file or Path(file).name != file or not file.endswith(".safetensors"):
            raise FormatError(folder / _INDEX, f"entry {name!r} names the file {file!r}", "do not use this folder")
        names = shards.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    for shard in shards:
        if not shard.is_file():
            raise FormatError(folder, f"shard {shard.name} named by {_INDEX} is missing", _AGAIN)
    return shards


def _lone_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if len(files) == 1:
        return files
    if folder / "model.safetensors" in files:
        return [folder / "model.safetensors"]
    if files:
        raise FormatError(folder, f"it has {len(files)} .safetensors files but no {_INDEX}", _AGAIN)
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        cause = f"its weights are pickled ({pickles[0]}), which can run any code when read"
        raise FormatError(folder, cause, "convert them to safetensors")
    raise FormatError(folder, "it has no .safetensors file", _AGAIN)


def read_file(path: str | Path) -> dict[str, Callable[[], np.ndarray]]:
    """The tensors of one file, each as a function that reads it; raises FormatError."""
    return _open_shard(Path(path).expanduser(), None)


def _open_shard(path: Path, wanted: set[str] | None) -> dict[str, Callable[[], np.ndarray]]:
    """The tensors of one file as functions that read them; only the header is read now."""
    import ml_dtypes
    from safetensors import SafetensorError, safe_open

    types = _TYPES | {"BF16": ml_dtypes.bfloat16}
    try:
        handle = safe_open(path, framework="np")
        names = set(handle.keys())
        missing = sorted((wanted or set()) - names)
        if missing:
            raise FormatError(path, f"tensor {missing[0]!r} named by {_INDEX} is not in it", _AGAIN)
        chosen = sorted(names if wanted is None else wanted)
        header, start, data = _mapped(path)
        for name in chosen:
            coded = name.endswith(("_blocks", "_scales"))  # MXFP4
            if (kind := header[name]["dtype"]) not in (*_FLOATS, *["U8"] * coded):
                raise FormatError(path, f"tensor {name!r} has type {kind}", f"use weights of type {', '.join(_FLOATS)}")
    except (SafetensorError, OSError) as error:
        raise FormatError(path, f"it cannot be read as safetensors ({error})", _AGAIN) from error

    def thunk(name: str) -> Callable[[], np.ndarray]:
        kind, shape, (at, _) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
        return lambda: np.frombuffer(data, types[kind], prod(shape), start + at).reshape(shape)

    return {name: thunk(name) for name in chosen}


def _mapped(path: Path) -> tuple[dict[str, Any], int, mmap.mmap]:
    """The header of a file that was found to be whole, where its numbers begin, and the file in memory.

    So of a tensor only those parts are read that a process takes.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        return header, 8 + size, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The folder's tokenizer with the end ids of all its configurations; None without a tokenizer.json."""
    path = folder / "tokenizer.json"
    content = _small(path)
    if content is None:
        return None
    from tokenizers import Tokenizer as Core

    with refusing(path, "it is no tokenizer", _AGAIN):
        core = Core.from_buffer(content)
        # A tokenizer saved in training may cut or fill texts to a length.
        core.no_truncation()
        core.no_padding()
    names = read_json(folder / "tokenizer_config.json") or {}
    generation = read_json(folder / "generation_config.json") or {}
    bos, eos = (_token_id(core, names.get(key)) for key in ("bos_token", "eos_token"))
    ends = [i for source in (config, generation) for i in _ids(source.get("eos_token_id"))]
    if bos is None:
        bos = next(iter(_ids(config.get("bos_token_id"))), None)
    # What the tokenizer puts around an empty text tells whether it begins every text.
    around = core.encode("", add_special_tokens=True).ids
    return Tokenizer(
        core,
        bos_id=bos,
        eos_ids=ends if eos is None else [eos, *ends],
        add_bos=bos is not None and around[:1] == [bos],
        template=_template(folder, names),
    )


def _token_id(core: Any, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]


def _template(folder: Path, names: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, else an entry, where a list of named ones has a default."""
    path = folder / "chat_template.jinja"
    if (content := _small(path)) is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise FormatError(path, f"it cannot be read ({error})", _AGAIN) from error
    value = names.get("chat_template")
    if isinstance(value, list):
        value = next((v.get("template") for v in value if isinstance(v, dict) and v.get("name") == "default"), None)
    return value if isinstance(value, str) else None
