"""Speed of caches in turns with another engine on the same weights: python -m benchmarks.speed decode --vs ENGINE"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.engines import peer_of
from benchmarks.requirements import ENGINES, check_engine
from jkv.bench.speed import What
from jkv.cli.app import application, main
from jkv.cli.bench_common import Setup, start, subject, time_caches
from jkv.cli.options import Timed

Versus = Annotated[
    str,
    typer.Option(
        "--vs",
        help="transformers (full cache) or kvpress (same budget) on the same weights, llama.cpp on the same .gguf file "
        "and its quantized blocks; on the CPU.",
    ),
]


def decode(
    o: Timed,
    steps: Annotated[int, typer.Option(min=1, help="Tokens per round, best a multiple of the cache's block.")] = 64,
    vs: Versus = "transformers",
) -> None:
    """Time decode steps after a context in alternating rounds with another engine."""
    _speed("decode", o, steps, vs)


def prefill(o: Timed, vs: Versus = "transformers") -> None:
    """Time the prefill of a whole prompt in alternating rounds with another engine."""
    _speed("prefill", o, 0, vs)


def _speed(what: What, o: Timed, steps: int, vs: str) -> None:
    specs = o.cache or (ENGINES[vs].caches if vs in ENGINES else ())
    cores, dtype = start(specs, o, o.dtype)
    check_engine(vs, specs)
    codes = ENGINES[vs].codes
    if o.weights is not None and not codes:
        raise ValueError(f"--weights {o.weights} beside {vs}: it has floats alone; leave --weights out")
    name, source = subject(o, dtype, copies=2)
    if codes and source.file is None:
        raise ValueError(f"--vs {vs}: it reads .gguf files alone, and {name} is none")
    setup = Setup(name=name, source=source, cores=cores, dtype=dtype)
    time_caches(what, o, specs, steps, setup, lambda params: peer_of(vs, params, source, cores, dtype))


app = application(decode, prefill)

if __name__ == "__main__":
    main(app)
