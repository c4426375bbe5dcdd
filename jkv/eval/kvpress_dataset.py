"""Data set files in kvpress's format.

RULER (`simonjegou/ruler`) and LongBench (`Xnhyacinth/LongBench`) are supported. A row has the columns context,
question, answer_prefix, answer (or answers), task and max_new_tokens; LongBench's also all_classes. Prompts and scores
are those of kvpress, so that numbers are comparable with its leaderboard.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jkv.eval import quality, tasks
from jkv.eval.experiments import Say, Setting
from jkv.eval.results import Results
from jkv.eval.tasks import longbench
from jkv.eval.tasks.registry import Example, string_match_all, string_match_part
from jkv.io.tokenizer import Chat
from jkv.methods.parser import parse
from jkv.models import Params
from jkv.utils.optional_deps import install

TEXTS = ("context", "question", "answer_prefix", "task")
RULER = ("niah", "vt", "cwe", "fwe", "qa")  # prefixes of its task names
KINDS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class DatasetRow:
    """A row of a data set.

    Attributes:
        context: The text to compress.
        question: The question about it.
        answer_prefix: Start of the answer, which the prompt ends with.
        task: Name of the task.
        max_new_tokens: Most tokens of an answer.
        answers: Right answers.
        classes: Class names of a classification task.
    """

    context: str
    question: str
    answer_prefix: str
    task: str
    max_new_tokens: int
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()

    @property
    def suite(self) -> str:
        """Name of the suite: "longbench" or "ruler"."""
        return "longbench" if self.task in longbench.METRICS else "ruler"

    def columns(self) -> dict[str, Any]:
        """Return the row's columns for a table of predictions."""
        right = "answers" if self.suite == "longbench" else "answer"
        more = {"all_classes": list(self.classes)} if self.classes else {}
        return {
            "question": self.question,
            "answer_prefix": self.answer_prefix,
            right: list(self.answers),
            **more,
            "task": self.task,
            "max_new_tokens": self.max_new_tokens,
        }

    def score(self, prediction: str) -> float:
        """Score a prediction from 0 to 1 as kvpress 0.5.5 scores the task."""
        if self.suite == "longbench":
            return longbench.score(self.task, prediction, self.answers, self.classes)
        said = re.sub(r"[\x00-\x1f]", "", prediction.strip()).strip()
        part = self.task.split("_")[0] == "qa"
        return (string_match_part if part else string_match_all)(said, self.answers)

    def ids(self, params: Params, length: int | None) -> quality.Prompt:
        """Tokenize the context, cut to its first `length` tokens, and the rest of the prompt, as kvpress does."""
        tokenizer = params.tokenizer
        if tokenizer is None:
            raise ValueError("tasks need a tokenizer: this model was built without one")
        head, after = self.context, "\n"
        if tokenizer.template is not None:
            mark = "#" * (len(self.context) + 10)
            said = [{"role": "user", "content": self.context + mark}]
            head, after = map(Chat, tokenizer.chat(said, enable_thinking=False).split(mark))
        rest = tokenizer.within(self.question + after + self.answer_prefix)
        return tokenizer.encode(head)[:length], rest


# ------------------------------------------------------------------------------------------------------------ files


def read(path: Path) -> list[DatasetRow]:
    """Load the rows of a file, or of all files in a folder: JSON lines, a JSON list, CSV or Parquet.

    Parquet needs the extra datasets. Raises ValueError that names the file and row if something is missing or wrong.
    """
    files = sorted(x for x in path.rglob("*") if x.suffix in KINDS) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no file there ends in {', '.join(KINDS)}")
    out = []
    for file in files:
        try:
            found = list(_rows(file))
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror or error}") from error
        except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
            raise ValueError(f"{file} is no {file.suffix[1:].upper() or 'file of rows'}: {error}") from error
        out += [_asked(row, f"{file}, row {i}") for i, row in enumerate(found)]
    if not out:
        raise ValueError(f"{path} has no rows")
    return out


def _rows(file: Path) -> Iterable[Any]:
    if file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError(f"{file}: Parquet needs the package datasets; {install('datasets')}") from error
        return parquet.read_table(file).to_pylist()
    text = file.read_text("utf-8-sig")
    if file.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)
        return csv.DictReader(text.splitlines(keepends=True))
    if file.suffix == ".json":
        if not isinstance(rows := json.loads(text), list):
            raise ValueError(f"{file} holds a {type(rows).__name__}, and should hold a list of rows: [{{...}}, ...]")
        return rows
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _asked(row: Any, where: str) -> DatasetRow:
    right = "answers" if isinstance(row, dict) and "answers" in row else "answer"
    wanted = (*TEXTS, right, "max_new_tokens")
    if not isinstance(row, dict) or (missing := [name for name in wanted if row.get(name) is None]):
        lacks = "is no row of columns" if not isinstance(row, dict) else f"has no {missing[0]}"
        raise ValueError(
            f"{where} {lacks}; a row has {', '.join(wanted)}, as simonjegou/ruler and Xnhyacinth/LongBench have"
        )
    # A known task and usable answers.
    answers, task = _texts(row[right]), str(row["task"])
    if task not in longbench.METRICS and task.split("_")[0] not in RULER:
        raise ValueError(
            f"{where} is of the task {task!r}, and scores are known of RULER's ({', '.join(RULER)}) and of LongBench's "
            f"English ones ({', '.join(longbench.METRICS)})"
        )
    blank = task not in longbench.METRICS and not all(x.strip() for x in answers or ())  # "" is in every prediction
    if not answers or blank:
        said = f"its {right} is {row[right]!r}"
        raise ValueError(f"{where}: {said}, and should be texts, none empty, in CSV a list of them")
    if not str(row["max_new_tokens"]).isdecimal() or int(row["max_new_tokens"]) < 1:
        raise ValueError(f"{where}: its max_new_tokens is {row['max_new_tokens']!r}, and should be 1 or more")
    told = row.get("all_classes")
    if (classes := _texts(told or [])) is None:
        raise ValueError(f"{where}: its all_classes is {told!r}, and should be texts, in CSV a list of them")
    if longbench.METRICS.get(task) is longbench.METRICS["trec"] and not classes:
        raise ValueError(f"{where} has no all_classes, the names that {task} chooses from")
    said = {name: str(row[name]) for name in TEXTS}
    return DatasetRow(**said, max_new_tokens=int(row["max_new_tokens"]), answers=answers, classes=classes)


