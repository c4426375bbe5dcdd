"""Weights of so many bytes, in blocks (BitStack, 2410.23918): made at the load, or of a folder that has their order."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.io.fingerprint import sampled
from jkv.io.safetensors import read_json
from jkv.models import ModelConfig, abstract, read_config
from jkv.models.weights.bitstack import RANK, Bitstack, Blocks, block_bytes, decompose, signed
from jkv.utils import console
from jkv.utils.call_syntax import read_call
from jkv.utils.json_results import finite, overwrite
from jkv.utils.validation import count, read_bytes

if TYPE_CHECKING:
    from jkv.models import Params
    from jkv.models.weights.loading import Stack
    from jkv.models.weights.params import Tensors

NAME, CARD = "bitstack", "card.json"
LEVELS = 16  # blocks of a matrix, at most
PARTS = ("signs", "left", "right")
Place = tuple[int, str]  # a matrix: its layer and field


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a text asks for: bytes of all weights, and a folder of `jkv calibrate bitstack` or the rank of blocks."""

    bytes: int
    blocks: str | None = None
    k: int = RANK


def is_asked(text: str) -> bool:
    return text.split("(")[0].strip() == NAME


def asked(text: str) -> Asked:
    """What "bitstack(bytes='60MiB', blocks='FOLDER')" asks for; ValueError for other arguments.

    >>> asked("bitstack(bytes='60MiB', k=4)")
    Asked(bytes=62914560, blocks=None, k=4)
    """
    _, given = read_call(text, text)
    if unknown := given.keys() - {"bytes", "blocks", "k"}:
        raise ValueError(f"weights={text!r}: {NAME} has no {min(unknown)}=; it takes bytes, blocks, k")
    if "bytes" not in given:
        raise ValueError(f"weights={text!r}: give the bytes of all weights, such as {NAME}(bytes='4GiB')")
    if "blocks" in given and "k" in given:
        raise ValueError(f"weights={text!r}: the blocks of a folder have their k already; leave k out")
    k = count("k", given.get("k", RANK), "the rank of a block, 1 or more", 1)
    blocks = given.get("blocks")
    if blocks is not None and not isinstance(blocks, str):
        raise ValueError(f"weights={text!r}: blocks is a folder, as `jkv calibrate {NAME}` writes it")
    return Asked(bytes=read_bytes(given["bytes"]), blocks=blocks, k=k)


def form(
    text: str, config: Mapping[str, Any], tensors: Tensors, dtype: Any, bars: contextlib.ExitStack | None = None
) -> Bitstack:
    """The form of the first blocks that fit, for a Hugging Face config and tensors by name.

    Without a folder the order is level by level, in a level layer by layer, which is not the paper's, and blocks are
    made when the model is built, with a bar in `bars`. ValueError for too few bytes, a k above a rank, and a folder of
    another model; FormatError for a folder that is none.
    """
    what, c = asked(text), read_config(config)
    if what.blocks is not None:
        folder = Folder.read(what.blocks)
        folder.check(c, tensors)
        return Bitstack(fit(c, dtype, folder.k, folder.order, what.bytes), folder.k, folder.first)
    order = [place for _ in range(LEVELS - 1) for place in shapes(c)]
    counts = fit(c, dtype, what.k, order, what.bytes)
    say = bars.enter_context(console.progress(len(counts))) if bars else _silent
    return Bitstack(counts, what.k, partial(_made, what.k, say))


def _silent(_: str) -> None: ...


def _made(k: int, say: Callable[[str], None], layer: int, field: str, n: int, x: Stack) -> Blocks:
    try:
        found = decompose(x.mapped(), k, n)
    except ValueError as error:
        raise ValueError(f"{NAME} weights: {', '.join(x.names[:3])}: {error}") from None
    say(f"layer {layer + 1}, {field}: {n} blocks")
    return found


def shapes(c: ModelConfig) -> dict[Place, tuple[int, ...]]:
    """The matrices that have blocks: those of the layers, in their order."""
    return {(i, n): x.shape for i, layer in enumerate(abstract(c).layers) for n, x in layer.items() if signed(n)}


