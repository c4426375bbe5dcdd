"""One-time device benchmark: kernel self-tests, memory bandwidth, attention kernels, decoding."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jkv import kernels, models
from jkv.bench import kernel, model_shapes, speed
from jkv.bench.measure import arithmetic, copy_rate, read_rate
from jkv.io.model_source import Source
from jkv.kernels.attention_column_sums import selftest as columns
from jkv.kernels.decode_attention import selftest as attention
from jkv.kernels.prefill_attention import selftest as prompts
from jkv.kernels.window_attention import selftest as windows
from jkv.utils.json_results import overwrite, write

Row = dict[str, Any]
CODES = ("full", "int8", "int4", "int4(group=32)", "int2", "kivi(bits=2)", "turboquant", "ksort", "fp8")
CACHES = (
    "full",
    "int8",
    "int4",
    "kivi(bits=2)",
    "snapkv(budget=1024) | int4",
    "h2o(budget=1024)",
    "streaming(budget=1024)",
    "quest(pages=64)",
)
PARTS = ("checks", "memory", "kernels", "decode")  # in this order
FILE, PAGE = "hardware.json", "hardware.html"
STYLE = (
    ":root{color-scheme:light dark}"
    "body{margin:2em auto;max-width:72em;padding:0 1em;font:15px/1.5 system-ui,sans-serif}"
    "table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #8886;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        shape: Shape of a public model.
        layers: Layers of this model to use; 0 for all.
        every: Only every n-th check is run.
        slots, long, tokens: Sizes of the checks.
        codes, contexts, batch: Caches, context lengths and batch size of the attention kernel benchmark.
        caches, context, steps: Caches, context length and decoded tokens of the decoding benchmark.
        rounds: Timed rounds.
        minutes: No further measurement starts after this time.
    """

    shape: str
    layers: int = 0
    every: int = 1
    slots: int = 1024
    long: int = attention.LONG
    tokens: int = 1000
    codes: tuple[str, ...] = CODES
    contexts: tuple[int, ...] = (8192, 131072)
    batch: int = 8
    caches: tuple[str, ...] = CACHES
    context: int = 16384
    steps: int = 64
    rounds: int = 5
    minutes: float = 18.0

    @property
    def config(self) -> dict[str, Any]:
        """Return the config of the model."""
        config = model_shapes.SHAPES[self.shape]
        return config | ({"num_hidden_layers": self.layers} if self.layers else {})


SMALL = Size(
    shape="smollm2-135m",
    layers=2,
    every=9,
    slots=512,
    long=0,
    tokens=100,
    codes=("int8", "kivi(bits=2)"),
    contexts=(512,),
    batch=1,
    caches=("full", "int8", "snapkv(budget=64) | int4", "quest(pages=4)"),
    context=256,
    steps=16,
    rounds=1,
)


def size_of(dtype: str) -> Size:
    """Choose the size for this device: an 8B shape if its weights fit, else a smaller one; SMALL on a CPU."""
    if jax.default_backend() == "cpu":
        return SMALL
    for size in (Size(shape=x) for x in ("llama-3.1-8b", "llama-3.2-1b")):
        with suppress(ValueError):
            source(size, dtype)
            return size
    return Size(shape="smollm2-135m", context=4096)


def source(size: Size, dtype: str) -> Source:
    """Return random weights, generated lazily. Raises ValueError if they do not fit in memory."""
    return model_shapes.noise(size.config, 4 if dtype == "float32" else 2, 1)


class Record:
    """The measurements so far, written to FILE and PAGE of a folder after every one, so that a crash loses nothing.

    If the disk is full the run continues; `problem` holds the error, and the next write includes all records.
    """

    def __init__(self, folder: Path, about: Row) -> None:
        self.folder, self.about, self.rows, self.problem = folder, about, list[Row](), ""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        try:
            write(self.folder / FILE, self.about, self.rows)
            overwrite(self.folder / PAGE, page(self.about, self.rows))
            self.problem = ""
        except OSError as error:
            self.problem = str(error)


def measured(size: Size, dtype: str, record: Record, say: Callable[[str], None]) -> None:
    """Run all parts and add every result to `record`; a part that fails or runs out of time adds a note instead."""
    end = time.monotonic() + 60 * size.minutes

    def add(part: str, row: Row) -> None:
        record.add({"part": part, **row})
        say(f"{part}: {format_row(row)}")

    for part, rows in zip(PARTS, (checks, rates, table, decoding), strict=True):
        found = rows(size, dtype)
        try:
            while (left := time.monotonic() < end) and (row := next(found, None)) is not None:
                add(part, row)
            if not left:
                add(part, {"failed": f"no further row was begun: {size.minutes:g} minutes were over"})
        except Exception as error:  # a new device or its compiler may raise anything
            add(part, {"failed": f"{type(error).__name__}: {error}"})