def _texts(value: Any) -> tuple[str, ...] | None:
    """Convert a list of texts, one text, or the text of a list to a tuple; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _list(value)
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        return None
    return tuple(value)


def _list(text: str) -> Any:
    """Parse a list written as JSON or as Python's repr; None for anything else."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        told = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return told if text == repr(told) else None  # rejects "['a' 'b']", numpy's two texts, which Python parses as one


# -------------------------------------------------------------------------------------------------------- experiment


def ask(s: Setting, asked: Sequence[DatasetRow], length: int | None, seen: Sequence[bool], say: Say) -> Results:
    """Generate and score the answers of a data set, one row per cache, task and question mode.

    `said` in a row has all answers, each of at most its `max_new_tokens`.

    Args:
        s: Shared settings.
        asked: The rows of the data set.
        length: Tokens that contexts are cut to, dropping their ends; None leaves them whole.
        seen: Question modes: True compresses the question with the context, False only the context.
        say: Progress callback.

    Raises:
        ValueError: A prompt exceeds the model's context.
    """
    by_task = grouped(asked)
    prompts = {task: [row.ids(s.params, length) for row in rows] for task, rows in by_task.items()}
    # Check the longest prompt before anything runs.
    whole = max(
        len(head) + len(rest) + row.max_new_tokens
        for task, some in prompts.items()
        for (head, rest), row in zip(some, by_task[task], strict=True)
    )
    longest = max(len(head) for some in prompts.values() for head, _ in some)
    most = s.params.config.context
    if whole > most and not all(parse(cache).unlimited for cache in s.caches):
        raise ValueError(
            f"a context of {longest} tokens with its question and answer has up to {whole}, and the model's context "
            f"is {most}: give --length {max(longest - (whole - most), 1)}, which cuts the ends of contexts, or another "
            "model"
        )
    found = s.results("dataset", [*map(repr, asked)], length=longest, cut=length)

    def run(config: Any, key: dict[str, Any]) -> dict[str, Any]:
        task, aware = key["task"], key["question"] == "seen"
        rows, cost = by_task[task], []
        answers = [""] * len(rows)
        for new in sorted({row.max_new_tokens for row in rows}):
            same = [i for i, row in enumerate(rows) if row.max_new_tokens == new]
            texts, held = quality.answer(s.params, config, [prompts[task][i] for i in same], new, aware, s.batch)
            cost += held
            for i, text in zip(same, texts, strict=True):
                answers[i] = text
        got = [row.score(text) for row, text in zip(rows, answers, strict=True)]
        about = {"score": round(float(np.mean(got)), 6), "samples": len(got)}
        return {**about, **vars(quality.mean(cost)), "said": answers}

    ways = ["seen" if x else "unseen" for x in seen]
    s.each(found, say, [{"task": name, "question": way} for name in by_task for way in ways], run)
    return found


def grouped(asked: Sequence[DatasetRow]) -> dict[str, list[DatasetRow]]:
    """Group rows by task, keyed by the task's name in result files.

    >>> list(grouped([DatasetRow("", "", "", name, 1, ("x",)) for name in ("vt", "qasper", "vt")]))
    ['ruler/vt', 'longbench/qasper']
    """
    out: dict[str, list[DatasetRow]] = {}
    for row in asked:
        out.setdefault(f"{row.suite}/{row.task}", []).append(row)
    return out


def generated(made: Mapping[str, Sequence[Example]]) -> dict[str, list[DatasetRow]]:
    """Convert the prompts of `experiments.drawn` to data set rows by task."""
    out = {}
    for name, some in made.items():
        task = name.split("/")[1]
        new = tasks.TASKS[task].new
        out[name] = [DatasetRow(e.context, e.question, e.prefix, task, new, e.answers) for e in some]
    return out


def first(asked: Sequence[DatasetRow], samples: int, tasks: Sequence[str]) -> list[DatasetRow]:
    """Return the first `samples` rows of each task.

    Args:
        asked: All rows.
        samples: Rows per task; 0 for all.
        tasks: Tasks to keep; empty for all.

    Raises:
        ValueError: A task does not occur, or `samples` is negative.

    >>> rows = [DatasetRow("", "", "", name, 1, ("x",)) for name in ("vt", "cwe", "vt", "vt")]
    >>> [row.task for row in first(rows, 2, [])], len(first(rows, 0, ["vt"]))
    (['vt', 'cwe', 'vt'], 3)
    """
    if samples < 0:
        raise ValueError(f"samples={samples}: rows of a task, 1 or more, or 0 for all")
    there = list(dict.fromkeys(row.task for row in asked))
    if missing := [task for task in tasks if task not in there]:
        raise ValueError(f"no task {missing[0]!r} there: {', '.join(there)}")
    count: dict[str, int] = dict.fromkeys(tasks or there, 0)
    out = []
    for row in asked:
        if row.task in count and (not samples or count[row.task] < samples):
            count[row.task] += 1
            out.append(row)
    return out
