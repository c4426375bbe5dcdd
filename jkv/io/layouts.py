"""Folders that are not loadable models: what they are, and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jkv.io.errors import FormatError, refusing
from jkv.io.files import read_json

_PICKLES = r".*\.(bin|pt|pth|ckpt|pkl)"
_HERE = "jkv reads language models: a .gguf file, or a folder with config.json and .safetensors files"
_SAVE = "take its Hugging Face version, whose folder has config.json and model.safetensors"
# Name pattern of a file or folder, what a folder that contains it is, and the way out; {name} is the name that matched.
# _ANY: folders that may also have config.json and .safetensors files, of something other than a language model.
_ANY = (
    (r"adapter_config\.json", "it is an adapter, whose weights are added to those of a model",
     "merge them with peft (merge_and_unload, then save_pretrained) and give the folder of the whole model"),
    (r"model_index\.json", "it is a diffusers pipeline, which makes pictures", _HERE),
    (r"(modules|config_sentence_transformers)\.json", "it is a sentence-transformers model, for embeddings", _HERE),
)  # fmt: skip
_BARE = (
    (r"models--.*", "it is a hub's cache of several repositories", "give hub:org/name"),
    (r"snapshots", "it is a hub's cache of a repository", "give hub:org/name, or one of its folders snapshots/COMMIT"),
    (r"[0-9a-f]{40}", "its folders are the commits of a repository", "give one of them, such as {name}"),
    (r".*\.gguf", "it has .gguf files", "give one of them, such as {name}"),
    (r"checkpoint-[0-9]+", "it has the checkpoints of a training", "give one of them, such as {name}"),
    (r"consolidated\..*|params\.json", "its weights are as their authors' own code reads them ({name})", _SAVE),
    (_PICKLES, "its weights are pickled ({name}), which can run any code when read", "convert them to safetensors"),
    (r".*\.(h5|msgpack|onnx|npz|mlmodel|tflite)", "its weights are those of another program ({name})", _SAVE),
    (r"_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt", "it is an orbax checkpoint",
     "restore it and give its arrays to jkv.io.from_pytree.from_tree"),
)  # fmt: skip


def refuse_others(folder: Path) -> None:
    """Raise FormatError for a folder that is not a model; the message says what it is and what to do."""
    with refusing(folder, "it cannot be listed", "check who may read it"):
        names = [path.name for path in folder.iterdir()]
    if found := other(names):
        cause, way_out = found
        base = (read_json(folder / "adapter_config.json") or {}).get("base_model_name_or_path")
        raise FormatError(folder, cause + (f", {base}" if base else ""), way_out)


def other(names: Iterable[str]) -> tuple[str, str] | None:
    """Return what a folder with these names is and the way out; None if it may be a model.

    >>> other(["config.json", "model.safetensors"]), other(["README.md", "model-q4.gguf"])
    (None, ('it has .gguf files', 'give one of them, such as model-q4.gguf'))
    """
    names = sorted(names)
    model = "config.json" in names and any(name.endswith(".safetensors") for name in names)
    for pattern, cause, way_out in _ANY if model else (*_ANY, *_BARE):
        if name := next((name for name in names if re.fullmatch(pattern, name)), None):
            return cause.replace("{name}", name), way_out.replace("{name}", name)
    return None
