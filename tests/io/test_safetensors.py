"""Local model folders: what is read, and what is refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jkv.io.errors import FormatError
from jkv.io.safetensors import read_folder, write_folder

CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "eos_token_id": 7}
TENSORS = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "model.norm.weight": np.ones(3, ml_dtypes.bfloat16),
    "lm_head.weight": np.full((4, 3), 0.5, np.float16),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder, index=None):
    """Splits the folder's tensors over two files."""
    (folder / "model.safetensors").unlink()
    names, files = sorted(TENSORS), ["model-1.safetensors", "model-2.safetensors"]
    save_file({name: TENSORS[name] for name in names[:2]}, folder / files[0])
    save_file({name: TENSORS[name] for name in names[2:]}, folder / files[1])
    entries = dict(zip(names, [files[0], files[0], files[1]], strict=True)) | (index or {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))


def add_tokenizer(folder, begin=True, **entries):
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<end>": 4, "ab": 5}
    core = tokenizers.Tokenizer(BPE(vocab, [("a", "b")]))
    core.add_special_tokens(["<s>", "</s>", "<end>"])
    if begin:
        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.enable_truncation(2)
    core.enable_padding(length=9)
    core.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | entries
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def check(source):
    assert set(source.tensors) == set(TENSORS)
    for name, value in TENSORS.items():
        got = source.tensors[name]()
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)


def test_single_file_is_read(folder):
    source = read_folder(folder)
    check(source)
    assert source.config == CONFIG and source.tokenizer is None


def test_shards_are_read(folder):
    shard(folder)
    check(read_folder(folder))


def test_tensor_missing_from_index_is_read(folder):
    shard(folder)
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {n: file for n, file in entries.items() if n != "lm_head.weight"}}))
    check(read_folder(folder))


def test_index_resolves_duplicate_tensors(folder):
    shard(folder)
    save_file({name: x + 1 for name, x in TENSORS.items()}, folder / "model-2.safetensors")
    got = {name: read() for name, read in read_folder(folder).tensors.items()}
    entries = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(got[name], x + (entries[name] == "model-2.safetensors"))


def test_model_safetensors_precedes_other_files(folder):
    save_file({"adapter": np.ones(2)}, folder / "adapter.safetensors")
    check(read_folder(folder))
    os.rename(folder / "model.safetensors", folder / "other.safetensors")
    with pytest.raises(FormatError, match="2 .safetensors files but no"):
        read_folder(folder)


