"""Text corpora: Python's own documentation and sources, user files, token files and Hugging Face datasets."""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
import sysconfig
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.io.errors import FetchError
from jkv.utils.optional_deps import install

# Left out: no text of its own (tests, a copy of the topics), or different on each machine (build output).
_SKIPPED = {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages", "pydoc_data"}
SIDES, HELD_BACK = ("train", "test"), 0.2  # sides of a corpus; share of the documents in "test"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")

# name -> repository, configuration, text column. These repositories hold data files only: no code of them is executed.
HUB = {
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text"),
    "pg19": ("emozilla/pg19", None, "text"),
    "longbench": ("zai-org/LongBench-v2", None, "context"),
    "gsm8k": ("openai/gsm8k", "main", "question"),
    "scbench": ("microsoft/SCBench", "scbench_kv", "context"),
}


def documents(name: str) -> list[str]:
    """Return the documents of a corpus, in a fixed order.

    Args:
        name: "pydoc" (English prose of Python's manual, one document per topic), "stdlib" (sources of the standard
            library, one document per module), a name in `HUB`, or a UTF-8 text file (one document per paragraph). With
            ":train" or ":test" appended, one side of `split`; paragraphs that occur in "test" are removed from "train".

    Raises:
        ValueError: The name or file is none of these.
        FetchError: A hub dataset cannot be downloaded.

    >>> len(documents("pydoc")) > 50
    True
    """
    whole, _, side = name.rpartition(":")
    if side in SIDES:
        return _side(whole, side)
    if name in LOCAL:
        return list(LOCAL[name]())
    if name in HUB:
        return list(_hub(name))
    return _parts(_file(name))


def text(name: str) -> str:
    """Return the documents of a corpus as one text, a user's file unchanged. Raises as `documents` does."""
    if name in LOCAL or name in HUB or name.endswith(tuple(f":{side}" for side in SIDES)):
        return "\n\n".join(documents(name))
    return _file(name)


def split(name: str, share: float = 0.1) -> tuple[list[str], list[str]]:
    """Split the documents of a corpus into a training and a test side.

    The hash of a document alone decides its side, so duplicates stay together and adding documents moves none.

    Args:
        name: A corpus, as in `documents`.
        share: Approximate fraction of the documents in the test side.

    Raises:
        ValueError: One side is empty, or as `documents`.
        FetchError: As `documents`.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: the fraction of documents that are for tests, between 0 and 1")
    sides: tuple[list[str], list[str]] = ([], [])
    for document in documents(name):
        sides[_fraction(document) < share].append(document)
    if not all(sides):
        raise ValueError(
            f"{name}: its {len(sides[0]) + len(sides[1])} documents leave nothing to "
            f"{'test' if sides[0] else 'train'} on at share={share}; give another share or more documents"
        )
    return sides


def _side(name: str, side: str) -> list[str]:
    train, test = split(name, HELD_BACK)
    if side == "test":
        return test
    held = {part for document in test for part in _parts(document)}  # manuals say the same in several places
    left = ("\n\n".join(part for part in _parts(document) if part not in held) for document in train)
    return [document for document in left if document]


def _parts(document: str) -> list[str]:
    return [part.strip("\n") for part in re.split(r"\n\s*\n", document) if part.strip()]


def windows(ids: Sequence[int] | np.ndarray, length: int, samples: int, seed: int = 0) -> np.ndarray:
    """Cut non-overlapping windows i32[samples, length] from a token stream, one per equal part, in order.

    Raises:
        ValueError: The stream is too short.

    >>> windows(range(12), length=3, samples=4)[:, 0].tolist()
    [0, 3, 6, 9]
    """
    if length < 1 or samples < 1 or seed < 0:
        raise ValueError(f"length={length}, samples={samples}, seed={seed}: 1 or more, 1 or more, and 0 or more")
    stream = np.asarray(ids, np.int32)
    if length > len(stream):
        raise ValueError(
            f"the corpus has {len(stream)} tokens, one window takes {length}: give a longer text or a shorter length"
        )
    if samples * length > len(stream):
        raise ValueError(
            f"the corpus has {len(stream)} tokens, room for {len(stream) // length} windows of {length} and not for "
            f"{samples}: give a longer text, fewer samples or a shorter length"
        )
    borders = np.arange(samples + 1) * len(stream) // samples
    starts = np.random.default_rng(seed).integers(borders[:-1], borders[1:] - length, endpoint=True)
    return stream[starts[:, None] + np.arange(length)]


def tokens(path: str | Path, vocab: int, width: int | None = None) -> np.ndarray:
    """Load token ids i32[n, prefix + continue], the only array of an .npz file.

    Args:
        path: The file.
        vocab: Upper bound (exclusive) of the ids.
        width: Required tokens per row, or None for any.

    Raises:
        ValueError: The file is missing, not an .npz, or holds something else.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"there is no token file {path}; make one: np.savez(path, ids=array), int32[samples, tokens]")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            names = file.files
            if len(names) != 1:
                raise ValueError(f"it holds {', '.join(names) or 'no arrays'}; save exactly one array")
            ids = file[names[0]]
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        # np.load gives a bare array for an .npy file, and that is no context manager.
        cause = error if isinstance(error, ValueError) else "it is no .npz file; write it by np.savez"
        raise ValueError(f"{path}: {cause}") from None
    if ids.dtype != np.int32 or ids.ndim != 2:
        raise ValueError(
            f"{path}: the array is {ids.dtype}{list(ids.shape)}, it must be int32[samples, tokens]; "
            "save ids.astype(np.int32) with two axes"
        )
    if not ids.size or (width is not None and ids.shape[1] != width):
        raise ValueError(
            f"{path}: the array is int32{list(ids.shape)}, it must have 1 or more rows of {width or 'some'} tokens "
            "(prefix and continuation); cut it, or ask for other lengths"
        )
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(
            f"{path}: its ids run from {ids.min()} to {ids.max()}, the model's from 0 to {vocab - 1}; "
            "encode the text by this model's tokenizer"
        )
    return ids


