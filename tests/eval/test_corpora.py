"""Corpora: the same text everywhere, windows that never overlap, and a way out of every wrong file."""

import hashlib
import re
import sys
import sysconfig
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jkv.eval import corpora
from jkv.io.errors import FetchError


@pytest.fixture(autouse=True)
def no_memory():
    """Nothing that a test made of a fake dataset is kept for the next one."""
    yield
    corpora._hub.cache_clear()


def test_pydoc_is_english_prose():
    found = corpora.documents("pydoc")
    text = corpora.text("pydoc")
    assert text == "\n\n".join(found) and len(found) > 50
    words = text.split()
    assert 20_000 < len(words) < 200_000
    assert not re.search(r"::=|>>>|\*\*\*|====|----|\+--", text)
    paragraphs = text.split("\n\n")
    assert all(p[0].isupper() and p.endswith(".") and "\n" not in p for p in paragraphs)
    assert sum(word.lower() in {"the", "a", "is", "of", "to"} for word in words) > 0.1 * len(words)


def test_pydoc_drops_non_prose():
    topic = (
        "A title\n*******\n\nThe *first* sentence of the text is\na **plain** one, says the manual. [1]\n\n"
        "   x ::= y | z and the rest of it is code here.\n\n1. An item of a list is kept without its number here.\n\n"
        "Code f(x) = y_1 + z[2] * (a // b) -> c[0] ** d_3 % e.\n\n"
        "Too short.\n\n+----+----+\n| The table is no prose at all, or is it here. |\n+----+\n"
    )
    assert list(corpora._paragraphs(topic)) == [
        "The first sentence of the text is a plain one, says the manual.",
        "An item of a list is kept without its number here.",
    ]


