"""The one door: names, files, folders, repositories, and errors that say where to go."""

import json
import subprocess
import sys

import ggufs
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv import models
from jkv.io import hub, load
from jkv.io.gguf_model import read_gguf


@pytest.mark.parametrize("dtype", load.DTYPES)
def test_a_gguf_file(tmp_path, dtype):
    params = load.load(ggufs.tiny(tmp_path / "m.gguf"), dtype)
    assert params.embed.dtype == jnp.dtype(dtype)
    assert params.tokenizer.encode("hello") == [ggufs.TOKENS.index("hello")]


def make_folder(folder, source):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(source.config))
    save_file({name: read() for name, read in source.tensors.items()}, folder / "model.safetensors")
    source.tokenizer.core.save(str(folder / "tokenizer.json"))


def test_folder_and_gguf_of_one_model_agree(tmp_path, monkeypatch):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf"))
    make_folder(tmp_path / "org" / "name", source)
    ids, pos = jnp.arange(6)[None], jnp.arange(6)[None]
    expected = models.forward(load.load(tmp_path / "m.gguf"), ids, pos)
    folder = load.load(str(tmp_path / "org" / "name"))
    np.testing.assert_array_equal(models.forward(folder, ids, pos), expected)
    assert folder.tokenizer.eos_ids == (2, 0)
    # A local folder comes before a repository of the same name.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot", lambda repo: pytest.fail("asked the hub"))
    assert load.read("org/name").config == source.config


def test_a_name_and_a_repository(tmp_path, monkeypatch):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf"))
    make_folder(tmp_path / "snapshot", source)
    monkeypatch.setattr(hub, "fetch", lambda name: tmp_path / "m.gguf")
    monkeypatch.setattr(hub, "snapshot", lambda repo: tmp_path / "snapshot")
    assert load.read("smollm2-135m").config == source.config
    assert load.read("some-org/Some.Model-1").config["hidden_size"] == ggufs.WIDTH


@pytest.mark.parametrize(
    "what, cause",
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("SmolLM2", "did you mean smollm2-135m"),
        ("zzz", "names are: smollm2-135m"),
        ("org/absent.gguf", "no model, file or folder"),
        ("./no/such/folder", "no model, file or folder"),
        ("../etc", "no model, file or folder"),
        ("", "neither|no model|config.json"),
    ],
)
def test_unknown_names(monkeypatch, tmp_path, what, cause):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=cause):
        load.load(what)


def test_other_files_and_dtypes(tmp_path):
    (tmp_path / "weights.pt").touch()
    with pytest.raises(ValueError, match="neither a .gguf file nor a folder"):
        load.load(tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of float32, bfloat16, float16"):
        load.load("smollm2-135m", "int8")


def modules_after(*imports):
    heavy = "gguf tokenizers jinja2 rich huggingface_hub safetensors jax"
    code = f"import sys, {', '.join(imports)}; print(*set('{heavy}'.split()) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_importing_the_readers_adds_nothing_heavy():
    # Whatever `import jkv` itself needs is not theirs.
    assert modules_after("jkv.io.load", "jkv.io.gguf_model", "jkv.io.checkpoint") <= modules_after("jkv")
