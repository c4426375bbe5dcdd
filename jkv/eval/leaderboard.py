"""kvpress's result format: one folder per cache with config.yaml, metrics.json and predictions.csv."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jkv.eval.kvpress_dataset import DatasetRow
from jkv.eval.results import Results
from jkv.methods.parser import parse
from jkv.utils.json_results import overwrite

SIZES = ("kept", "context", "bytes", "bytes_full")


def by_task(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Convert RULER scores 0..1 to its metrics, in percent.

    >>> by_task({"vt": 0.75})
    {'vt': {'string_match': 75.0}}
    """
    return {task: {"string_match": round(100 * score, 2)} for task, score in sorted(scores.items())}


def task_score(scores: Mapping[str, float]) -> float:
    """Convert the score of a single LongBench task to its metric, in percent."""
    (score,) = scores.values()
    return round(100 * score, 2)


def publish(
    out: Path,
    found: Results,
    asked: Mapping[str, Sequence[DatasetRow]],
    metrics: Callable[[Mapping[str, float]], Any],
    **config: Any,
) -> list[Path]:
    """Write a folder in `out` for each cache and question mode for which all tasks were measured.

    `compression_ratio` is the share of the full cache's bytes that a cache saves, `press_name` the cache's text. If a
    folder exists, a numbered one is made inside, as in kvpress.

    Args:
        out: Folder for the results.
        found: The measured rows.
        asked: Data set rows of each task.
        metrics: Converts the scores by task to kvpress's metrics.
        **config: Values of kvpress's own config fields.

    Returns:
        The folders written.

    Raises:
        OSError: A folder or file cannot be written.
    """
    made, ways = [], dict.fromkeys((row["cache"], row["question"]) for row in found.rows if row.get("task") in asked)
    for cache, question in ways:
        rows = {task: found.find(cache=cache, question=question, task=task) for task in asked}
        if not all(rows.values()):
            continue
        # Compression by task, and the table of predictions.
        some = {task: row for task, row in rows.items() if row is not None}
        gone = {task: 1 - row["bytes"] / row["bytes_full"] for task, row in some.items()}
        ratio = round(sum(gone.values()) / len(gone), 4)
        said = [
            {**row.columns(), "predicted_answer": text, "compression_ratio": round(gone[task], 4)}
            for task in asked
            for row, text in zip(asked[task], some[task]["said"], strict=True)
        ]
        scores = {task.split("/")[-1]: row["score"] for task, row in some.items()}
        # kvpress's config fields; None where they do not apply.
        told = {
            "dataset": None,
            "data_dir": None,
            "model": found.meta["model"],
            "device": None,
            "press_name": cache,
            "compression_ratio": ratio,
            "key_channel_compression_ratio": None,
            "fraction": 1.0,
            "max_new_tokens": None,
            "max_context_length": None,
            "query_aware": question == "seen",
            "needle_depth": None,
            "compression_interval": None,
            "target_size": None,
            "hidden_states_buffer_size": None,
            "output_dir": str(out),
            "log_level": "INFO",
            "model_kwargs": {"dtype": found.meta["dtype"]},
            "press_init_command": f"jkv.parse({cache!r})",
            "seed": found.meta["seed"],
            "fp8": False,
            **config,
            "jkv": {
                "versions": found.meta["versions"],
                "exactness": parse(cache).exactness,
                "held": {task: {name: row[name] for name in SIZES} for task, row in some.items()},
            },
        }
        folder = _fresh(out / _name(told))
        overwrite(folder / "predictions.csv", table(said))
        overwrite(folder / "metrics.json", json.dumps(metrics(scores), indent=4))
        # values in JSON are YAML
        overwrite(folder / "config.yaml", "".join(f"{name}: {json.dumps(x)}\n" for name, x in told.items()))
        made.append(folder)
    return made


def _name(config: Mapping[str, Any]) -> str:
    """Return kvpress's folder name for a config, without characters of the cache's text that file names cannot have."""
    parts = [
        config["dataset"],
        config["data_dir"],
        config["model"].replace("/", "--"),
        re.sub(r"[^\w.=(),-]+", "_", config["press_name"]),
        f"{config['compression_ratio']:.2f}",
        f"fraction{config['fraction']:.3f}" if config["fraction"] < 1 else "",
        f"max_context{config['max_context_length']}" if config["max_context_length"] else "",
        "query_aware" if config["query_aware"] else "",
    ]
    return "__".join(str(x) for x in parts if x)


def _fresh(folder: Path) -> Path:
    """Create the folder, or if it exists the first free one of folder/1, folder/2 ..."""
    at, i = folder, 0
    while True:
        try:
            at.mkdir(parents=True)
            return at
        except FileExistsError:
            i += 1
            at = folder / str(i)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render rows as CSV; lists as Python writes them, missing columns empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
