"""The `jkv batch` command. Imports jax only when it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.batch.preemption import stoppable
from jkv.cli.options import (
    MODEL,
    Cached,
    ChatOptions,
    Drawing,
    Dtype,
    Model,
    PrefixCacheOptions,
    Weights,
    default_cache,
    flat,
)
from jkv.engine import MOST_NEW
from jkv.utils import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from jkv.batch.job import Tell
    from jkv.batch.report import Report
    from jkv.generation.sampling_params import SamplingParams


@flat
def batch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN.jsonl", help="Input file or URL: one JSON object per line with prompt, messages or tokens."
        ),
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Output folder or URL: answers as JSON lines, and report.json.")
    ],
    model: Model = MODEL,
    cache: Cached = None,
    mesh: Annotated[
        str | None, typer.Option(help="Device mesh of each process, or of all, such as data=4,model=2,context=2.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch size; auto: as many rows as fit.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate per row.")] = 128,
    drawing: Drawing = Drawing(),
    seed: Annotated[int | None, typer.Option(help="Random seed of every row. Default: the row's line number.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers per prompt, sampled one by one.")] = 1,
    new_tokens_limit: Annotated[
        int, typer.Option(min=1, help="Largest max_new_tokens a row may ask for, if the cache sets no limit.")
    ] = MOST_NEW,
    drafter: Annotated[str | None, typer.Option(help="Speculative decoding: suffix or recycle.")] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="Disaggregated prefill and decode processes, such as prefill=1,decode=1. Default: one for both."
        ),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed rows again.")] = False,
    chat_options: ChatOptions = ChatOptions(),
    stored: PrefixCacheOptions = PrefixCacheOptions(),
    dtype: Dtype = None,
    weights: Weights = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Multi-process job: auto (as jax detects it), or ADDRESS:PORT,i,n for process i of n."),
    ] = None,
) -> None:
    """Answer every line of a JSONL file. Run the same command again to resume.

    Lines of OpenAI's batch API (custom_id, method, url, body) are accepted too, and answered in the same format.

    A line may set its own id, temperature, top_k, top_p, min_p, repetition_penalty, seed, n, max_new_tokens, stop and
    chat_template_kwargs.
    Answers, finish reasons and the errors of failed lines go to OUT/rows-*.jsonl, with their input line numbers.

    Exit codes: 0 all lines answered, 65 some failed, 75 stopped with lines left to do.
    """
    at_once = _number(batch)
    with stoppable() as stopped:
        from jkv.generation.sampling_params import SamplingParams

        settings = SamplingParams(
            **vars(drawing), seed=seed, max_new_tokens=max_new_tokens, stop=tuple(stop or ()), n=n
        )
        with console.meter() as tell:
            options = dict(
                batch=at_once,
                most_new=new_tokens_limit,
                retry=retry_failed,
                prefix_cache=stored.open(),
                drafter=drafter,
            )
            report = start(
                source,
                out,
                model,
                cache,
                mesh,
                settings,
                chat_options,
                dtype,
                weights,
                hosts,
                stages,
                stopped,
                tell,
                options,
            )
        print(report)
    if report.code:
        raise typer.Exit(report.code)


def _number(text: str) -> int:
    """Parse --batch: the batch size, or 0 for auto."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--batch {text}: a number of rows, or auto")
    return int(text)


def start(
    source: str,
    out: str,
    model: str,
    cache: str | None,
    mesh: str | None,
    settings: SamplingParams,
    chat_options: ChatOptions,
    dtype: str | None,
    weights: str | None,
    hosts: str | None,
    stages: str | None,
    stopped: Callable[[], bool],
    tell: Tell,
    options: dict[str, Any],
) -> Report:
    """Load the model and run the job. An invalid cache or input raises before anything is loaded."""
    from jkv.batch.disaggregated.allocation import divided
    from jkv.batch.disaggregated.coordinator import staged
    from jkv.batch.job import Job
    from jkv.batch.run import Work, run
    from jkv.core import sharding
    from jkv.io import load as loading
    from jkv.io import object_store
    from jkv.methods import parse

    config, asked, answers = parse(cache or "full"), object_store.place(source), object_store.place(out)
    if not object_store.is_file(asked):
        raise ValueError(f'{source} is no file: give JSON lines, such as {{"prompt": "Tides are"}}')
    workers = None if stages is None else divided(stages)
    if hosts is not None:
        join(hosts)
    load = partial(loading.load, model, dtype, mesh, weights)
    params = chat_options.give(load())
    config = config if cache else parse(default_cache(params.config))
    over, shares = sharding.mesh_of(params), workers is None
    job = Job(
        source=asked, out=answers, params=params, config=config, defaults=settings, over=over, shares=shares, **options
    )
    return run(job, stopped, tell, Work.finish if workers is None else staged(job, workers, load))


def join(hosts: str) -> None:
    """Join the multi-process job that --hosts describes. Raises ValueError if it cannot be parsed."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would install its own SIGTERM handler
    if hosts == "auto":
        jax.distributed.initialize()
        return
    address, *numbers = hosts.split(",")
    if ":" not in address or len(numbers) != 2 or not all(x.strip().isdecimal() for x in numbers):
        raise ValueError(f"--hosts {hosts}: auto, or such as 10.0.0.1:9876,0,2 for the first of two processes")
    process, processes = map(int, numbers)
    if process >= processes:
        raise ValueError(f"--hosts {hosts}: the processes are 0 to {processes - 1}")
    jax.distributed.initialize(address, num_processes=processes, process_id=process)
