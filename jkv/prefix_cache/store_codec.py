"""Codecs of stored records: exact, or quantized and entropy-coded (CacheGen)."""

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
# Per group of layers of a 32-layer model: its first layer, and the bins of levels 1, 2 and 3.
BINS = {
    "k": ((0, (16, 32, 32)), (10, (16, 16, 32)), (20, (12, 16, 32))),
    "v": ((0, (16, 32, 32)), (2, (12, 16, 32))),
}
LAYERS = 32
FINE = 16  # quantization steps per octave of a standard deviation; a byte covers 2^-8 to 2^8
LEAST = 0.1  # minimum standard deviation in bins, because a deviation of zero has no distribution


class Exact:
    """Uncompressed records."""

    name = ""

    @cached_property
    def levels(self) -> tuple[Exact, ...]:
        """The forms that each record is stored in, the best first."""
        return (self,)

    def link(self, records: int, speed: float | None) -> Link:
        """Return the chooser among the forms of a prompt's records.

        Args:
            records: number of records to load.
            speed: bytes per second of an earlier record; None: unknown.
        """
        return Link(records, speed)

    def encode(self, record: Record) -> Record:
        """Encode a record for storage."""
        return record

    def decode(self, record: Record) -> Record:
        """Decode a stored record; ValueError for arrays that `encode` did not write."""
        return record


