"""The `jkv bench stages` command. Imports jax only when it runs."""

from __future__ import annotations

from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from jkv.cli.bench_common import measure

RATES = (0.25, 0.5, 1.0, 2.0, 4.0)


def stages(
    job: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder of a finished jkv batch --stages job.")],
    workers: Annotated[int, typer.Option(min=2, max=64, help="Number of processes; each stage gets at least one.")] = 4,
    first: Annotated[float, typer.Option(min=0, help="Deadline of the first token, in seconds.")] = 5.0,
    later: Annotated[float, typer.Option(min=0, help="Deadline of every further token, in seconds.")] = 0.1,
    rate: Annotated[
        list[float] | None,
        typer.Option(min=1e-6, help=f"Requests per second; repeatable. Default: {', '.join(f'{x:g}' for x in RATES)}."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Simulated requests; their lengths are those of the job's rows.")
    ] = 500,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds between role changes by queue length. Default: roles are fixed."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Simulate every split of processes into prefill and decode workers: how many requests meet their deadlines?"""
    from jkv.bench import disaggregated as simulated
    from jkv.bench import environment

    costs, lengths = simulated.measured(job, inf if every is None else every)
    rates = rate or list(RATES)
    environment.check_path(out)
    found = partial(simulated.rows, costs, lengths, requests, workers, rates, first, later)
    about = environment.meta(str(job), 1, workers=workers, first=first, later=later, requests=requests, every=every)
    says = lambda r: f"{r['prefill']} + {r['decode']}, {r['rate']:g} a second: {r['share']:.0%} in time"  # noqa: E731
    measure((workers - 1) * len(rates), found, says, simulated.table, about, out)
