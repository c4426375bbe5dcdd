"""jkv bench decode, prefill, flush, growth, compare; and jkv recommend. Imports jax only where a command needs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from jkv.bench.speed import What
    from jkv.io.source import Source

CACHES = ("full", "snapkv(budget=512) | int4")
CONTEXTS = (512, 2048)

app = typer.Typer(help="Speed, bytes and memory of caches on this machine, also beside others.")

Model = Annotated[str | None, typer.Option(help="A name, a .gguf file, a model folder, or org/name on a hub.")]
Shape = Annotated[str | None, typer.Option(help="A public model's shape: llama-3.1-8b, llama-3.2-1b, qwen3-8b, ...")]
Random = Annotated[bool, typer.Option("--random-weights", help="Seeded noise in the shape of --shape or --model.")]
Context = Annotated[
    list[int] | None, typer.Option(min=1, help="Tokens in the cache; can be repeated. Default: 512 and 2048.")
]
Batch = Annotated[int, typer.Option(min=1, help="Rows.")]
Caches = Annotated[
    list[str] | None, typer.Option("--cache", help=f"A composition; can be repeated. Default: {' and '.join(CACHES)}")
]
Steps = Annotated[int, typer.Option(min=1, help="Tokens of a round; a multiple of the cache's block is fair.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds, after one that is not.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Confine the process to so many of its cores. Default: all of them.")
]
Dtype = Annotated[str, typer.Option(help="Of weights and uncompressed tokens: float32, bfloat16 or float16.")]
Versus = Annotated[
    str | None, typer.Option("--vs", help="transformers: take turns with it (on CPU, its full cache; same weights).")
]
Out = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the rows to this file.")]


@app.command()
def decode(
    model: Model = None,
    shape: Shape = None,
    random_weights: Random = False,
    context: Context = None,
    batch: Batch = 1,
    cache: Caches = None,
    steps: Steps = 64,
    rounds: Rounds = 5,
    threads: Threads = None,
    dtype: Dtype = "float32",
    vs: Versus = None,
    out: Out = None,
) -> None:
    """Milliseconds a token after a context, token by token, with percentiles, bytes and the share of a copy's rate."""
    _speed("decode", model, shape, random_weights, context, batch, cache, steps, rounds, threads, dtype, vs, out)


@app.command()
def prefill(
    model: Model = None,
    shape: Shape = None,
    random_weights: Random = False,
    context: Context = None,
    batch: Batch = 1,
    cache: Caches = None,
    rounds: Rounds = 5,
    threads: Threads = None,
    dtype: Dtype = "float32",
    vs: Versus = None,
    out: Out = None,
) -> None:
    """Milliseconds of a whole prompt."""
    _speed("prefill", model, shape, random_weights, context, batch, cache, 0, rounds, threads, dtype, vs, out)


@app.command()
def flush(
    model: Model = None,
    shape: Shape = None,
    random_weights: Random = False,
    context: Context = None,
    batch: Batch = 1,
    cache: Caches = None,
    rounds: Rounds = 15,
    threads: Threads = None,
    dtype: Dtype = "float32",
    out: Out = None,
) -> None:
    """Milliseconds of one flush: what it adds to one token of each block."""
    _speed("flush", model, shape, random_weights, context, batch, cache, 0, rounds, threads, dtype, None, out)


def _speed(
    what: What,
    model: str | None,
    shape: str | None,
    random_weights: bool,
    context: list[int] | None,
    batch: int,
    cache: list[str] | None,
    steps: int,
    rounds: int,
    threads: int | None,
    dtype: str,
    vs: str | None,
    out: Path | None,
) -> None:
    specs, contexts = cache or CACHES, context or CONTEXTS
    cores = _start(specs, threads, dtype, vs, out)
    from jkv import models
    from jkv.bench import engines, results, speed

    name, source = _subject(model, shape, random_weights, dtype, vs)
    speed.check(specs, contexts, steps, models.read_config(source.config))
    with progress(len(specs) * len(contexts)) as track:
        params = models.build(source.config, source.tensors, dtype)
        peer = None
        if vs is not None:
            peer = engines.Transformers(source, cores, dtype)
            engines.apart(engines.Jkv(params), peer)
        found = speed.rows(what, params, specs, contexts, batch=batch, steps=steps, rounds=rounds, peer=peer)
        rows = track(found, lambda r: f"{what} {r['cache']} at {r['context']}: {r['ms']:.2f} ms")
    _show(speed.table(what, rows))
    timed = {"timed": speed.TIMED[what], "dtype": dtype, "rounds": rounds}
    results.save(out, results.meta(name, cores, **timed), rows)