def sentences(document: str) -> Iterator[str]:
    """Split a text into sentences, each with the white space after it, so that joined they are the text.

    >>> list(sentences("It is late. Who is there?"))
    ['It is late. ', 'Who is there?']
    """
    start = 0
    for end in _SENTENCE_END.finditer(document):
        yield document[start : end.end()]
        start = end.end()
    if document[start:]:
        yield document[start:]


def _fraction(document: str) -> float:
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") / 2**64


@functools.cache
def _pydoc() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    prose = ("\n\n".join(_paragraphs(topics[name])) for name in sorted(topics))
    return tuple(document for document in prose if document)


def _paragraphs(topic: str) -> Iterator[str]:
    """Yield the paragraphs that are English sentences, one line each, without markup."""
    for block in re.split(r"\n\s*\n", topic):
        line = " ".join(textwrap.dedent(block).split())
        line = re.sub(r"^(?:[*\-•]|\d+\.)\s+", "", line)
        line = re.sub(r"\*{1,2}([^*\s][^*]*?)\*{1,2}", r"\1", line)
        line = re.sub(r"\s*\[\d+\]", "", line)
        words = line.split()
        plain = sum(bool(re.fullmatch(r"[A-Za-z’'-]+[,.;:]?", word)) for word in words)
        # Grammar, code and tables look like this too, but never end like a sentence of mostly plain words.
        if len(words) > 7 and line[0].isupper() and line.endswith(".") and plain > 0.7 * len(words):
            # Needles are put between sentences: a very long one would move them far from their depth.
            if max(map(len, sentences(line))) < 600:
                yield line


@functools.cache
def _stdlib() -> tuple[str, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root): path for path in root.rglob("*.py")}
    found = [
        files[name].read_text("utf-8", errors="replace")
        for name in sorted(files, key=lambda name: name.with_suffix("").parts)
        if not _SKIPPED & set(name.parts) and not name.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise ValueError(f"this Python has no sources of its library in {root}; use pydoc or a text file")
    return tuple(source for source in found if source.strip())


LOCAL: dict[str, Callable[[], tuple[str, ...]]] = {"pydoc": _pydoc, "stdlib": _stdlib}


def _file(name: str) -> str:
    path = Path(name).expanduser()
    if path.suffix == ".npz" and path.exists():
        raise ValueError(f"{name} holds tokens, not text; read it by corpora.tokens")
    try:
        found = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text: give a text file, or convert it (iconv -t UTF-8)") from None
    except FileNotFoundError:
        near = difflib.get_close_matches(name, [*LOCAL, *HUB], 1)
        hint = f"did you mean {near[0]}?" if near else f"names are: {', '.join([*LOCAL, *HUB])};"
        raise ValueError(f"there is no corpus or file {name!r}; {hint} a UTF-8 text file also works") from None
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror}; give a text file") from error
    if not found.strip():
        raise ValueError(f"{name} has no text: give a text file")
    return found


@functools.cache
def _hub(name: str) -> tuple[str, ...]:
    repo, configuration, column = HUB[name]
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise FetchError(
            f"{name} is a dataset on a hub, which needs the package datasets; {install('datasets')}; "
            f"or use {' or '.join(LOCAL)}, which need nothing"
        ) from error
    try:
        # Streamed, so that no more than the test split, where there is one, is downloaded.
        parts: Any = load_dataset(repo, configuration, streaming=True)
        rows = [row[column] for row in parts["test" if "test" in parts else next(iter(parts))]]
    except Exception as error:  # The kinds depend on the package's version and its HTTP client.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(
            f"cannot get {name} ({repo}) from the hub ({type(error).__name__}: {first}); "
            f"check the network, or use {' or '.join(LOCAL)}"
        ) from error
    return tuple(_articles(rows) if name == "wikitext" else (row for row in rows if row.strip()))


def _articles(lines: Iterable[str]) -> Iterator[str]:
    """Join the lines of Wikitext to articles: each starts with a title between single equals signs."""
    article: list[str] = []
    for line in lines:
        if re.match(r"\s*= [^=].*[^=] =\s*$", line) and article:
            yield "".join(article)
            article = []
        if line.strip() or article:
            article.append(line)
    if article:
        yield "".join(article)