def checks(size: Size, dtype: str) -> Iterator[Row]:
    """Yield, for each operation, the number of correct self-test cases and the failed ones."""
    name = kernels.native()
    cases = [*attention.cases(size.slots), *(attention.long(size.long) if size.long else [])]
    asked: dict[str, Iterable[tuple[str, str]]] = {
        "decode_attention": attention.verdicts(name, cases[:: size.every]),
        "prefill_attention": prompts.verdicts(name, [*prompts.cases(size.tokens)][:: size.every]),
        "column_sums": columns.verdicts(name, [*prompts.cases(size.tokens)][:: size.every]),
    }
    if name != "tpu":  # only TPUs have this kernel
        asked["window_attention"] = windows.verdicts(name, [*windows.cases()][:: size.every])
    for operation, found in asked.items():
        all_ = list(found)
        count = Counter(word for word, _ in all_)
        wrong = [text for word, text in all_ if word == "WRONG"]
        yield {
            "operation": operation,
            "kernel": name,
            **{x: count[x] for x in ("ok", "WRONG", "refused")},
            "wrong": wrong,
        }


def rates(size: Size, dtype: str) -> Iterator[Row]:
    """Measure bytes per second of a copy and a matrix-vector product, and FLOP/s of a float32 matrix product."""
    yield {"copy_bytes_per_s": copy_rate(), "read_bytes_per_s": read_rate(), "float32_ops_per_s": arithmetic()}


def table(size: Size, dtype: str) -> Iterator[Row]:
    """Time decode attention over one layer's codes; yields the records of `jkv bench kernel`."""
    model = models.read_config(size.config)
    names = list(dict.fromkeys(["xla", kernels.native()]))
    for context in size.contexts:
        for code in size.codes:
            try:
                yield from kernel.rows(
                    [code], names, (), model, [context], batch=size.batch, dtype=dtype, rounds=size.rounds
                )
            except (ValueError, RuntimeError) as error:
                yield {"cache": code, "context": context, "failed": str(error)}


def decoding(size: Size, dtype: str) -> Iterator[Row]:
    """Time decoding of the whole model with random weights; yields the records of `jkv bench decode`."""
    weights = source(size, dtype)
    params = models.build(weights.config, weights.tensors, dtype)
    for cache in size.caches:
        try:
            yield from speed.rows("decode", params, [cache], [size.context], steps=size.steps, rounds=size.rounds)
        except (ValueError, RuntimeError) as error:
            yield {"cache": cache, "context": size.context, "failed": str(error)}


def format_row(row: Row) -> str:
    """Format a record as one line.

    >>> format_row({"cache": "int8", "context": 512, "ms": 1.5}), format_row({"copy_bytes_per_s": 2e9})
    ('int8 at 512: 1.500 ms', '2.0 GB/s')
    >>> format_row({"failed": "no room"})
    'no room'
    """
    if "failed" in row:
        return str(row["failed"])
    if "ms" in row:
        by = f"{row['implementation']}, " if "implementation" in row else ""
        return f"{by}{row['cache']} at {row['context']}: {row['ms']:.3f} ms"
    if "operation" in row:
        return f"{row['operation']}: {row['ok']} right, {row['WRONG']} wrong, {row['refused']} refused"
    return f"{row['copy_bytes_per_s'] / 1e9:,.1f} GB/s"


def right(rows: Sequence[Row]) -> bool:
    """Return whether something was measured and nothing is wrong or failed."""
    return bool(rows) and not any(r.get("WRONG") or "failed" in r for r in rows)


def page(about: Row, rows: Sequence[Row]) -> str:
    """Render a self-contained HTML page."""
    device = html.escape(f"{about['machine']['device']}: jkv bench hardware")
    of = {part: [r for r in rows if r["part"] == part] for part in PARTS}
    told_ = [
        f"<p>{html.escape(', '.join(f'{k} {v}' for k, v in about['versions'].items()))}, {about['date']}</p>",
        "<h2>Checks against float64</h2>", _cells(_checked(of["checks"])),
        "<h2>Memory and arithmetic</h2>", _cells(_rated(of["memory"])),
        "<h2>Attention over one layer's codes</h2>", _cells(kernel.table([r for r in of["kernels"] if "ms" in r])),
        f"<h2>Decoding: {html.escape(about['model'])}, random weights</h2>",
        _cells(speed.table("decode", [r for r in of["decode"] if "ms" in r])),
        *(f"<p>{html.escape(r['part'])}: {html.escape(r.get('cache', ''))} {html.escape(r['failed'])}</p>"
          for r in rows if "failed" in r),
    ]  # fmt: skip
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{device}</title><style>{STYLE}</style>'
    return f"{head}<h1>{device}</h1>{''.join(told_)}</html>\n"


def _checked(rows: Sequence[Row]) -> Table:
    out = Table("operation", "kernel", "right", "wrong", "refused", "which")
    for r in rows:
        if "operation" in r:
            out.add_row(*(str(r[x]) for x in ("operation", "kernel", "ok", "WRONG", "refused")), "; ".join(r["wrong"]))
    return out


def _rated(rows: Sequence[Row]) -> Table:
    out = Table("copy, GB/s", "read, GB/s", "float32, TFLOP/s")
    for r in rows:
        if "copy_bytes_per_s" in r:
            found = r["copy_bytes_per_s"] / 1e9, r["read_bytes_per_s"] / 1e9, r["float32_ops_per_s"] / 1e12
            out.add_row(*(f"{x:,.2f}" for x in found))
    return out


def _cells(table: Table) -> str:
    """Render a terminal table as HTML."""
    heads = "".join(f"<th>{html.escape(str(c.header))}</th>" for c in table.columns)
    lines = zip(*([html.escape(str(x)) for x in c.cells] for c in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{x}</td>' for x in line)}</tr>" for line in lines)
    return f"<table><tr>{heads}</tr>{body}</table>"
