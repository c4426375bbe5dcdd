"""Checkpoints: what goes in comes out, and a failure leaves the old file."""

import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jkv.io import array_file
from jkv.io.errors import FormatError

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_round_trip(tmp_path, dtype, shape):
    value = np.random.default_rng(0).integers(0, 2, shape).astype(np.dtype(dtype))
    array_file.write(tmp_path / "c", {"a": value}, {"n": 1, "deep": {"x": [1, None, "é"]}})
    arrays, meta = array_file.read(tmp_path / "c")
    assert arrays["a"].dtype == value.dtype and arrays["a"].shape == shape
    np.testing.assert_array_equal(arrays["a"], value)
    assert meta == {"n": 1, "deep": {"x": [1, None, "é"]}}


def test_jax_and_strided_arrays_round_trip(tmp_path):
    value = np.arange(12.0).reshape(3, 4)
    arrays = {"t": value.T, "s": value[::2, ::-1], "j": jnp.arange(3, dtype=jnp.bfloat16), "e": value.astype(">f8")}
    array_file.write(tmp_path / "c", arrays, {})
    got, _ = array_file.read(tmp_path / "c")
    np.testing.assert_array_equal(got["t"], value.T)
    np.testing.assert_array_equal(got["s"], value[::2, ::-1])
    np.testing.assert_array_equal(got["e"], value)
    assert got["j"].dtype == ml_dtypes.bfloat16


def test_arrays_outlive_file(tmp_path):
    path = tmp_path / "c"
    array_file.write(path, {"a": np.ones(1000)}, {})
    arrays, _ = array_file.read(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert arrays["a"].sum() == 1000


def test_failed_write_leaves_old_file(tmp_path, monkeypatch):
    path = tmp_path / "c"
    array_file.write(path, {"a": np.ones(3)}, {"step": 1})

    def half(tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", half)
    with pytest.raises(OSError, match="No space left.*free space"):
        array_file.write(path, {"a": np.zeros(3)}, {"step": 2})
    assert array_file.read(path)[1] == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


FULL = """
import resource, signal, sys
import numpy as np
from jkv.io import array_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    array_file.write(sys.argv[1], {"a": np.zeros(100000)}, {"step": 2})
except OSError as error:
    print(error)
"""
KILLED = """
import os, sys
import numpy as np
from jkv.io import array_file
array_file.sync = lambda path: os._exit(9)
array_file.write(sys.argv[1], {"a": np.zeros(3)}, {"step": 2})
"""


def test_file_size_limit_leaves_old_file(tmp_path):
    path = tmp_path / "c"
    array_file.write(path, {"a": np.ones(3)}, {"step": 1})
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout, done.stderr
    assert array_file.read(path)[1] == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_killed_write_leaves_old_file(tmp_path):
    path = tmp_path / "c"
    array_file.write(path, {"a": np.ones(3)}, {"step": 1})
    assert subprocess.run([sys.executable, "-c", KILLED, path], timeout=60).returncode == 9
    assert array_file.read(path)[1] == {"step": 1}


def test_write_to_missing_folder_is_refused(tmp_path):
    with pytest.raises(OSError, match="cannot write"):
        array_file.write(tmp_path / "no" / "c", {"a": np.ones(3)}, {})


def test_unsupported_arrays_and_metadata_are_refused(tmp_path):
    path = tmp_path / "c"
    with pytest.raises(ValueError, match="array 'a' has type complex"):
        array_file.write(path, {"a": np.ones(3, complex)}, {})
    with pytest.raises(ValueError, match="array 'a' has type object"):
        array_file.write(path, {"a": np.array([object()])}, {})
    with pytest.raises(ValueError, match="not JSON"):
        array_file.write(path, {}, {"a": object()})
    with pytest.raises(ValueError, match="reserves"):
        array_file.write(path, {"__metadata__": np.ones(3)}, {})
    assert not list(tmp_path.iterdir())


def save(path, header):
    safetensors.numpy.save_file({"a": np.ones(3)}, path, metadata=header)


@pytest.mark.parametrize(
    "header, cause",
    [
        (None, "no jkv checkpoint"),
        ({"other": "x"}, "no jkv checkpoint"),
        ({"jkv": "{"}, "header is broken"),
        ({"jkv": "[]"}, "header is broken"),
        ({"jkv": "[" * 100_000}, "header is broken"),
        ({"jkv": '{"version": 3, "meta": {}}'}, "version 3.*reads 2"),
        ({"jkv": '{"version": 2, "meta": {}}'}, "has no digest"),
        ({"jkv": '{"version": 1, "meta": []}'}, "no JSON object"),
    ],
)
def test_foreign_files_are_refused(tmp_path, header, cause):
    save(tmp_path / "c", header)
    with pytest.raises(FormatError, match=cause):
        array_file.read(tmp_path / "c")


def test_absent_and_empty_files_are_refused(tmp_path):
    with pytest.raises(FormatError, match="no such file"):
        array_file.read(tmp_path / "c")
    with pytest.raises(FormatError, match="no such file"):
        array_file.read(tmp_path)
    (tmp_path / "c").touch()
    with pytest.raises(FormatError, match="truncated or corrupt"):
        array_file.read(tmp_path / "c")


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_file_raises_only_format_error(tmp_path, data):
    path = tmp_path / "c"
    array_file.write(path, {"a": np.ones(3), "b": np.zeros((2, 2), np.int8)}, {"n": [1, 2]})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        array_file.read(path)
    except FormatError:
        pass


def test_any_bit_flip_is_refused_or_harmless(tmp_path):
    path = tmp_path / "c"
    array_file.write(path, {"a": np.arange(3.0), "b": np.zeros((2, 2), np.int8)}, {"n": [1, 2], "text": "é"})
    whole, (arrays, meta) = path.read_bytes(), array_file.read(path)
    taken = 0
    for place in range(8 * len(whole)):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            found, said = array_file.read(path)
        except FormatError:
            continue
        taken += 1
        assert said == meta and found.keys() == arrays.keys()
        assert all(np.array_equal(found[name], x) and found[name].dtype == x.dtype for name, x in arrays.items())
    assert taken < len(whole) / 100


def test_arrays_are_read_by_name(tmp_path):
    array_file.write(tmp_path / "c", {"a": np.ones(3), "b": np.ones(2)}, {"n": 1})
    with array_file.opened(tmp_path / "c") as (meta, names, read):
        assert meta == {"n": 1} and names == ["a", "b"] and read(["b", "a"])["a"].sum() == 3
        for wanted, says in ((["a"], "holds array b"), (["a", "b", "c"], "has no array c")):
            with pytest.raises(FormatError, match=says):
                read(wanted)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_file_mode_follows_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        array_file.write(tmp_path / "c", {"a": np.ones(3)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o666 & ~mask
