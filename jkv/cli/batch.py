"""jkv batch. Imports jax only when it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.batch.preemption import stoppable
from jkv.cli.options import MODEL, ChatOptions, Drawing, Dtype, Model, Stored, Weights, flat
from jkv.engine import MOST_NEW
from jkv.utils import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from jkv.batch.job import Tell
    from jkv.batch.report import Report
    from jkv.engine.request import Settings


@flat
def batch(
    source: Annotated[
        str, typer.Argument(metavar="IN.jsonl", help="One JSON object per line: prompt, messages or tokens; or a URL.")
    ],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Output folder or URL: rows as JSON lines, and report.json.")
    ],
    model: Model = MODEL,
    cache: Annotated[str, typer.Option(help="A composition of methods; see: jkv methods")] = "full",
    mesh: Annotated[
        str | None, typer.Option(help="Devices of each process, or of all, such as data=4,model=2,context=2.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Rows of a batch; auto: as many as fit.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate per row.")] = 128,
    drawing: Drawing = Drawing(),
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling of each row. Default: its line number.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt, drawn one by one.")] = 1,
    new_tokens_limit: Annotated[
        int, typer.Option(min=1, help="Largest max_new_tokens of a row, if the cache has no limit of its own.")
    ] = MOST_NEW,
    draft: Annotated[str | None, typer.Option(help="Guesses, several verified a pass: suffix, recycle.")] = None,
    stages: Annotated[
        str | None,
        typer.Option(help="Processes that prefill and that decode, such as prefill=1,decode=1. Default: one for both."),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed rows again.")] = False,
    chat_options: ChatOptions = ChatOptions(),
    stored: Stored = Stored(),
    dtype: Dtype = None,
    weights: Weights = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="One process of several: auto, as jax finds them; or ADDRESS:PORT,i,n for process i of n."),
    ] = None,
) -> None:
    """Answer every row of a file once; a run that was killed, or had no room left, goes on where it was.

    Lines of OpenAI's batch API (custom_id, method, url, body) are read too, and answered in kind.

    A row may set its own id, temperature, top_k, top_p, min_p, repetition_penalty, seed, n, max_new_tokens, stop and
    chat_template_kwargs.
    The rows, their ends and the errors of those that failed are in OUT/rows-*.jsonl, by their line in the input.

    The exit code is 0 when all rows are answered, 65 when some failed, 75 when it was stopped and rows are left.
    """
    at_once = _number(batch)
    with stoppable() as stopped:
        from jkv.engine.request import Settings

        settings = Settings(**vars(drawing), seed=seed, max_new_tokens=max_new_tokens, stop=tuple(stop or ()), n=n)
        with console.meter() as tell:
            options = dict(
                batch=at_once, most_new=new_tokens_limit, retry=retry_failed, store=stored.open(), draft=draft
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
    """Rows at once; 0: auto."""
    if text == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--batch {text}: a number of rows, or auto")
    return int(text)


def start(
    source: str,
    out: str,
    model: str,
    cache: str,
    mesh: str | None,
    settings: Settings,
    chat_options: ChatOptions,
    dtype: str | None,
    weights: str | None,
    hosts: str | None,
    stages: str | None,
    stopped: Callable[[], bool],
    tell: Tell,
    options: dict[str, Any],
) -> Report:
    """Loads the model and runs the job; what is wrong with the cache or the input is said before anything is loaded."""
    from jkv.batch.disaggregated.allocation import divided
    from jkv.batch.disaggregated.coordinator import staged
    from jkv.batch.job import Job
    from jkv.batch.run import Work, run
    from jkv.core import sharding
    from jkv.io import load as loading
    from jkv.io import object_store
    from jkv.methods import parse

    config, asked, answers = parse(cache), object_store.place(source), object_store.place(out)
    if not object_store.is_file(asked):
        raise ValueError(f'{source} is no file: give JSON lines, such as {{"prompt": "Tides are"}}')
    workers = None if stages is None else divided(stages)
    if hosts is not None:
        join(hosts)
    load = partial(loading.load, model, dtype, mesh, weights)
    params = chat_options.give(load())
    over, shares = sharding.over(params), workers is None
    job = Job(
        source=asked, out=answers, params=params, config=config, defaults=settings, over=over, shares=shares, **options
    )
    return run(job, stopped, tell, Work.finish if workers is None else staged(job, workers, load))


def join(hosts: str) -> None:
    """Makes this process one of several. Raises ValueError for a text that does not say which."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
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
