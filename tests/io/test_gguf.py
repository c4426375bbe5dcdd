"""The GGUF container: right values out of honest files, clear refusals of all others."""

import os
import struct
import time

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jkv.io.errors import FormatError
from jkv.io.gguf import open_file
from jkv.io.gguf_model import read_gguf
from support import ggufs

SIMPLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", SIMPLE)
def test_simple_types_equal_gguf_package(tmp_path, kind):
    number = GGMLQuantizationType[kind]
    value = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    file = open_file(ggufs.write(tmp_path / "m.gguf", {"a": value, "b": value[:1]}, {}, kinds={"a": number}))
    got = file.array("a").astype(np.float32)
    expected = gguf.quants.dequantize(gguf.quants.quantize(value, number), number)
    np.testing.assert_array_equal(got, expected)
    bits = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "BF16": 8}.get(kind, 11)
    assert np.abs(got - value).max() < np.abs(value).max() * 2.0 ** (1.1 - bits)
    np.testing.assert_array_equal(file.array("b"), value[:1])


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_equal_gguf_package(tmp_path, kind):
    number = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[number]
    packed = np.random.default_rng(1).integers(0, 60, (3, 2 * size), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    path.write_bytes(ggufs.raw(infos=[("a", (2 * block, 3), int(number), 0)], data=packed.tobytes()))
    got = open_file(path).array("a")
    assert got.shape == (3, 2 * block) and got.dtype == np.float32
    np.testing.assert_array_equal(got, gguf.quants.dequantize(packed, number))


def test_metadata_of_all_types_round_trips(tmp_path):
    meta = {"text": "ä\n", "yes": True, "number": 7, "real": 0.5, "texts": ["a", ""], "numbers": [1, -2, 3]}
    got = open_file(ggufs.write(tmp_path / "m.gguf", {"a": np.ones(3, np.float32)}, meta)).meta
    got["numbers"] = got["numbers"].tolist()
    assert {key: got[key] for key in meta} == meta
    assert got["yes"] is True


def test_reader_equals_gguf_package(tmp_path):
    path = ggufs.tiny(tmp_path / "m.gguf")
    ours, theirs = open_file(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        np.testing.assert_array_equal(ours.array(tensor.name), tensor.data)
    assert {key for key in theirs.fields if not key.startswith("GGUF.")} == set(ours.meta)


def key(name, kind, payload):
    return ggufs.text(name) + struct.pack("<I", kind) + payload


U64 = struct.Struct("<Q").pack
HUGE = 2**63
F32 = ("a", (4,), 0, 0)
HOSTILE = {
    "empty": (b"", "empty"),
    "magic": (b"PK\x03\x04" + b"\0" * 60, "does not begin with GGUF"),
    "only magic": (b"GGUF", "truncated"),
    "version": (ggufs.raw(version=1), "version 1"),
    "big endian": (ggufs.raw(version=3 << 24), "big-endian"),
    "tensor count": (ggufs.raw(n_tensors=HUGE), "claims 9,223,372,036,854,775,808 tensors"),
    "key count": (ggufs.raw(n_keys=HUGE), "metadata keys"),
    "key missing": (ggufs.raw([key("a", 4, b"\1\0\0\0")], n_keys=2)[:48], "truncated"),
    "key twice": (ggufs.raw([key("a", 4, b"\1\0\0\0")] * 2), "comes twice"),
    "key name length": (ggufs.raw([U64(HUGE) + b"\0" * 64]), "truncated"),
    "string length": (ggufs.raw([key("a", 8, U64(HUGE))]), "truncated"),
    "string utf-8": (ggufs.raw([key("a", 8, ggufs.text(b"\xff\xfe"))]), "UTF-8"),
    "value type": (ggufs.raw([key("a", 99, b"")]), "unknown value type 99"),
    "array length": (ggufs.raw([key("a", 9, struct.pack("<IQ", 4, HUGE))]), "numbers in a"),
    "array of strings": (ggufs.raw([key("a", 9, struct.pack("<IQ", 8, HUGE))]), "strings in a"),
    "array of arrays": (ggufs.raw([key("a", 9, struct.pack("<IQ", 9, 1))]), "nested"),
    "alignment 0": (ggufs.raw([key("general.alignment", 4, b"\0" * 4)]), "power of two"),
    "alignment text": (ggufs.raw([key("general.alignment", 8, ggufs.text("x"))]), "power of two"),
    "no dims": (ggufs.raw(infos=[("a", (), 0, 0)], data=b"\0" * 64), "0 dimensions"),
    "many dims": (ggufs.raw(infos=[("a", (1,) * 9, 0, 0)], data=b"\0" * 64), "9 dimensions"),
    "dim 0": (ggufs.raw(infos=[("a", (0, 4), 0, 0)], data=b"\0" * 64), "impossible shape"),
    "dims overflow": (ggufs.raw(infos=[("a", (2**32, 2**32), 0, 0)], data=b"\0" * 64), "truncated"),
    "broken block": (ggufs.raw(infos=[("a", (33,), 8, 0)], data=b"\0" * 64), "impossible shape"),
    "type refused": (ggufs.raw(infos=[("a", (256,), 16, 0)], data=b"\0" * 999), "IQ2_XXS"),
    "type unknown": (ggufs.raw(infos=[("a", (4,), 77, 0)], data=b"\0" * 64), "number 77"),
    "offset past end": (ggufs.raw(infos=[("a", (4,), 0, HUGE)], data=b"\0" * 64), "truncated"),
    "data truncated": (ggufs.raw(infos=[("a", (17,), 0, 0)], data=b"\0" * 64), "ends at byte"),
    "offset odd": (ggufs.raw(infos=[("a", (4,), 0, 5)], data=b"\0" * 64), "aligned"),
    "name twice": (ggufs.raw(infos=[F32, ("a", (4,), 0, 32)], data=b"\0" * 64), "comes twice"),
    "overlap": (ggufs.raw(infos=[F32, ("b", (4,), 0, 0)], data=b"\0" * 64), "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_cause_and_remedy(tmp_path, case):
    content, cause = HOSTILE[case]
    path = tmp_path / "evil.gguf"
    path.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(FormatError) as caught:
        open_file(path)
    assert time.perf_counter() - start < 2
    message = str(caught.value)
    assert message.startswith(str(path)) and cause in message and "; " in message


def test_absent_file_and_folder_are_refused(tmp_path):
    with pytest.raises(FormatError, match="cannot be read"):
        open_file(tmp_path / "absent.gguf")
    with pytest.raises(FormatError, match="cannot be read"):
        open_file(tmp_path)


def test_hostile_headers_allocate_little_memory(tmp_path):
    tracemalloc = pytest.importorskip("tracemalloc")
    path = tmp_path / "evil.gguf"
    tracemalloc.start()
    try:
        for content, _ in HOSTILE.values():
            path.write_bytes(content)
            with pytest.raises(FormatError):
                open_file(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    path = ggufs.tiny(tmp_path_factory.mktemp("fuzz") / "m.gguf", "llama")
    return path.read_bytes()


def survives(path, content):
    """The file either loads, tensors included, or is refused; anything else fails the test."""
    path.write_bytes(content)
    try:
        source = read_gguf(path)
        for read in source.tensors.values():
            read()
    except ValueError as error:
        assert str(path) in str(error)


HEADER = 20_000  # Enough to hold all metadata and tensor entries of the tiny model.


@settings(max_examples=250, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_fuzz_changed_bytes(tmp_path, honest, changes):
    content = bytearray(honest)
    for at, value in changes:
        content[at] = value
    survives(tmp_path / "m.gguf", content)


@settings(max_examples=60, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzz_truncated(tmp_path, honest, data):
    survives(tmp_path / "m.gguf", honest[: data.draw(st.integers(0, len(honest) - 1))])


@settings(max_examples=60, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(4, HEADER), st.sampled_from([2**64 - 1, 2**63, 2**40, 2**31]))
def test_fuzz_huge_numbers(tmp_path, honest, at, number):
    survives(tmp_path / "m.gguf", honest[:at] + U64(number) + honest[at + 8 :])


@settings(max_examples=60, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_fuzz_random_bytes(tmp_path, content):
    survives(tmp_path / "m.gguf", b"GGUF\3\0\0\0" + content)


def test_truncated_header_is_refused(tmp_path, honest):
    for at in range(0, 3000, 37):
        path = tmp_path / "m.gguf"
        path.write_bytes(honest[:at])
        with pytest.raises(FormatError):
            open_file(path)
    os.unlink(path)
