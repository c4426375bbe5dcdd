"""BitStack weights (2410.23918): blocks within a byte budget, made at load or read from a calibrated folder."""

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
LEVELS = 16  # maximum blocks per matrix
PARTS = ("signs", "left", "right")
Place = tuple[int, str]  # layer and field of a matrix


@dataclass(frozen=True, kw_only=True)
class BitStackSpec:
    """Parsed arguments of weights="bitstack(...)".

    Attributes:
        bytes: Byte budget of all weights.
        blocks: Folder of `jkv calibrate bitstack`, or None to decompose at load.
        k: Rank of a block.
    """

    bytes: int
    blocks: str | None = None
    k: int = RANK


def is_asked(text: str) -> bool:
    """Return whether a `weights` argument selects BitStack."""
    return text.split("(")[0].strip() == NAME


def parse_spec(text: str) -> BitStackSpec:
    """Parse "bitstack(bytes='60MiB', blocks='FOLDER')"; raises ValueError for other arguments.

    >>> parse_spec("bitstack(bytes='60MiB', k=4)")
    BitStackSpec(bytes=62914560, blocks=None, k=4)
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
    return BitStackSpec(bytes=read_bytes(given["bytes"]), blocks=blocks, k=k)


def form(
    text: str, config: Mapping[str, Any], tensors: Tensors, dtype: Any, bars: contextlib.ExitStack | None = None
) -> Bitstack:
    """Build the weight format with the first blocks that fit the byte budget.

    Without a folder the order is level by level, and layer by layer within a level, which is not the paper's order; the
    blocks are then decomposed when the model is built.

    Args:
        text: The `weights` argument.
        config: Hugging Face config dict.
        tensors: Readers of the tensors, by name.
        dtype: Float type of the weights that are not in blocks.
        bars: Exit stack that receives a progress bar.

    Raises:
        ValueError: Too few bytes, a k above a rank, or a folder for another model.
        FormatError: The folder was not written by `jkv calibrate bitstack`.
    """
    what, c = parse_spec(text), read_config(config)
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
    """Return the shapes of the matrices that are kept in blocks: those of the layers, in order."""
    return {(i, n): x.shape for i, layer in enumerate(abstract(c).layers) for n, x in layer.items() if signed(n)}


def fit(c: ModelConfig, dtype: Any, k: int, order: Sequence[Place], most: int) -> dict[Place, int]:
    """Count the blocks per matrix: one each, then in `order` until the next one would exceed the budget.

    Args:
        c: Model config.
        dtype: Float type of the weights that are not in blocks.
        k: Rank of a block.
        order: Matrices in the order in which they get another block.
        most: Byte budget of all weights.

    Raises:
        ValueError: One block per matrix does not fit; the message has the bytes needed.
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
    """Return the bytes of all weights."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


@dataclass(frozen=True)
class Folder:
    """A folder of `jkv calibrate bitstack`: one file of blocks per matrix, and a card with the block order.

    Attributes:
        path: The folder.
        what: Model, settings and texts of the calibration; every file repeats them.
        order: Matrices in the order in which they get another block.
    """

    path: Path
    what: Mapping[str, Any]
    order: tuple[Place, ...] = ()

    @classmethod
    def read(cls, folder: str | Path) -> Folder:
        """Read the card of a folder; FormatError if it is not a finished BitStack folder."""
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
        """Rank of a block."""
        return self.what["k"]

    def check(self, c: ModelConfig, tensors: Tensors) -> None:
        """Raise ValueError unless the folder is for this model."""
        if (own := sampled(c, tensors)) != self.what["model"]:
            raise ValueError(
                f"{self.path} has the blocks of the model {self.what['model']}, and this one is {own}: load that one, "
                f"or make those of this one with `jkv calibrate {NAME}`"
            )
        if other := set(self.order) - shapes(c).keys():
            raise broken(self.path, f"its {CARD} orders {min(other)}, which this model has not")

    def file(self, place: Place) -> Path:
        """Return the path of a matrix's blocks."""
        return self.path / f"{place[0]:03d}-{place[1]}.safetensors"

    def write(self, place: Place, blocks: Blocks) -> None:
        """Write the blocks of a matrix atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        array_file.write(self.file(place), dict(zip(PARTS, blocks, strict=True)), dict(self.what))

    def blocks(self, place: Place) -> Blocks:
        """Read all blocks of a matrix; FormatError for a damaged file, another run, NaN or infinity."""
        file = self.file(place)
        with array_file.opened(file) as (meta, _, arrays):
            if meta != self.what:
                raise broken(file, "it is of another run than the others of its folder")
            signs, left, right = (arrays(PARTS)[name] for name in PARTS)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            raise broken(file, "it holds NaN or infinity")
        return signs, left, right

    def first(self, layer: int, field: str, n: int, x: Stack) -> Blocks:
        """Read the first n blocks of a matrix; FormatError unless their shapes fit it."""
        signs, left, right = self.blocks((layer, field))
        (*out, width), levels = x.shape, self.what["levels"]
        own = ((*out, levels, -(-width // 8)), np.uint8), ((*out, levels, self.k), np.float16)
        if [(y.shape, y.dtype) for y in (signs, left, right)] != [*own, ((levels, self.k, width), np.float16)]:
            raise broken(self.file((layer, field)), f"its arrays are no {levels} blocks of a matrix {[*out, width]}")
        return signs[..., :n, :], left[..., :n, :], right[:n]

    def finish(self, order: Sequence[Place], about: Mapping[str, Any]) -> None:
        """Write the card, which completes the folder; `about` has additional entries."""
        card = {"method": NAME, "what": dict(self.what), "order": [list(place) for place in order], **about}
        overwrite(self.path / CARD, json.dumps(finite(card)) + "\n")


def broken(path: Path, cause: str) -> FormatError:
    """Build the error for an unusable BitStack folder."""
    return FormatError(path, cause, f"give a folder that `jkv calibrate {NAME}` finished")