def test_stdlib_has_sources_in_order():
    found = corpora.documents("stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    for module in ("abc.py", "asyncio/events.py", "json/decoder.py"):
        assert found.count((root / module).read_text("utf-8")) == 1
    for module in ("pydoc_data/topics.py", "lib2to3/pytree.py", "idlelib/run.py", "test/support/__init__.py"):
        path = root / module
        assert not path.exists() or path.read_text("utf-8") not in found
    ordered = [(root / m).read_text("utf-8") for m in ("abc.py", "asyncio/events.py", "bisect.py", "wave.py")]
    place = [found.index(source) for source in ordered]
    assert place == sorted(place)
    assert Path(np.__file__).read_text("utf-8") not in found
    assert found == corpora.documents("stdlib") and len(found) > 300


def test_corpus_cannot_be_modified_by_caller():
    corpora.documents("pydoc").clear()
    assert corpora.documents("pydoc")


def test_user_file_is_read(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("One\nline.\n\n  \nTwo é.\n\n", "utf-8")
    assert corpora.text(str(file)) == "One\nline.\n\n  \nTwo é.\n\n"
    assert corpora.documents(str(file)) == ["One\nline.", "Two é."]


@pytest.mark.parametrize(
    "content, message",
    [(b"\xff\xfe\xfa", "is not UTF-8 text.*iconv"), (b" \n ", "has no text"), (None, "there is no corpus or file")],
)
def test_non_text_files_are_refused(tmp_path, content, message):
    file = tmp_path / "own.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpora.text(str(file))


def test_unknown_corpus_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'pydok'; did you mean pydoc"):
        corpora.text("pydok")
    with pytest.raises(ValueError, match="names are: pydoc, stdlib, wikitext"):
        corpora.documents("qqqqq")
    with pytest.raises(ValueError, match="cannot read"):
        corpora.text(str(tmp_path))
    np.savez(tmp_path / "ids.npz", ids=np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="holds tokens, not text; read it by corpora.tokens"):
        corpora.text(str(tmp_path / "ids.npz"))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
def test_windows_are_disjoint_and_spread(n, length, samples, seed):
    assume(samples * length <= n)
    got = corpora.windows(range(n), length, samples, seed)
    assert got.shape == (samples, length) and got.dtype == np.int32
    assert (np.diff(got, axis=1) == 1).all(), "a window is a piece of the stream"
    starts, ends = got[:, 0], got[:, -1]
    assert (starts[1:] > ends[:-1]).all() and starts.min() >= 0 and ends.max() < n
    part = np.arange(samples) * n // samples
    assert (starts >= part).all() and (ends < np.append(part[1:], n)).all(), "one in each equal part"
    assert (got == corpora.windows(list(range(n)), length, samples, seed)).all()


def test_windows_depend_on_seed():
    first, second = (corpora.windows(range(10_000), 10, 5, seed) for seed in (0, 1))
    assert (first != second).any()


def test_windows_beyond_corpus_are_refused():
    with pytest.raises(ValueError, match="the corpus has 9 tokens, one window takes 10"):
        corpora.windows(range(9), 10, 1)
    with pytest.raises(ValueError, match="the corpus has 29 tokens, room for 2 windows of 10 and not for 3"):
        corpora.windows(range(29), 10, 3)
    assert corpora.windows(range(10), 10, 1)[0].tolist() == list(range(10))
    for wrong in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="1 or more"):
            corpora.windows(range(9), *wrong)


def test_token_file_is_read(tmp_path):
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.savez_compressed(tmp_path / "good.npz", anything=ids)
    got = corpora.tokens(tmp_path / "good.npz", vocab=12, width=4)
    assert got.dtype == np.int32 and (got == ids).all()
    assert (corpora.tokens(str(tmp_path / "good.npz"), vocab=50) == ids).all()


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({}, "holds no arrays; save exactly one"),
        ({"a": np.zeros((1, 2), np.int32), "b": np.zeros((1, 2), np.int32)}, "holds a, b; save exactly one"),
        ({"a": np.zeros((1, 2), np.int64)}, r"int64\[1, 2\], it must be int32.*astype"),
        ({"a": np.zeros((1, 2), np.float32)}, r"float32\[1, 2\], it must be int32"),
        ({"a": np.zeros(4, np.int32)}, r"int32\[4\].*two axes"),
        ({"a": np.zeros((1, 2, 2), np.int32)}, r"int32\[1, 2, 2\].*two axes"),
        ({"a": np.zeros((0, 8), np.int32)}, "1 or more rows of 8 tokens"),
        ({"a": np.zeros((2, 7), np.int32)}, r"int32\[2, 7\], it must have 1 or more rows of 8"),
        ({"a": np.full((1, 8), 100, np.int32)}, "run from 100 to 100, the model's from 0 to 99"),
        ({"a": np.full((1, 8), -1, np.int32)}, "run from -1 to -1"),
        ({"a": np.array([[{}]], object)}, "allow_pickle=False"),
    ],
)
def test_invalid_token_arrays_are_refused(tmp_path, arrays, message):
    file = tmp_path / "ids.npz"
    np.savez(file, **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        corpora.tokens(file, vocab=100, width=8)
    assert str(file) in str(caught.value)


def test_unreadable_token_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no token file .*missing.npz; make one"):
        corpora.tokens(tmp_path / "missing.npz", vocab=10)
    array = np.zeros((1, 2), np.int32)
    np.save(tmp_path / "one.npy", array)
    np.savez(tmp_path / "cut.npz", ids=np.arange(4000, dtype=np.int32)[None])
    whole = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello")
    broken = bytearray(whole)
    broken[2000] ^= 255
    (tmp_path / "broken.npz").write_bytes(bytes(broken))
    for name in ("one.npy", "cut.npz", "empty.npz", "text.npz", "broken.npz"):
        with pytest.raises(ValueError, match=name):
            corpora.tokens(tmp_path / name, vocab=5000)


def test_split_is_by_hash_and_disjoint(tmp_path):
    train, test = corpora.split("stdlib")
    assert not set(train) & set(test) and sorted(train + test) == sorted(corpora.documents("stdlib"))
    assert 0.04 < len(test) / len(train + test) < 0.2
    assert len(corpora.split("stdlib", 0.5)[1]) > 2 * len(test)
    assert set(test) <= set(corpora.split("stdlib", 0.5)[1])
    for document in test:
        assert int(hashlib.sha256(document.encode()).hexdigest()[:16], 16) < 0.1 * 2**64

    # A document that comes twice is on one side, and stays there when others come.
    file = tmp_path / "own.txt"
    parts = [f"Paragraph {i}." for i in range(40)]
    file.write_text("\n\n".join([*parts, *parts]))
    train, test = corpora.split(str(file), 0.3)
    assert not set(train) & set(test) and len(train) + len(test) == 80
    file.write_text("\n\n".join([*parts[:20], "New.", *parts[20:]]))
    assert set(test) <= set(corpora.split(str(file), 0.3)[1])


def test_empty_split_is_refused(tmp_path):
    (tmp_path / "own.txt").write_text("One paragraph.")
    with pytest.raises(ValueError, match="1 documents leave nothing to .* on at share=0.1; give another share"):
        corpora.split(str(tmp_path / "own.txt"))
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            corpora.split("pydoc", share)


@given(st.text())
def test_sentences_join_to_text(text):
    assert "".join(corpora.sentences(text)) == text


def test_sentences_end_before_capital():
    text = 'Use f(x), e.g. this. Then "stop"! What is 1.5? ok.\n\nNew one.'
    assert list(corpora.sentences(text)) == [
        "Use f(x), e.g. this. ",
        'Then "stop"! ',
        "What is 1.5? ok.\n\n",
        "New one.",
    ]


def test_hub_datasets_need_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("wikitext", "pg19", "longbench", "gsm8k", "scbench"):
        with pytest.raises(FetchError, match=rf"{name} is a dataset on a hub.*pip install -e '\.\[datasets\]'.*pydoc"):
            corpora.text(name)


def fake(monkeypatch, parts):
    """A package `datasets` whose only dataset has these splits; the calls it got."""
    calls = []

    def load_dataset(repo, configuration=None, *, streaming):
        calls.append((repo, configuration, streaming))
        if isinstance(parts, Exception):
            raise parts
        return parts

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_hub_datasets_are_streamed_from_test_split(monkeypatch):
    calls = fake(monkeypatch, {"train": [{"text": "no"}], "test": [{"text": "one"}, {"text": " "}, {"text": "two"}]})
    assert corpora.documents("pg19") == ["one", "two"]
    assert corpora.text("pg19") == "one\n\ntwo"
    assert calls == [("emozilla/pg19", None, True)]


def test_single_split_hub_dataset_is_read(monkeypatch):
    fake(monkeypatch, {"train": [{"context": "long"}]})
    assert corpora.documents("longbench") == ["long"]


def test_wikitext_is_split_into_articles(monkeypatch):
    rows = ["", " = A title = \n", " Text .\n", " = = A part = = \n", " More .\n", "", " = Another = \n", " End .\n"]
    fake(monkeypatch, {"test": [{"text": row} for row in rows]})
    assert corpora.documents("wikitext") == [
        " = A title = \n Text .\n = = A part = = \n More .\n",
        " = Another = \n End .\n",
    ]


def test_hub_failure_names_dataset(monkeypatch):
    fake(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(FetchError, match=r"cannot get gsm8k \(openai/gsm8k\).*ConnectionError: no route\).*pydoc"):
        corpora.text("gsm8k")