@dataclass(frozen=True)
class CacheGen(Exact):
    """CacheGen's quantization and entropy coding (2310.07240).

    x = m (s - C) / C of symbols s in 0..2C, which a range coder writes. m is the largest |x| of a token and layer over
    all heads, C = bins / 2 - 1, s = round(C x / m) + C. So the error of x is at most m / (2 C). Bins by level and depth
    are the authors'; lower layers have more.

    The range coder models a channel's symbols in a record as rounded normal numbers, whose mean and standard deviation
    take one byte each: the authors' histograms would need more bytes than the symbols of 64 tokens. As in their code,
    but unlike their paper, tokens are not coded as differences from another token. `Streamed` chooses levels by time.

    Attributes:
        level: 1, 2 or 3; 3 takes the most bits.

    Raises:
        ValueError: for another level.
        ModuleNotFoundError: without constriction.
    """

    level: int = 2

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3):
            raise ValueError(f"cachegen(level={self.level}): a level is 1, 2 or 3, which takes the most bits")
        streams("cachegen")

    @property
    def name(self) -> str:
        """The codec's text form."""
        return f"cachegen(level={self.level})"

    def encode(self, record: Record) -> Record:
        """Encode keys and values; arrays that are not finite, and score columns, stay exact."""
        out = {name: x for name, x in record.items() if name not in SIDES}
        for side in SIDES:
            x = record[side]
            if np.isfinite(x.astype(np.float32)).all():
                out |= {f"{side}.{part}": y for part, y in self._coded(side, x).items()}
            else:
                out[side] = x
        return out

    def decode(self, record: Record) -> Record:
        """Decode a record; ValueError for arrays that `encode` did not write."""
        out = {name: x for name, x in record.items() if name.split(".")[0] not in SIDES or name in SIDES}
        return out | {side: self._decoded(side, record) for side in SIDES if side not in record}

    def half(self, side: str, layers: int) -> np.ndarray:
        """Return i64[L], C of each layer.

        >>> CacheGen(level=2).half("k", 4).tolist()
        [15, 15, 7, 7]
        """
        out = np.zeros(layers, np.int64)
        for first, levels in BINS[side]:
            out[min(-(-first * layers // LAYERS), layers) :] = levels[self.level - 1] // 2 - 1
        return out

    def _coded(self, side: str, x: np.ndarray) -> Record:
        """Encode keys or values f[L,H,n,D]."""
        # Quantize, relative to the largest number of each token.
        layers, heads, n, width = x.shape
        wide = x.astype(np.float32).transpose(0, 1, 3, 2).reshape(layers, heads * width, n)
        top = np.abs(wide).max(1).astype(ml_dtypes.bfloat16)
        half = self.half(side, layers)[:, None, None]
        scaled = wide * half / np.maximum(top.astype(np.float32), np.finfo(np.float32).tiny)[:, None]
        symbols = np.clip(np.rint(scaled) + half, 0, 2 * half).astype(np.int32)
        # Fit each channel's distribution, and code the symbols layer by layer.
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
        """Decode keys or values f[L,H,n,D]; ValueError for arrays that `_coded` did not write."""
        code, top, mean, spread, shape, like = (
            record[f"{side}.{part}"] for part in ("code", "top", "mean", "spread", "shape", "like")
        )
        # Validate the arrays, because a record may be foreign.
        if shape.dtype != np.int32 or shape.shape != (5,) or shape.min() < 1:
            raise ValueError(f"{side}.shape is {shape.dtype}{shape.tolist()}, not five numbers")
        layers, heads, n, width, words = shape.tolist()
        channels, half = (layers, heads * width), self.half(side, layers)
        known = {"code": ("<u4", (words,)), "top": ("<u2", (layers, n)), "mean": ("u1", channels)}
        for part, (dtype, size) in (known | {"spread": known["mean"]}).items():
            x = record[f"{side}.{part}"]
            if x.dtype != dtype or x.shape != size or not x.size:
                raise ValueError(f"{side}.{part} is {x.dtype}{list(x.shape)}, not {dtype}{list(size)}")
        # Decode the symbols, then dequantize.
        decoder = streams("cachegen").queue.RangeDecoder(code)
        try:
            found = [decoder.decode(*self._model(*x, n)) for x in zip(half, mean, spread, strict=True)]
        except AssertionError as error:  # from the coder, for invalid bits
            raise ValueError(f"the code of {side} cannot be read: {error}") from error
        if not decoder.maybe_exhausted():
            raise ValueError(f"the code of {side} goes on behind the last number")
        symbols = np.stack(found)
        scale = top.view(ml_dtypes.bfloat16).astype(np.float32)[:, None] / half[:, None, None]
        x = (symbols.reshape(*channels, n) - half[:, None, None]) * scale
        return x.reshape(layers, heads, width, n).transpose(0, 1, 3, 2).astype(like.dtype)

    @staticmethod
    def _model(half: int, mean: np.ndarray, spread: np.ndarray, n: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the distribution of symbols, and the parameters of each symbol, of channels u8[C]."""
        means = mean * (2 * int(half) / 255)
        spreads = np.exp2((spread.astype(np.float64) - 128) / FINE)
        family = streams("cachegen").model.QuantizedGaussian(0, 2 * int(half))
        return family, np.repeat(means, n), np.repeat(spreads, n)


@dataclass(frozen=True)
class Streamed(Exact):
    """CacheGen's streaming (2310.07240): records are stored at all levels, and read at the level that time allows.

    With n records and t seconds of `within` left, the best level with bytes / speed <= t / n is read, at the measured
    speed of the last record including decoding. If no level is fast enough, the model prefills the rest of the prompt
    (the authors go on with the next record). The first record is always read, at the smallest level if no level was
    fast enough before, because it measures the current speed.

    Attributes:
        within: seconds for the records of a prompt.

    Raises:
        ValueError: if `within` is not positive and finite.
        ModuleNotFoundError: without constriction.
    """

    within: float

    def __post_init__(self) -> None:
        if not 0 < self.within < inf:
            raise ValueError(f"cachegen(within={self.within:g}): seconds for the records of a prompt, above 0")
        streams("cachegen")

    @property
    def name(self) -> str:
        """The codec's text form."""
        return f"cachegen(within={self.within:g})"

    @cached_property  # construction imports the coder
    def levels(self) -> tuple[Exact, ...]:
        return CacheGen(3), CacheGen(2), CacheGen(1)

    def link(self, records: int, speed: float | None) -> Link:
        """Return the chooser among the levels of a prompt's records."""
        return Link(records, speed, self.within)


class Link:
    """Choice of forms for the records of one prompt, by time left and measured speed.

    Attributes:
        left: records still to be read.
        speed: bytes per second of the last record; None: unknown.
        first: whether no record has been read yet.
        begun: when the next record's read started.
        end: when time is up.

    >>> link = Link(records=2, speed=10.0, within=20.0)
    >>> link.choices([300, 90, 50])  # of 10 s each
    [1, 2]
    """

    def __init__(self, records: int, speed: float | None, within: float = inf) -> None:
        self.left, self.speed, self.first = records, speed, True
        self.begun = clock()
        self.end = self.begun + within

    def choices(self, sizes: Sequence[int | None]) -> list[int]:
        """Return the forms of the next record that time allows, the best first.

        Args:
            sizes: bytes of each form; None: not stored.
        """
        there = {i: size for i, size in enumerate(sizes) if size is not None}
        share = (self.end - clock()) / self.left
        found = [i for i, size in there.items() if self.speed is None or size <= share * self.speed]
        return found or ([*there][-1:] if self.first else [])

    def came(self, size: int) -> None:
        """Count a record as read and decoded, and measure its speed."""
        now = clock()
        self.speed = size / max(now - self.begun, 1e-9)
        self.begun, self.left, self.first = now, self.left - 1, False


def streams(what: str) -> Any:
    """Return constriction's coders (untyped); ModuleNotFoundError, naming `what`, without it."""
    if find_spec("constriction") is None:
        raise ModuleNotFoundError(f"{what} codes with constriction, which is missing; {install('entropy')}")
    import constriction

    package: Any = constriction
    return package.stream


def codec(text: str) -> Exact:
    """Parse a codec: "" (exact), "cachegen", "cachegen(level=N)" or "cachegen(within=SECONDS)".

    Raises:
        ValueError: for anything else.

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
