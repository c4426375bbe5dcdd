"""Folders of another kind, and files that stand for others: the message says what it is and where to go."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv.io.errors import FormatError
from jkv.io.load import read
from jkv.io.safetensors import read_folder
from jkv.models import TINY

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 269060552\n"
COMMIT = "0123456789" * 4
WHOLE = ("config.json", "model.safetensors")
KINDS = [  # what is in a folder, what it is, the way out
    (
        ("adapter_config.json", "adapter_model.safetensors"),
        "an adapter, whose weights are added to those of a model, org/base",
        "merge_and_unload",
    ),
    (
        (*WHOLE, "adapter_config.json"),
        "an adapter, whose weights are added to those of a model, org/base",
        "merge_and_unload",
    ),
    (("model_index.json", "unet/"), "diffusers", "language models"),
    ((*WHOLE, "modules.json", "1_Pooling/"), "sentence-transformers", "language models"),
    (("README.md", "m-q4.gguf", "config.json"), ".gguf files", "such as m-q4.gguf"),
    (("consolidated.00.pth", "params.json", "tokenizer.model"), "as their authors' own code", "Hugging Face version"),
    (("consolidated.safetensors", "params.json"), "as their authors' own code", "Hugging Face version"),
    (("config.json", "pytorch_model.bin"), "pickled .pytorch_model.bin", "convert them to safetensors"),
    (("config.json", "tf_model.h5"), "another program .tf_model.h5", "Hugging Face version"),
    (("config.json", "model.onnx"), "another program .model.onnx", "Hugging Face version"),
    (("refs/", "blobs/", "snapshots/"), "a hub's cache of a repository", "hub:org/name"),
    ((f"{COMMIT}/",), "commits of a repository", f"such as {COMMIT}"),
    (("models--org--name/", "version.txt"), "cache of several repositories", "hub:org/name"),
    (("config.json", "checkpoint-500/"), "checkpoints of a training", "such as checkpoint-500"),
    (("_METADATA", "d/", "manifest.ocdbt"), "an orbax checkpoint", "from_tree"),
    (("config.json",), "no .safetensors file", "download"),
    (("model.safetensors",), "no config.json", "Hugging Face"),
    ((), "no config.json", "Hugging Face"),
]


def fill(folder, names):
    folder.mkdir(exist_ok=True)
    for name in names:
        if name.endswith("/"):
            (folder / name).mkdir()
        elif name.endswith(".safetensors"):
            save_file({"a": np.ones(3, np.float32)}, folder / name)
        else:
            (folder / name).write_text('{"base_model_name_or_path": "org/base"}')
    return folder


@pytest.mark.parametrize("names, what, way_out", KINDS)
def test_foreign_folder_is_refused_with_remedy(tmp_path, names, what, way_out):
    with pytest.raises(FormatError, match=f"{what}.*; .*{way_out}"):
        read_folder(fill(tmp_path, names))


@pytest.mark.parametrize("beside", ["training_args.bin", "original/", "onnx/", "checkpoint-5/", "m.gguf"])
def test_unrelated_files_beside_model_are_ignored(tmp_path, beside):
    assert list(read_folder(fill(tmp_path, (*WHOLE, beside))).tensors) == ["a"]


FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")
FILES += ("tokenizer.model", "generation_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.mark.parametrize("name", [*FILES, "shard", "m.gguf"])
def test_git_lfs_pointer_is_refused_with_remedy(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    if name in ("shard", "model.safetensors.index.json"):
        (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
        index = {"weight_map": {"a": "one.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if name not in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    (tmp_path / ("one.safetensors" if name == "shard" else name)).write_text(POINTER)
    with pytest.raises(FormatError, match="it is a git-lfs pointer.*; run `git lfs pull` in its folder"):
        read(tmp_path / name if name == "m.gguf" else tmp_path)
