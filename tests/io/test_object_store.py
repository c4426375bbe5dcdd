"""Models in object stores: fetched whole, and again only if they have changed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from jkv.io import load as loading
from jkv.io import object_store
from jkv.io.errors import FetchError
from jkv.io.gguf_model import read_gguf
from support import ggufs, stores
from support.stores import BUCKET, Store

MODEL = epath.Path("gs://bucket/models/tiny")
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"code",
    "modeling.py": b"code",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stores.install(tmp_path / "store")
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "cache"))
    for name, data in FILES.items():
        (MODEL / name).write_bytes(data)
    return tmp_path / "cache"


@pytest.fixture
def opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the objects that are read."""
    read, plain = [], Store._open

    def noted(self: Store, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "rb":
            read.append(path.rsplit("/", 1)[1])
        return plain(self, path, mode, **more)

    monkeypatch.setattr(Store, "_open", noted)
    return read


def test_folder_is_fetched_without_code_files(opened: list[str]):
    folder = object_store.fetched(str(MODEL))
    assert {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")} == {
        x: FILES[x] for x in ("config.json", "model.safetensors")
    }
    assert opened == ["config.json", "model.safetensors"]


def test_only_changed_files_are_fetched_again(cache: Path, opened: list[str]):
    folder = object_store.fetched(str(MODEL))
    opened.clear()
    assert object_store.fetched(MODEL) == folder and opened == []
    (MODEL / "model.safetensors").write_bytes(b"WEIGHTS")  # as many bytes
    held = next((cache.parent / "store" / BUCKET).glob("*model.safetensors"))
    os.utime(held, (7, 7))
    (folder / "config.json").write_bytes(b"cut")
    (MODEL / "tokenizer.json").write_bytes(b"{}")
    object_store.fetched(MODEL)
    assert sorted(opened) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == b"WEIGHTS" and (folder / "config.json").stat().st_size == 23
    (MODEL / "tokenizer.json").unlink()
    object_store.fetched(MODEL)
    assert not (folder / "tokenizer.json").exists()


def test_store_without_mtime_is_fetched_each_time(opened: list[str], monkeypatch: pytest.MonkeyPatch):
    entry = Store._entry
    monkeypatch.setattr(Store, "_entry", lambda *args: {k: x for k, x in entry(*args).items() if k != "mtime"})
    for _ in range(2):
        opened.clear()
        object_store.fetched(MODEL)
        assert opened == ["config.json", "model.safetensors"]


def test_model_is_read_by_url(cache: Path, tmp_path: Path):
    ggufs.tiny(tmp_path / "m.gguf")
    url = "gs://bucket/models/m.gguf"
    epath.Path(url).write_bytes((tmp_path / "m.gguf").read_bytes())
    got, want = loading.read(url), read_gguf(tmp_path / "m.gguf")
    assert got.config == want.config and got.tensors.keys() == want.tensors.keys()
    for name, read in want.tensors.items():
        np.testing.assert_array_equal(got.tensors[name](), read())


def test_all_gguf_parts_are_fetched(cache: Path, tmp_path: Path):
    whole = ggufs.tiny(tmp_path / "m.gguf")
    tensors = ggufs.converted(ggufs.weights(), "llama")
    ggufs.write(tmp_path / "n.gguf", tensors, ggufs.metadata() | ggufs.bpe(), split_max_tensors=12)
    for part in tmp_path.glob("n-*.gguf"):
        epath.Path(f"gs://bucket/models/{part.name}").write_bytes(part.read_bytes())
    got, want = loading.read("gs://bucket/models/n-00002-of-00002.gguf"), read_gguf(whole)
    assert got.config == want.config and got.tensors.keys() == want.tensors.keys()


def test_fetch_errors_name_cause(cache: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(FetchError, match="there is no model at gs://bucket/none: give a folder with"):
        loading.load("gs://bucket/none")
    with pytest.raises(FetchError, match=r"cannot reach gs://bucket/none.gguf \(FileNotFoundError.*check the address"):
        loading.load("gs://bucket/none.gguf")
    with pytest.raises(ValueError, match="https:// is not read; give gs://"):
        loading.load("https://host/model.gguf")
    folder = object_store.fetched(MODEL)
    Store.failing = True
    with pytest.raises(FetchError, match=f"HttpError: Service Unavailable, 503.*or give {folder}, the copy of before"):
        object_store.fetched(MODEL)
    Store.failing = False


@pytest.mark.parametrize("how", ["cut", "full"])
def test_partial_download_is_discarded(cache: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    def chunks(at: Any) -> Any:
        yield b"half"
        if how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    says = "4 of its 23 bytes came.; try again" if how == "cut" else "the disk is full; free some or set JKV_CACHE"
    with monkeypatch.context() as patch, pytest.raises(FetchError, match=says):
        patch.setattr(object_store, "_chunks", chunks)
        object_store.fetched(MODEL)
    (folder,) = (cache / "remote").iterdir()
    assert not list(folder.iterdir())
    assert (object_store.fetched(MODEL) / "config.json").read_bytes() == FILES["config.json"]


def test_missing_etils_refuses_only_urls(tmp_path: Path):
    code = (
        "import sys; sys.modules['etils'] = None\n"
        "from jkv.io import object_store\n"
        "object_store.place('out')\n"
        "try: object_store.place('gs://bucket/x')\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("gs://bucket/x is in an object store, which needs etils; run pip install -e '.[remote]'")