def test_model_safetensors_precedes_index(folder):
    save_file({"a": np.ones(2)}, folder / "old.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "old.safetensors"}}))
    check(read_folder(folder))


def test_tokenizer_collects_all_eos_ids(folder):
    add_tokenizer(folder, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    source = read_folder(folder)
    tokenizer = source.tokenizer
    assert tokenizer.eos_ids == (1, 7, 4) and tokenizer.bos_id == 0
    assert source.config["eos_token_id"] == [1, 7, 4] and source.config["bos_token_id"] == 0
    assert tokenizer.encode("ababab") == [0, 5, 5, 5]  # Neither cut nor filled.
    assert tokenizer.chat([{"role": "user", "content": "ab"}]) == "<s>ab</s>"
    assert tokenizer.encode("<s>ab</s>") == [0, 5, 1]


def test_bos_token_follows_tokenizer(folder):
    add_tokenizer(folder, begin=False)
    assert read_folder(folder).tokenizer.encode("ab") == [5]


def test_chat_template_is_read_from_every_location(folder):
    add_tokenizer(folder, chat_template=[{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}])
    assert read_folder(folder).tokenizer.chat([]) == "d"
    (folder / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert read_folder(folder).tokenizer.chat([]) == "file é"


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def only_pickle(folder):
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def no_shard(folder):
    shard(folder)
    (folder / "model-2.safetensors").unlink()


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config not json": (write("config.json", b"{"), "config.json: it cannot be read as JSON"),
    "config not utf-8": (write("config.json", b"\xff\xfe\xff"), "config.json: it cannot be read as JSON"),
    "config a list": (write("config.json", b"[]"), "holds a list"),
    "config deep": (write("config.json", b"[" * 100_000), "config.json: it cannot be read as JSON"),
    "layers": (write("config.json", b'{"num_hidden_layers": 4000000000}'), "claims 4,000,000,000 layers"),
    "no weights": (remove_weights, "no .safetensors file"),
    "pickle": (only_pickle, "pickled .pytorch_model.bin.*convert them to safetensors"),
    "no shard": (no_shard, "shard model-2.safetensors .* is missing"),
    "empty index": (write("model.safetensors.index.json", b"{}"), "no weight_map"),
    "empty weights": (write("model.safetensors", b""), "cannot be read as safetensors"),
    "huge header": (write("model.safetensors", b"\xff" * 64), "cannot be read as safetensors"),
    "tokenizer": (write("tokenizer.json", b"{}"), "tokenizer.json: it is no tokenizer"),
    "shard lacks": (lambda f: shard(f, {"x": "model-1.safetensors"}), "tensor 'x' named by"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(folder, case):
    spoil, cause = BROKEN[case]
    spoil(folder)
    with pytest.raises(FormatError, match=cause) as caught:
        read_folder(folder)
    assert str(folder) in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        "../out.safetensors",
        "/etc/out.safetensors",
        "a/../../out.safetensors",
        "..\\out.safetensors",
        "config.json",
        5,
        "..",
    ],
)
def test_index_entry_outside_folder_is_refused(tmp_path, file):
    inner = tmp_path / "model"
    inner.mkdir()
    (inner / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, tmp_path / "out.safetensors")
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(FormatError, match="entry 'a' names the file"):
        read_folder(inner)


def test_integer_weights_are_refused(folder):
    save_file({"a": np.ones(3, np.int8)}, folder / "model.safetensors")
    with pytest.raises(FormatError, match="tensor 'a' has type I8"):
        read_folder(folder)


FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_folder_raises_only_format_error(folder, data):
    add_tokenizer(folder)
    path = folder / data.draw(st.sampled_from(FILES))
    honest = path.read_bytes()
    content = bytearray(honest)
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        source = read_folder(folder)
        for read in source.tensors.values():
            read()
    except FormatError:
        pass
    finally:
        path.write_bytes(honest)
        save_file(TENSORS, folder / "model.safetensors")


@pytest.mark.parametrize("begin", [True, False])
def test_written_folder_round_trips(folder, tmp_path, begin):
    add_tokenizer(folder, begin, eos_token="</s>", bos_token="<s>", chat_template="{{ messages }}")
    want = read_folder(folder)
    tensors, out = {name: read() for name, read in want.tensors.items()}, tmp_path / "out"
    write_folder(out, CONFIG, tensors, want.tokenizer)
    got = read_folder(out)
    assert got.tensors.keys() == tensors.keys() and got.config == want.config
    for name, read in got.tensors.items():
        np.testing.assert_array_equal(read(), tensors[name])
        assert read().dtype == tensors[name].dtype
    for field in ("bos_id", "eos_ids", "add_bos", "template", "vocab_size"):
        assert getattr(got.tokenizer, field) == getattr(want.tokenizer, field)
    for text in ("", "abba</s>ab"):
        assert got.tokenizer.encode(text) == want.tokenizer.encode(text)


def test_failed_write_leaves_no_partial_model(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"lm_head.weight holds NaN or infinity; nothing was written"):
        write_folder(folder, CONFIG, TENSORS | {"lm_head.weight": np.full((4, 3), np.nan, np.float32)}, None)
    assert read_folder(folder).config["num_hidden_layers"] == 1
    monkeypatch.setattr("safetensors.numpy.save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_folder(folder, CONFIG, TENSORS, None)
    with pytest.raises(FormatError, match=r"no config\.json"):
        read_folder(folder)
