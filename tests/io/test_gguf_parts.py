"""A model in several GGUF files is the model."""

import shutil

import gguf
import numpy as np
import pytest

from jkv.io.errors import FormatError
from jkv.io.gguf_model import read_gguf
from jkv.io.gguf_parts import list_parts
from support import ggufs

HEAD = np.random.default_rng(5).normal(size=(ggufs.VOCAB, ggufs.WIDTH)).astype(np.float32)


@pytest.fixture
def split(tmp_path):
    """A model with a head of its own, whole and in parts, as the gguf package writes them; the head is in the last."""
    tensors = ggufs.converted(ggufs.weights(), "llama") | {"output.weight": HEAD}
    meta = ggufs.metadata() | ggufs.bpe()
    whole = ggufs.write(tmp_path / "whole.gguf", tensors, meta)
    ggufs.write(tmp_path / "m.gguf", tensors, meta, split_max_tensors=8)
    return whole, sorted(tmp_path.glob("m-0000?-of-00003.gguf"))


def test_any_part_loads_whole_model(split):
    whole, files = split
    assert len(files) == 3
    told = read_gguf(whole)
    for file in files:
        found = read_gguf(file)
        assert found.config == told.config and not found.config["tie_word_embeddings"] and found.file == files[0]
        assert found.tokenizer.encode("hello") == told.tokenizer.encode("hello")
        assert found.tensors.keys() == told.tensors.keys()
        for name, read in told.tensors.items():
            np.testing.assert_array_equal(np.asarray(found.tensors[name]()), np.asarray(read()))


@pytest.mark.parametrize("lost", range(3))
def test_missing_part_is_refused_by_name(split, lost):
    files = split[1]
    files[lost].unlink()
    with pytest.raises(FormatError, match=f"{files[lost].name}: part {lost + 1} of 3 is missing; put it beside"):
        read_gguf(files[(lost + 1) % 3])


def test_mismatched_parts_are_refused(split, tmp_path):
    whole, files = split
    shutil.copy(files[1], files[2])
    with pytest.raises(FormatError, match=r"split.no and split.count are 1 and 3, where its name means 2 and 3"):
        read_gguf(files[0])
    with pytest.raises(FormatError, match=r"it is a part of 3, which its name does not say"):
        read_gguf(files[0].rename(tmp_path / "renamed.gguf"))
    shutil.copy(whole, files[0])
    with pytest.raises(FormatError, match="split.no and split.count are None and None, where its name means 0 and 3"):
        read_gguf(files[1])


@pytest.mark.parametrize(
    "place, total, more, cause",
    [
        (1, 2, {"llama.block_count": 9}, "has llama.block_count, which only a first part has"),
        (1, 3, {}, "split.tensors.count is 3 but its parts have 2"),
        (1, 2, {}, "'b' is in a part before it too"),
    ],
)
def test_contradictory_part_metadata_is_refused(tmp_path, place, total, more, cause):
    for i in range(2):
        meta = {"split.no": i, "split.count": 2, "split.tensors.count": total} | (more if i == place else {})
        names = ["b"] if "before" in cause else [str(i)]
        ggufs.write(tmp_path / f"m-0000{i + 1}-of-00002.gguf", dict.fromkeys(names, HEAD[:1]), meta)
    with pytest.raises(FormatError, match=cause):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_part_names_equal_gguf_package():
    shards = [gguf.gguf_writer.SHARD_NAME_FORMAT.format("m", i + 1, 12) for i in range(12)]
    assert list_parts(shards[4]) == shards
