"""Shared code of the `jkv bench` commands: argument checks, models, and saving results as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.bench.environment import use_cores
from jkv.cli.options import MODEL, Machine, Model, Subject, Timed
from jkv.utils import console

if TYPE_CHECKING:
    from rich.table import Table

    from jkv.bench.speed import Peer, What
    from jkv.io.model_source import Source
    from jkv.models import Params

CONTEXTS = (512, 2048)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is measured, and how.

    Attributes:
        name: Name of the model in the result file.
        source: Its config, and tensors that are read lazily.
        cores: CPU cores of the process.
        dtype: Type of the weights.
    """

    name: str
    source: Source
    cores: int
    dtype: str


def start(specs: Iterable[str], machine: Machine, dtype: str | None = "float32") -> tuple[int, str]:
    """Check the arguments, cheapest first, and confine the process to its cores.

    Returns:
        The number of cores, and the dtype of the weights.

    Raises:
        ValueError: A cache, dtype or thread count cannot be used.
        OSError: The result file cannot be written.
    """
    cores = use_cores(machine.threads)  # before jax starts one thread per available core
    from jkv import methods
    from jkv.bench import environment
    from jkv.io.load import dtype_of

    for spec in specs:
        methods.parse(spec)
    dtype = dtype_of(dtype)
    environment.check_path(machine.out)
    return cores, dtype


def subject(o: Subject, dtype: str, copies: int = 1) -> tuple[str, Source]:
    """Return the name of the measured model and its source (config, and tensors that are read lazily).

    Args:
        copies: Copies of the weights that must fit in memory.

    Raises:
        ValueError: The model and weight options do not work together.
    """
    from jkv.bench.model_shapes import subject
    from jkv.io.load import check_weights

    check_weights(o.weights)
    if o.weights == "file" and o.random_weights:
        raise ValueError("--weights file: random weights are of no file; use int8 or int4")
    size = 1 if o.weights else 4 if dtype == "float32" else 2
    return subject(o.model, o.shape, o.random_weights, size, copies)


def build(o: Subject, source: Source, dtype: str) -> Params:
    """Load the weights in the format of --weights. Raises ValueError for a format that does not fit."""
    from jkv import models
    from jkv.io.load import kept

    with ExitStack() as bars:
        form, blocks = kept(o.shape or o.model or MODEL, source, dtype, o.weights, bars)
        return models.build(source.config, source.tensors, dtype, form=form, blocks=blocks)


def numbers(text: str) -> list[int]:
    try:
        return [int(x) for x in text.split(",")]
    except ValueError:
        raise ValueError(f"--marks {text}: give numbers of tokens with commas between, such as 1024,8192") from None


def measure(
    total: int,
    found: Callable[[], Iterator[Row]],
    says: Callable[[Row], str],
    table: Callable[[list[Row]], Table],
    about: Row,
    out: Path | None,
) -> list[Row]:
    """Collect measurements; save each one as it arrives, and print the table at the end, even after an error.

    Args:
        total: Number of expected rows, for the progress bar.
        found: Starts the measurements.
        says: Formats a row as a progress line.
        table: Formats all rows as a table.
        about: Metadata of the result file.
        out: Result file; None for none.
    """
    from jkv.bench import environment

    rows: list[Row] = []
    try:
        with console.progress(total) as say:
            for row in found():
                rows.append(row)
                say(says(row))
                environment.save(out, about, rows)
    finally:
        if rows:
            console.show(table(rows))
    return rows


def time_caches(
    what: What,
    o: Timed,
    specs: Sequence[str],
    steps: int,
    setup: Setup,
    peer: Callable[[Params], Peer] | None = None,
    beside: Sequence[str] = (),
) -> None:
    """Time caches at each context, in turns with a peer if there is one.

    Args:
        what: "decode", "prefill" or "flush".
        specs: The caches.
        steps: Tokens per round of decoding.
        peer: Creates the peer from the loaded model.
        beside: Caches of the peer, checked as `specs` are.
    """
    from jkv import models
    from jkv.bench import environment, speed

    contexts, source, dtype = o.context or CONTEXTS, setup.source, setup.dtype
    speed.check(what, [*specs, *beside], contexts, steps, models.read_config(source.config))

    def found() -> Iterator[Row]:
        params = build(o, source, dtype)
        turns = None if peer is None else peer(params)
        return speed.rows(what, params, specs, contexts, batch=o.batch, steps=steps, rounds=o.rounds, peer=turns)

    timed = {"timed": speed.TIMED[what], "dtype": dtype, "weights": o.weights, "rounds": o.rounds}
    about = environment.meta(setup.name, setup.cores, **timed)
    says = lambda r: f"{what} {r['cache']} at {r['context']}: {r['ms']:.2f} ms"  # noqa: E731
    measure(len(specs) * len(contexts), found, says, partial(speed.table, what), about, o.out)


@dataclass(frozen=True, kw_only=True)
class Load(Machine):
    """The options of a load on a server."""

    model: Model = MODEL
    cache: Annotated[
        list[str] | None, typer.Option(help="Cache of the requests; repeat to alternate. Default: full.")
    ] = None
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent streams.")] = 8
    seconds: Annotated[float, typer.Option(min=1, help="Duration of the load.")] = 180
    new: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64
    rows: Annotated[int, typer.Option(min=1, help="Batch size of the server.")] = 8


def load_server(o: Load, peers: Callable[[int], Iterator[Row]] = lambda cores: iter(()), more: int = 0) -> None:
    """Start `jkv serve`, load it, and then measure the servers of `peers`.

    Args:
        peers: Measures other servers on this number of cores.
        more: Number of their records.
    """
    specs = o.cache or ["full"]
    cores, dtype = start(specs, o, None)
    from jkv.bench import environment
    from jkv.bench import serve as under

    # Options of the `jkv serve` process.
    arguments = ["--model", o.model, "--dtype", dtype, "--port", "0", "--rows", str(o.rows)]
    arguments += ["--prompt-tokens-limit", "512", "--new-tokens-limit", str(o.new), "--caches", str(len(set(specs)))]
    arguments += [x for spec in dict.fromkeys(specs) for x in ("--cache", spec)]

    def found() -> Iterator[Row]:
        with under.started(arguments) as (port, pid):
            answers, held, elapsed = under.load(port, pid, o.model, specs, o.clients, o.seconds, o.new)
            yield {"server": "jkv", "clients": o.clients, **under.row(answers, held, elapsed)}
        yield from peers(cores)

    says = lambda r: f"{r['server']}, {r['clients']} clients: {r['answers']} answers, {r['lost']} lost"  # noqa: E731
    about = environment.meta(o.model, cores, dtype=dtype, caches=specs, rows=o.rows, new=o.new, seconds=o.seconds)
    measure(1 + more, found, says, under.table, about, o.out)
