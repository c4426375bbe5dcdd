"""Files of torch.save: what is read of them, and that nothing else is."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jkv.io import pickled
from jkv.io.errors import FormatError
from support.pickles import named, save_torch


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_tensors_texts_and_numbers_come_back(kind: type, tmp_path):
    x = np.arange(6).reshape(2, 3).astype(kind)
    save_torch({"a": [x, 3, 0.5, "text", True], "b": {"c": x[0]}, "none": x[:0]}, tmp_path / "x.pt")
    found = pickled.read(tmp_path / "x.pt")
    assert list(found) == ["a", "b", "none"] and found["a"][1:] == [3, 0.5, "text", True]
    for a, b in ((found["a"][0], x), (found["b"]["c"], x[0]), (found["none"], x[:0])):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype and a.shape == b.shape


def test_code_is_not_run(tmp_path):
    """Whatever it is: a function of a module that is there, a class, and one that pickle itself would call."""
    done = tmp_path / "done"
    for module, name in (("os", "mkdir"), ("builtins", "eval"), ("torch", "Tensor"), ("collections", "Counter")):
        call = named(module, name) + b"(" + b"X" + len(str(done)).to_bytes(4, "little") + str(done).encode() + b"tR"
        save_torch({"module": call}, tmp_path / "x.pt")
        with pytest.raises(FormatError, match=f"it names {module}.{name}, which could run code"):
            pickled.read(tmp_path / "x.pt")
    assert not done.exists()


def changed(path: Path, name: str, content: bytes, packed: int = zipfile.ZIP_STORED) -> Path:
    """A file of one tensor of four numbers, with another entry."""
    save_torch({"x": np.arange(4, dtype=np.float32)}, path)
    with zipfile.ZipFile(path) as file:
        entries = {one: file.read(one) for one in file.namelist()} | {name: content}
    with zipfile.ZipFile(path, "w", packed) as file:
        for one, x in entries.items():
            file.writestr(one, x)
    return path


@pytest.mark.parametrize(
    "name, content, packed, why",
    [
        ("archive/data/0", b"\0" * 12, zipfile.ZIP_STORED, "storage 0 has 12 bytes, and should have 16"),
        ("archive/data/0", b"\0" * 20, zipfile.ZIP_STORED, "20 bytes where 16 are the most"),
        ("archive/byteorder", b"big", zipfile.ZIP_STORED, "not little-endian"),
        ("archive/data/0", b"\0" * 16, zipfile.ZIP_DEFLATED, "is packed"),
        ("archive/data.pkl", b"\x80\x02.", zipfile.ZIP_STORED, "it is no file of torch.save"),
        ("other/data.pkl", b"\x80\x02.", zipfile.ZIP_STORED, "it is no file of torch.save"),
    ],
)
def test_a_damaged_file_is_refused(name, content, packed, why, tmp_path):
    with pytest.raises(FormatError, match=why):
        pickled.read(changed(tmp_path / "x.pt", name, content, packed))


def test_what_is_no_such_file_is_refused(tmp_path):
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"a": 1}))
    for path in (tmp_path / "old.pt", tmp_path / "missing.pt", tmp_path):
        with pytest.raises(FormatError, match="it is no file of torch.save"):
            pickled.read(path)


def test_a_tensor_ends_within_its_storage():
    x = np.arange(6)
    for offset, shape, strides in (
        (3, (2, 2), (2, 1)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (7,), (1,)),
        (6, (), ()),
    ):
        with pytest.raises(ValueError, match="beyond its storage of 6"):
            pickled.rebuilt(x, offset, shape, strides)
    np.testing.assert_array_equal(pickled.rebuilt(x, 2, (2, 2), (2, 1)), [[2, 3], [4, 5]])