@app.command()
def growth(
    model: Model = None,
    shape: Shape = None,
    random_weights: Random = False,
    cache: Annotated[list[str] | None, typer.Option(help="A composition; can be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="To generate, where --marks does not say.")] = 32768,
    marks: Annotated[
        str | None, typer.Option(help="Where to measure, such as 1024,8192. Default: 1024, doubled up to --tokens.")
    ] = None,
    over: Annotated[int, typer.Option(min=16, help="Tokens timed before each mark, in pieces of 16.")] = 128,
    threads: Threads = None,
    dtype: Dtype = "float32",
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw it: out.png, .svg, .pdf")] = None,
    out: Out = None,
) -> None:
    """Milliseconds a token and bytes while tokens are generated, all of them really."""
    specs = cache or ["streaming(budget=256)"]
    cores = _start(specs, threads, dtype, None, out)
    from jkv import inspect, models
    from jkv.bench import growth as growing
    from jkv.bench import results

    if plot is not None:
        inspect.check_path(plot)
    at = _numbers(marks) if marks is not None else growing.doubling(tokens, over)
    name, source = _subject(model, shape, random_weights, dtype, None)
    growing.check(specs, at, over, models.read_config(source.config))
    with progress(len(specs) * len(at)) as track:
        params = models.build(source.config, source.tensors, dtype)
        found = growing.rows(params, specs, at, over)
        rows = track(found, lambda r: f"{r['cache']} at {r['tokens']}: {r['ms']:.2f} ms")
    _show(growing.table(rows))
    results.save(out, results.meta(name, cores, dtype=dtype, over=over), rows)
    if plot is not None:
        growing.plot(rows, plot)
        print(f"drawn: {plot}", file=sys.stderr)


@app.command()
def compare(
    model: Annotated[str, typer.Option(help="A name, a .gguf file, a model folder, or org/name on a hub.")] = (
        "smollm2-135m"
    ),
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens before those decoded. Default: 512, 2048 and 4096.")
    ] = None,
    prompt: Annotated[list[int] | None, typer.Option(min=1, help="Tokens prefilled. Default: 512 and 2048.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Tokens of a round of decoding.")] = 32,
    rounds: Rounds = 5,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """The full cache beside transformers on the same float32 weights, in turns, and the floor of this machine."""
    cores = _start((), threads, "float32", "transformers", out)
    from jkv import models
    from jkv.bench import compare as comparing
    from jkv.bench import results
    from jkv.io.load import read

    lengths, prompts, source = context or [512, 2048, 4096], prompt or [512, 2048], read(model)
    comparing.check(models.read_config(source.config), lengths, prompts, steps)
    with progress(len(lengths) + len(prompts)) as track:
        found = comparing.rows(source, lengths, prompts, steps, rounds, cores)
        rows = track(
            found, lambda r: f"{r['what']} {r['tokens']}: jkv {r['jkv']:.1f}, transformers {r['other']:.1f} ms"
        )
    _show(comparing.table(rows))
    results.save(out, results.meta(model, cores, dtype="float32", steps=steps, rounds=rounds), rows)


def recommend(
    files: Annotated[list[str] | None, typer.Argument(help="More result files.")] = None,
    model: Annotated[str, typer.Option(help="As it was given to jkv eval.")] = "smollm2-135m",
    context: Annotated[int, typer.Option(min=1, help="Tokens that the cache must remember.")] = 8192,
    memory: Annotated[str, typer.Option(help="For the cache of one row, such as 4GiB.")] = "4GiB",
    results: Annotated[list[str] | None, typer.Option(help="Files of jkv eval. Default: results/*.json")] = None,
) -> None:
    """The caches with the best measured quality for their bytes that fit into the memory, and the evidence."""
    from jkv import models
    from jkv.bench import recommend as choosing
    from jkv.bench.shapes import SHAPES
    from jkv.budgets import read_bytes
    from jkv.io.load import read

    limit = read_bytes(memory)
    c = models.read_config(SHAPES[model] if model in SHAPES else read(model).config)
    numbers = context * c.layers * 2 * c.heads * c.head_dim
    patterns = [*(results or ()), *(files or ())] or ["results/*.json"]
    _show(choosing.table(choosing.best(patterns, model, numbers, limit), context))


# ----------------------------------------------------------------------------------------- what the commands share


def _start(specs: Iterable[str], threads: int | None, dtype: str, vs: str | None, out: Path | None) -> int:
    """Refuses what cannot work, cheapest first, and takes the cores; how many they are. Raises ValueError, OSError."""
    cores = use_cores(threads)  # before jax starts a thread for every core it may use
    from jkv import methods
    from jkv.bench import results
    from jkv.io.load import DTYPES

    for spec in specs:
        methods.parse(spec)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if vs is not None:
        _check_peer(vs)
    results.check_path(out)
    return cores


def use_cores(threads: int | None) -> int:
    """Confines the process to `threads` of its cores (None: to all); how many. ValueError if it has not so many."""
    if not hasattr(os, "sched_setaffinity"):
        if threads is not None:
            raise ValueError("--threads cannot be kept on this system: leave it out")
        return os.cpu_count() or 1
    mine = sorted(os.sched_getaffinity(0))
    if threads is None:
        return len(mine)
    if threads > len(mine):
        raise ValueError(f"--threads {threads}: this process may use {len(mine)} cores; give that or fewer")
    os.sched_setaffinity(0, mine[:threads])
    return threads


def _check_peer(vs: str) -> None:
    if vs != "transformers":
        raise ValueError(f"--vs {vs}: the only peer is transformers")
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise ValueError(f"beside transformers: {' and '.join(missing)} is missing; run: pip install 'jkv[parity]'")
    import jax

    if jax.default_backend() != "cpu":
        raise ValueError("beside transformers: it runs on the CPU here; set JAX_PLATFORMS=cpu so that jkv does too")


def _subject(
    model: str | None, shape: str | None, random_weights: bool, dtype: str, vs: str | None
) -> tuple[str, Source]:
    from jkv.bench.shapes import subject

    return subject(model, shape, random_weights, 4 if dtype == "float32" else 2, 1 + (vs is not None))


def _numbers(text: str) -> list[int]:
    try:
        return [int(x) for x in text.split(",")]
    except ValueError:
        raise ValueError(f"--marks {text}: give numbers of tokens with commas between, such as 1024,8192") from None


@contextlib.contextmanager
def progress(total: int) -> Iterator[Any]:
    """A function that collects rows, with a bar on stderr; a line a row where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading, compiling", total=total)

        def track(found: Iterable[dict[str, Any]], says: Any) -> list[dict[str, Any]]:
            rows = []
            for row in found:
                rows.append(row)
                bar.update(task, advance=1, description=says(row))
                if not console.is_terminal:
                    print(says(row), file=sys.stderr, flush=True)
            return rows

        yield track


def _show(table: Table) -> None:
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
