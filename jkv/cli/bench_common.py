"""Shared code of the `jkv bench` commands: argument checks, models, and saving results as they are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jkv.bench.environment import use_cores
from jkv.cli.options import CACHES, MODEL, Machine, Subject
from jkv.utils import console
from jkv.utils.optional_deps import install

if TYPE_CHECKING:
    from rich.table import Table

    from jkv.io.model_source import Source
    from jkv.models import Params

Row = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """Another engine to compare with.

    Attributes:
        packages: Python packages that must be installed.
        extra: Extra of jkv that installs them.
        caches: Caches that are compared by default.
        shared: Module that checks which caches both engines have; "" if all.
        codes: Whether it reads a .gguf file's own blocks instead of float weights.
    """

    packages: tuple[str, ...]
    extra: str
    caches: tuple[str, ...] = CACHES
    shared: str = ""
    codes: bool = False


PEERS = {
    "transformers": Peer(("torch", "transformers"), "parity"),
    "kvpress": Peer(
        ("torch", "transformers", "kvpress"), "kvpress", ("full", "snapkv(keep=0.25)"), "jkv.bench.presses"
    ),
    "llama.cpp": Peer(("xllamacpp",), "llama", ("full", "int8", "int4"), "jkv.bench.llama", codes=True),
}


def start(
    specs: Iterable[str], machine: Machine, dtype: str | None = "float32", vs: str | None = None
) -> tuple[int, str]:
    """Check the arguments, cheapest first, and confine the process to its cores.

    Returns:
        The number of cores, and the dtype of the weights.

    Raises:
        ValueError: A cache, dtype, thread count or peer cannot be used.
        OSError: The result file cannot be written.
    """
    cores = use_cores(machine.threads)  # before jax starts one thread per available core
    from jkv import methods
    from jkv.bench import environment
    from jkv.io.load import dtype_of

    for spec in specs:
        methods.parse(spec)
    dtype = dtype_of(dtype)
    if vs is not None:
        check_peer(vs, specs)
    environment.check_path(machine.out)
    return cores, dtype


def check_peer(vs: str, specs: Iterable[str]) -> None:
    if vs in ("sdpa", "cudnn"):
        raise ValueError(f"--vs {vs}: it is attention alone, on a GPU: a column of jkv bench kernel there")
    if vs not in PEERS:
        from jkv import methods

        try:
            methods.parse(vs)
        except ValueError as error:
            raise ValueError(f"--vs {vs}: the peers are {', '.join(PEERS)}, and other caches: {error}") from None
        return
    peer = PEERS[vs]
    if missing := [name for name in peer.packages if find_spec(name) is None]:
        raise ValueError(f"beside {vs}: {' and '.join(missing)} is missing; {install(peer.extra)}")
    import jax

    if jax.default_backend() != "cpu":
        raise ValueError(f"beside {vs}: it runs on the CPU here; set JAX_PLATFORMS=cpu so that jkv does too")
    if peer.shared:
        from jkv import methods

        for spec in specs:
            import_module(peer.shared).shared(str(methods.parse(spec)), 1)


def subject(o: Subject, dtype: str, vs: str | None = None) -> tuple[str, Source]:
    """Return the name of the measured model and its source (config, and tensors that are read lazily).

    Raises:
        ValueError: The model and weight options do not work together, or not with the peer `vs`.
    """
    from jkv.bench.model_shapes import subject
    from jkv.io.load import check_weights

    check_weights(o.weights)
    if o.weights == "file" and o.random_weights:
        raise ValueError("--weights file: random weights are of no file; use int8 or int4")
    codes = vs in PEERS and PEERS[vs].codes
    if o.weights is not None and vs in PEERS and not codes:
        raise ValueError(f"--weights {o.weights} beside {vs}: it has floats alone; leave --weights out")
    size = 1 if o.weights else 4 if dtype == "float32" else 2
    name, source = subject(o.model, o.shape, o.random_weights, size, 1 + (vs in PEERS))
    if codes and source.file is None:
        raise ValueError(f"--vs {vs}: it reads .gguf files alone, and {name} is none")
    return name, source


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
