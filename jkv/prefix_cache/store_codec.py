"""What the records of a store are on disk: keys and values as they are, or rounded and entropy-coded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from math import inf
from time import monotonic as clock
from typing import Any

import ml_dtypes
import numpy as np

from jkv.utils.optional_deps import install

Record = Mapping[str, np.ndarray]
SIDES = "k", "v"
# Of a model of 32 layers: the first layer of each stretch, and the bins of its levels 1, 2 and 3.
BINS = {
    "k": ((0, (16, 32, 32)), (10, (16, 16, 32)), (20, (12, 16, 32))),
    "v": ((0, (16, 32, 32)), (2, (12, 16, 32))),
}
LAYERS = 32
FINE = 16  # steps of a spread's octave; a byte holds 2^-8 to 2^8
LEAST = 0.1  # of a spread, in bins: a channel that was constant may be so no longer


class Exact:
    """Records as they are."""

    name = ""

    @cached_property
    def levels(self) -> tuple[Exact, ...]:
        """The forms in which each record is held, the best first."""
        return (self,)

    def link(self, records: int, speed: float | None) -> Link:
        """What chooses among the forms of so many records; speed: bytes a second before, if that is known."""
        return Link(records, speed)

    def encode(self, record: Record) -> Record:
        return record

    def decode(self, record: Record) -> Record:
        return record


@dataclass(frozen=True)
class CacheGen(Exact):
    """CacheGen (2310.07240): x = m (s - C) / C of symbols s in 0..2C, which an entropy coder writes.

    m is the largest |x| of a token and layer over all heads, C = bins / 2 - 1, s = round(C x / m) + C, so x is wrong by
    at most m / (2 C). Bins by level and depth are the authors'; lower layers have more. The range coder takes a
    channel's symbols in a record as normal numbers rounded, of a mean and a spread that a byte each holds: the authors'
    histograms need more bytes than the symbols of 64 tokens do. As in their code, and other than in their paper, no
    token is written as its difference from another one. `Streamed` chooses levels.

    Raises ValueError for a level that is not 1, 2 or 3 (the most bits), ModuleNotFoundError without constriction.
    """

    level: int = 2

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3):
            raise ValueError(f"cachegen(level={self.level}): a level is 1, 2 or 3, which takes the most bits")
        streams("cachegen")

    @property
    def name(self) -> str:
        return f"cachegen(level={self.level})"

    def encode(self, record: Record) -> Record:
        out = {name: x for name, x in record.items() if name not in SIDES}
        for side in SIDES:
            x = record[side]
            if np.isfinite(x.astype(np.float32)).all():
                out |= {f"{side}.{part}": y for part, y in self._coded(side, x).items()}
            else:
                out[side] = x
        return out

    def decode(self, record: Record) -> Record:
        """Raises ValueError for arrays that no encoder wrote."""
        out = {name: x for name, x in record.items() if name.split(".")[0] not in SIDES or name in SIDES}
        return out | {side: self._decoded(side, record) for side in SIDES if side not in record}

    def half(self, side: str, layers: int) -> np.ndarray:
        """i64[L]: C of each layer.

        >>> CacheGen(level=2).half("k", 4).tolist()
        [15, 15, 7, 7]
        """
        out = np.zeros(layers, np.int64)
        for first, levels in BINS[side]:
            out[min(-(-first * layers // LAYERS), layers) :] = levels[self.level - 1] // 2 - 1
        return out

    def _coded(self, side: str, x: np.ndarray) -> Record:
        """Of f[L,H,n,D]."""
        layers, heads, n, width = x.shape
        wide = x.astype(np.float32).transpose(0, 1, 3, 2).reshape(layers, heads * width, n)
        top = np.abs(wide).max(1).astype(ml_dtypes.bfloat16)
        half = self.half(side, layers)[:, None, None]
        scaled = wide * half / np.maximum(top.astype(np.float32), np.finfo(np.float32).tiny)[:, None]
        symbols = np.clip(np.rint(scaled) + half, 0, 2 * half).astype(np.int32)
        mean = np.rint(symbols.mean(-1) / (2 * half[..., 0]) * 255).astype(np.uint8)
        spread = np.clip(np.rint(np.log2(np.maximum(symbols.std(-1), LEAST)) * FINE) + 128, 0, 255).astype(np.uint8)
        encoder = streams("cachegen").queue.RangeEncoder()
        for layer in range(layers):
            encoder.encode(symbols[layer].reshape(-1), *self._model(half[layer, 0, 0], mean[layer], spread[layer], n))
        code = encoder.get_compressed()
        return {
            "code": code,
            "top": top.view(np.uint16),
            "mean": mean,
            "spread": spread,
            "shape": np.array([*x.shape, len(code)], np.int32),
            "like": np.zeros(0, x.dtype),
        }

    def _decoded(self, side: str, record: Record) -> np.ndarray:
        code, top, mean, spread, shape, like = (
            record[f"{side}.{part}"] for part in ("code", "top", "mean", "spread", "shape", "like")
        )
        if shape.dtype != np.int32 or shape.shape != (5,) or shape.min() < 1:
            raise ValueError(f"{side}.shape is {shape.dtype}{shape.tolist()}, not five numbers")
        layers, heads, n, width, words = shape.tolist()
        channels, half = (layers, heads * width), self.half(side, layers)
        known = {"code": ("<u4", (words,)), "top": ("<u2", (layers, n)), "mean": ("u1", channels)}
        for part, (dtype, size) in (known | {"spread": known["mean"]}).items():
            x = record[f"{side}.{part}"]
            if x.dtype != dtype or x.shape != size or not x.size:
                raise ValueError(f"{side}.{part} is {x.dtype}{list(x.shape)}, not {dtype}{list(size)}")
        decoder = streams("cachegen").queue.RangeDecoder(code)
        try:
            found = [decoder.decode(*self._model(*x, n)) for x in zip(half, mean, spread, strict=True)]
        except AssertionError as error:  # of the coder, for bits that no encoder made
            raise ValueError(f"the code of {side} cannot be read: {error}") from error
        if not decoder.maybe_exhausted():
            raise ValueError(f"the code of {side} goes on behind the last number")
        symbols = np.stack(found)
        scale = top.view(ml_dtypes.bfloat16).astype(np.float32)[:, None] / half[:, None, None]
        x = (symbols.reshape(*channels, n) - half[:, None, None]) * scale
        return x.reshape(layers, heads, width, n).transpose(0, 1, 3, 2).astype(like.dtype)

    @staticmethod
    def _model(half: int, mean: np.ndarray, spread: np.ndarray, n: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """How likely the symbols of channels u8[C] are, channel by channel: the model, and numbers of each symbol."""
        means = mean * (2 * int(half) / 255)
        spreads = np.exp2((spread.astype(np.float64) - 128) / FINE)
        family = streams("cachegen").model.QuantizedGaussian(0, 2 * int(half))
        return family, np.repeat(means, n), np.repeat(spreads, n)


@dataclass(frozen=True)
class Streamed(Exact):
    """CacheGen's stream (2310.07240): all levels of each record are held, and of each one is read, as there is time.

    With n records and t seconds of `within` left, the best level whose bytes / speed <= t / n, at the speed of the last
    record, decoding included; where none is, the model reads the rest of the prompt (the authors go on with the next
    record). The first record comes in any case, in the least bits if nothing was fast enough before: it tells how fast
    records come now.

    Raises ValueError for no positive number of seconds, ModuleNotFoundError without constriction.
    """

    within: float

    def __post_init__(self) -> None:
        if not 0 < self.within < inf:
            raise ValueError(f"cachegen(within={self.within:g}): seconds for the records of a prompt, above 0")
        streams("cachegen")

    @property
    def name(self) -> str:
        return f"cachegen(within={self.within:g})"

    @cached_property  # each looks for the coder
    def levels(self) -> tuple[Exact, ...]:
        return CacheGen(3), CacheGen(2), CacheGen(1)

    def link(self, records: int, speed: float | None) -> Link:
        return Link(records, speed, self.within)


class Link:
    """The records of one prompt on their way, within so many seconds. speed: bytes a second of the last one.

    >>> link = Link(records=2, speed=10.0, within=20.0)
    >>> link.choices([300, 90, 50])  # of 10 s each
    [1, 2]
    """

    def __init__(self, records: int, speed: float | None, within: float = inf) -> None:
        self.left, self.speed, self.first = records, speed, True
        self.begun = clock()
        self.end = self.begun + within

    def choices(self, sizes: Sequence[int | None]) -> list[int]:
        """Which of the forms of the next record there is time for, the best first; sizes: bytes, None: not there."""
        there = {i: size for i, size in enumerate(sizes) if size is not None}
        share = (self.end - clock()) / self.left
        found = [i for i, size in there.items() if self.speed is None or size <= share * self.speed]
        return found or ([*there][-1:] if self.first else [])

    def came(self, size: int) -> None:
        """The next record has been read and decoded, of so many bytes."""
        now = clock()
        self.speed = size / max(now - self.begun, 1e-9)
        self.begun, self.left, self.first = now, self.left - 1, False


def streams(what: str) -> Any:
    """The coders of constriction, which has no types; ModuleNotFoundError says what `what` lacks without it."""
    if find_spec("constriction") is None:
        raise ModuleNotFoundError(f"{what} codes with constriction, which is missing; {install('entropy')}")
    import constriction

    package: Any = constriction
    return package.stream


def codec(text: str) -> Exact:
    """What records are by a text: "" as they are, "cachegen", "cachegen(level=N)" or "cachegen(within=SECONDS)".

    Raises ValueError for others.

    >>> codec("").name, codec("zip")
    Traceback (most recent call last):
    ValueError: codec='zip': give "", cachegen(level=1), 2 or 3, or cachegen(within=SECONDS)
    """
    if not text:
        return Exact()
    found = re.fullmatch(r"cachegen(?:\((?:level=(\d)|within=(\d+\.?\d*))\))?", text)
    if found is None:
        raise ValueError(f'codec={text!r}: give "", cachegen(level=1), 2 or 3, or cachegen(within=SECONDS)')
    return CacheGen(int(found[1] or 2)) if found[2] is None else Streamed(float(found[2]))
