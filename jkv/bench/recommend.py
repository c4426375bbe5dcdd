"""Cache recommendations: bytes from the model's config, quality from measurements, shipped or of `jkv eval`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from rich import box
from rich.table import Table

from jkv.aot.size import divides, human
from jkv.eval.pareto import Point, load, pareto, points
from jkv.methods import known

FIXED = re.compile(r"\b(budget|tokens|bytes)=")  # sizes that do not grow with the context
Bytes = Callable[[str], int]  # bytes of a cache, by its text


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured of a cache.

    Attributes:
        cache: the composition.
        tokens: prompt tokens of the KL.
        kl: KL to the full cache on prose, in nats.
        later: share of the questions answered that came after compression; None if not measured.
        needles: share of needles found; None if not measured.
    """

    cache: str
    tokens: int
    kl: float
    later: float | None
    needles: float | None

    @property
    def fixed(self) -> bool:
        """Whether the cache has a fixed size, so that a longer context loses more than was measured."""
        return FIXED.search(self.cache) is not None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A recommended cache: for which wish, its evidence, and its bytes."""

    wish: str
    found: Evidence
    nbytes: int


WISHES: dict[str, Callable[[Evidence], bool]] = {
    "nothing lost": lambda x: x.kl <= 1e-3 and min(x.later or 0, x.needles or 0) >= 0.85,
    "many questions, fewer bytes": lambda x: x.kl <= 0.02 and min(x.later or 0, x.needles or 0) >= 0.7,
    "fewest bytes, one question at the end": lambda x: x.kl <= 0.03,
}


@cache
def evidence() -> tuple[str, tuple[Evidence, ...]]:
    """Return the model that the shipped measurements are of, and the measurements."""
    held = json.loads(files("jkv.bench").joinpath("evidence.json").read_text("utf-8"))
    return held["model"], tuple(Evidence(**row) for row in held["caches"])


def trained(text: str) -> bool:
    """Return whether a composition needs weights that were trained or calibrated for one model."""
    return any(known(name).folders for name in re.findall(r"(?:^|\|)\s*(\w+)", text))


def sized(found: Iterable[Evidence], nbytes: Bytes) -> list[Answer]:
    """Return the evidence with its bytes, the smallest first, without caches that this model cannot have.

    Args:
        nbytes: returns the bytes of a cache.
    """
    out = []
    for x in found:
        try:
            out.append(Answer(wish=f"after {x.tokens:,} tokens", found=x, nbytes=nbytes(x.cache)))
        except ValueError:  # its weights are not shipped, or the method does not go with the model
            continue
    return sorted(out, key=lambda x: (x.nbytes, x.found.kl))


def answers(found: Sequence[Evidence], nbytes: Bytes, memory: int) -> list[Answer]:
    """Return the smallest cache for each wish that fits in memory.

    Caches of a fixed size are taken only if no other fits, because they were measured on shorter texts.

    Args:
        nbytes: returns the bytes of a cache.
        memory: bytes for the cache.

    Raises:
        ValueError: no measured cache fits.
    """
    growing = [x for x in found if not x.fixed and any(good(x) for good in WISHES.values())]
    fits = [x for x in sized(growing, nbytes) if x.nbytes <= memory]
    best = {wish: next((x for x in fits if good(x.found)), None) for wish, good in WISHES.items()}
    if out := [replace(x, wish=wish) for wish, x in best.items() if x is not None]:
        return out
    every = sized(found, nbytes)
    if not (fits := [x for x in every if x.nbytes <= memory]):
        raise _too_little(len(every), memory, every[0].nbytes)
    return [replace(min(fits, key=lambda x: x.found.kl), wish="the best that fits")]


def _too_little(measured: int, memory: int, least: int) -> ValueError:
    """Return the error for a memory into which nothing fits."""
    return ValueError(
        f"none of the {measured} measured caches fits into {human(memory)}: the smallest takes {human(least)}; give "
        "more memory, a shorter context, or measure a smaller cache"
    )


def answer_table(found: Sequence[Answer], full: int, title: str) -> Table:
    """Format answers, or all evidence, as a table."""
    out = Table("you want", "cache", "bytes", "smaller", "KL", "later", "needles", box=box.MARKDOWN, title=title)
    for x in found:
        shares = ("-" if y is None else f"{y:.2f}" for y in (x.found.later, x.found.needles))
        held = "~" * divides(x.found.cache) + human(x.nbytes)
        out.add_row(x.wish, x.found.cache, held, f"{full / x.nbytes:.1f}x", f"{x.found.kl:.2g}", *shares)
    return out


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A point of result files that fits in memory, and its bytes."""

    point: Point
    nbytes: int


def recommend(found: Iterable[Point], nbytes: Bytes, memory: int) -> list[Choice]:
    """Return the Pareto-optimal points that fit in memory, best first.

    Only measurements under equal conditions are compared.

    Args:
        nbytes: returns the bytes of a cache at the planned context.
        memory: bytes for the cache.
    """
    held, groups = cache(nbytes), {}
    for p in found:
        groups.setdefault(p.like, []).append(Choice(point=p, nbytes=held(p.cache)))
    out: list[Choice] = []
    for group in groups.values():
        fits = [c for c in group if c.nbytes <= memory]
        out += reversed(pareto(fits, lambda c: (c.nbytes, c.point.loss)))
    return out


def best(patterns: Sequence[str], model: str, nbytes: Bytes, memory: int) -> list[Choice]:
    """Call `recommend` on result files. Raises ValueError if there are no measurements, or none that fits."""
    measured = points((file, meta, rows) for file, meta, rows in load(patterns) if meta.get("model") == model)
    if not measured:
        raise ValueError(
            f"there is no evidence: {', '.join(patterns)} measure no quality of {model}; run jkv eval --model {model}"
        )
    found = recommend(measured, nbytes, memory)
    if not found:
        raise _too_little(len(measured), memory, min(nbytes(p.cache) for p in measured))
    return found


def table(found: Sequence[Choice], full: int, context: int) -> Table:
    """Format the choices and their evidence as a table that also renders as markdown."""
    out = Table("cache", f"bytes at {context:,}", "of full", "task", "quality", "evidence", box=box.MARKDOWN)
    for c in found:
        p = c.point
        length = f" at {p.size}" if p.size else ""
        samples = "unknown samples" if p.samples is None else f"{p.samples} samples"
        tasks = f" of {len(p.tasks)} tasks" if len(p.tasks) > 1 else ""
        about = f"{p.task} {p.asked}".strip() + length
        cells = about, f"{p.metric} {p.value:.4g}", f"{', '.join(p.files)}: {samples}{tasks}"
        out.add_row(p.cache, human(c.nbytes), f"{c.nbytes / full:.1%}", *cells)
    return out
