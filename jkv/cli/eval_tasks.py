"""The `jkv eval` commands for question answering and retrieval tasks. Import jax only where needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkv.cli.eval_common import Catalogue, drawn, folder, setting, show
from jkv.cli.options import Compared, flat
from jkv.utils import console

if TYPE_CHECKING:
    from jkv.eval.results import Results
    from jkv.models import Params

Length = Annotated[int, typer.Option(help="Tokens per prompt, question included.")]
Names = Annotated[list[str] | None, typer.Option("--tasks", help="Task name; repeatable. Default: all.")]
Folders = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Also write results in the folder layout of kvpress's evaluation.")
]
Seen = Annotated[
    str, typer.Option("--question", help="Compress the context with the question (seen), before it (unseen), or both.")
]

CUT = 120  # characters to which older versions cut answers


def _asked(question: str) -> list[bool]:
    ways = {"seen": [True], "unseen": [False], "both": [True, False]}
    if question not in ways:
        raise ValueError(f"--question {question}: seen, unseen or both")
    return ways[question]


def _check_whole(found: Results) -> None:
    """Raise ValueError for a result file of an older jkv, which truncated answers."""
    longest: dict[tuple[str, str], int] = {}
    for row in found.rows:
        key = row["cache"], row["question"]
        longest[key] = max(longest.get(key, 0), *map(len, row["said"]))
    if CUT in longest.values() or not all("context" in row for row in found.rows):
        raise ValueError(
            f"{found.path} has answers that an older jkv cut to {CUT} characters, and --kvpress writes whole ones: "
            "measure into another --json"
        )


def _published(made: list[Path]) -> None:
    for path in made:
        print(f"written: {path}", file=sys.stderr)


@flat
def ruler(
    o: Compared,
    catalogue: Catalogue = False,
    task: Names = None,
    length: Length = 1024,
    question: Seen = "seen",
    kvpress: Folders = None,
) -> None:
    """Run the 13 RULER tasks (2404.06654), reimplemented and generated offline."""
    from jkv.eval import experiments, leaderboard, tasks
    from jkv.eval import kvpress_dataset as files

    names = task or [t.name for t in tasks.TASKS.values() if t.suite == "ruler"]
    for name in names:
        tasks.find(tasks.TASKS, name)
    seen, kvpress = _asked(question), kvpress and folder(kvpress)
    s = setting(o, o.cache, length, o.batch, catalogue)
    made = experiments.drawn(s, names, length, o.samples)
    with console.progress(len(s.caches) * len(names) * len(seen)) as say:
        found = experiments.ruler(s, made, length, o.samples, seen, say)
    show(found)
    if kvpress is not None:
        _check_whole(found)
        told = {"dataset": "jkv_ruler", "data_dir": str(length)}
        _published(leaderboard.publish(kvpress, found, files.generated(made), leaderboard.by_task, **told))


@flat
def dataset(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="JSON, CSV or Parquet file, or a folder of them.")],
    o: Compared = Compared(samples=0),
    task: Names = None,
    question: Seen = "unseen",
    length: Annotated[int | None, typer.Option(min=1, help="Truncate contexts to their first N tokens.")] = None,
    kvpress: Folders = None,
) -> None:
    """Run RULER and LongBench from your files, with the columns of simonjegou/ruler and Xnhyacinth/LongBench.

    Prompts, tokenization and scores are those of kvpress. --samples: first rows of each task; 0: all.
    """
    from jkv.eval import kvpress_dataset as files
    from jkv.eval import leaderboard

    seen, every = _asked(question), files.read(path.expanduser())
    some = files.first(every, o.samples, task or [])
    kvpress = kvpress and folder(kvpress)
    s = setting(o, o.cache, length or 0, o.batch)
    tasks = files.grouped(some)
    with console.progress(len(s.caches) * len(tasks) * len(seen)) as say:
        found = files.ask(s, some, length, seen, say)
    show(found)
    if kvpress is not None:
        of_tasks = len(files.first(every, 0, [row.task for row in some]))
        told = {"fraction": round(len(some) / of_tasks, 4), "max_context_length": length}
        ruler = {name: rows for name, rows in tasks.items() if name.startswith("ruler/")}
        where = {"dataset": "ruler", "data_dir": path.stem}
        made = leaderboard.publish(kvpress, found, ruler, leaderboard.by_task, **where, **told)
        for name, rows in tasks.items():
            if name not in ruler:
                where = dict(zip(("dataset", "data_dir"), name.split("/"), strict=True))
                made += leaderboard.publish(kvpress, found, {name: rows}, leaderboard.task_score, **where, **told)
        _published(made)


@flat
def niah(
    o: Compared = Compared(samples=1),
    length: Annotated[list[int] | None, typer.Option(help="Prompt tokens; repeatable. Default: 512, 1024.")] = None,
    depths: Annotated[int, typer.Option(help="Number of depths, evenly spaced from start to end.")] = 5,
    question: Seen = "seen",
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Plot heat maps into this folder.")] = None,
) -> None:
    """Run needle in a haystack on a grid of lengths and depths, optionally with heat maps."""
    from jkv.eval import experiments

    if depths < 2:
        raise ValueError(f"depths={depths}: 2 or more, the start and the end are the first two")
    s = setting(o, o.cache, 1024, o.batch)
    lengths, places = length or [512, 1024], [i / (depths - 1) for i in range(depths)]
    seen = _asked(question)
    with console.progress(len(s.caches) * len(lengths) * depths * len(seen)) as say:
        found = experiments.needle(s, lengths, places, o.samples, seen, say)
    show(found)
    if plot is not None:
        drawn([("", found.meta, found.rows)], plot)


@flat
def multiturn(
    o: Compared = Compared(samples=2, batch=6),
    catalogue: Catalogue = False,
    task: Names = None,
    length: Length = 1536,
    mode: Annotated[
        list[str] | None, typer.Option(help="Mode: reused, turns, rebuilt; repeatable. Default: all.")
    ] = None,
) -> None:
    """Ask several questions about one context, as SCBench (2412.10319) does, including one without an answer."""
    from jkv.eval import experiments, tasks
    from jkv.eval.tasks import scbench

    names, modes = task or list(scbench.SESSIONS), mode or ["reused", "turns", "rebuilt"]
    for name in names:
        tasks.find(scbench.SESSIONS, name)
    if unknown := [m for m in modes if m not in ("reused", "turns", "rebuilt")]:
        raise ValueError(f"--mode {unknown[0]}: reused, turns or rebuilt")

    def held(params: Params) -> int:
        return experiments.context(params, names, length, o.samples, o.seed)

    s = setting(o, o.cache, held, o.batch, catalogue)
    with console.progress(len(s.caches) * len(names) * len(modes)) as say:
        found = experiments.multiturn(s, names, length, o.samples, modes, say)
    show(found)


@flat
def harness(
    o: Compared = Compared(samples=0, batch=8),
    tasks: Annotated[list[str] | None, typer.Option("--tasks", help="Task name; repeatable.")] = None,
    include: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder with YAML of further tasks.")] = None,
    shots: Annotated[int | None, typer.Option(help="Few-shot examples per prompt. Default: the task's own.")] = None,
    question: Annotated[
        str, typer.Option(help="seen: compressed with the context; unseen: prefilled after compression.")
    ] = "seen",
    marker: Annotated[str, typer.Option(help="Text at which an unseen question starts.")] = "\nQuestion:",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
) -> None:
    """Run lm-evaluation-harness tasks with compressed caches; flags tasks whose prompts never reach the budget.

    --samples: examples per task; 0: all.
    """
    from jkv.eval import harness as backend

    if not tasks:
        raise ValueError("--tasks: name a task of lm-evaluation-harness, such as arc_easy")
    s = setting(o, o.cache, 0, o.batch)
    asked = {"limit": o.samples or None, "num_fewshot": shots, "apply_chat_template": chat}
    asked["include"] = str(include) if include else None
    about = {"question": question, "marker": marker, "chat": chat, "samples": o.samples, "shots": shots}
    found = s.results("harness", tasks, **about, harness=backend.version())
    for cache in s.caches:
        rest = [name for name in tasks if not found.find(cache=cache, task=name)]
        lm = backend.harness(s.params, cache, batch=o.batch, question=question, marker=marker)
        scores, receipts = backend.evaluated(lm, rest, **asked) if rest else ({}, {})
        for name, numbers in scores.items():
            found.add({"cache": cache, "task": name, "metrics": backend.plain(numbers), "receipt": receipts[name]})
        for line in backend.flagged(receipts):
            print(f"{cache}: {line}", file=sys.stderr)
    console.show(backend.table(found.rows))


COMMANDS = (ruler, dataset, niah, multiturn, harness)