def fit(c: ModelConfig, dtype: Any, k: int, order: Sequence[Place], most: int) -> dict[Place, int]:
    """Blocks of each matrix: one, and then those of the order until one does not fit into `most` bytes of all weights.

    ValueError where one of each does not fit, with what it takes.
    """
    sizes = {place: block_bytes(shape, k) for place, shape in shapes(c).items()}
    counts = dict.fromkeys(sizes, 1)
    left = most - size(abstract(c, dtype, Bitstack(counts, k, partial(_made, k, _silent))))
    if left < 0:
        raise ValueError(
            f"weights={NAME}: bytes={most}, and one block of each matrix takes {most - left} with the tables in int8: "
            "give as many or more"
        )
    for place in order:
        left -= sizes[place]
        if left < 0:
            break
        counts[place] += 1
    return counts


def size(params: Params) -> int:
    """Bytes of all weights."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


@dataclass(frozen=True)
class Folder:
    """What `jkv calibrate bitstack` wrote: a file of blocks for each matrix, and a card with the order of all.

    what: the model, the settings and the texts, which each file names too.
    """

    path: Path
    what: Mapping[str, Any]
    order: tuple[Place, ...] = ()

    @classmethod
    def read(cls, folder: str | Path) -> Folder:
        """FormatError for what is no such folder, or is not finished."""
        path = Path(folder).expanduser()
        card = read_json(path / CARD)
        if card is None:
            raise broken(path, f"it has no {CARD}")
        try:
            if card["method"] != NAME:
                raise broken(path, f"its {CARD} describes {card['method']!r}, not {NAME}")
            order = tuple((int(layer), str(field)) for layer, field in card["order"])
            found = cls(path, card["what"], order)
            levels, k = found.what["levels"], found.what["k"]
            if type(levels) is not int or type(k) is not int:
                raise TypeError(f"levels={levels!r}, k={k!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise broken(path, f"its {CARD} is damaged ({error})") from error
        if k < 1 or max(Counter(order).values(), default=0) >= levels:
            raise broken(path, f"its {CARD} orders more than the {levels} blocks of a matrix")
        return found

    @property
    def k(self) -> int:
        return self.what["k"]

    def check(self, c: ModelConfig, tensors: Tensors) -> None:
        """ValueError unless it is for this model."""
        if (own := sampled(c, tensors)) != self.what["model"]:
            raise ValueError(
                f"{self.path} has the blocks of the model {self.what['model']}, and this one is {own}: load that one, "
                f"or make those of this one with `jkv calibrate {NAME}`"
            )
        if other := set(self.order) - shapes(c).keys():
            raise broken(self.path, f"its {CARD} orders {min(other)}, which this model has not")

    def file(self, place: Place) -> Path:
        return self.path / f"{place[0]:03d}-{place[1]}.safetensors"

    def write(self, place: Place, blocks: Blocks) -> None:
        """The blocks of a matrix, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        array_file.write(self.file(place), dict(zip(PARTS, blocks, strict=True)), dict(self.what))

    def blocks(self, place: Place) -> Blocks:
        """All blocks of a matrix; FormatError for a file that is cut, of another run, or no numbers."""
        file = self.file(place)
        with array_file.opened(file) as (meta, _, arrays):
            if meta != self.what:
                raise broken(file, "it is of another run than the others of its folder")
            signs, left, right = (arrays(PARTS)[name] for name in PARTS)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            raise broken(file, "it holds NaN or infinity")
        return signs, left, right

    def first(self, layer: int, field: str, n: int, x: Stack) -> Blocks:
        """The first n blocks of a matrix; FormatError unless they are this one's."""
        signs, left, right = self.blocks((layer, field))
        (*out, width), levels = x.shape, self.what["levels"]
        own = ((*out, levels, -(-width // 8)), np.uint8), ((*out, levels, self.k), np.float16)
        if [(y.shape, y.dtype) for y in (signs, left, right)] != [*own, ((levels, self.k, width), np.float16)]:
            raise broken(self.file((layer, field)), f"its arrays are no {levels} blocks of a matrix {[*out, width]}")
        return signs[..., :n, :], left[..., :n, :], right[:n]

    def finish(self, order: Sequence[Place], about: Mapping[str, Any]) -> None:
        """The card, with which the folder is whole."""
        card = {"method": NAME, "what": dict(self.what), "order": [list(place) for place in order], **about}
        overwrite(self.path / CARD, json.dumps(finite(card)) + "\n")


def broken(path: Path, cause: str) -> FormatError:
    return FormatError(path, cause, f"give a folder that `jkv calibrate {NAME}` finished")
