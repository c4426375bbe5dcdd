"""A job whose prompts share 512 tokens: held once, beside a copy in each row.

python -m benchmarks.shared_prefix results/common.json. SmolLM2-135M in float32; 64 prompts of 512 common tokens and 16
to 64 of their own, 64 answers of 64 tokens, 32 rows at once. Each job runs twice, and the second counts: it compiles
nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jkv
from benchmarks.batch import ragged
from jkv.batch.job import Job
from jkv.batch.run import run
from jkv.bench.environment import meta
from jkv.methods import parse

SHARED, OWN, NEW, PROMPTS, ROWS = 512, 64, 64, 64, 32


class Copies(Job):
    """A job whose rows each hold their own beginning."""

    def grain(self, rows: Sequence[Any]) -> None:
        return None


def ran(kind: type[Job], params: jkv.models.Params, cache: str) -> tuple[dict[str, Any], list[list[int]]]:
    """Speed and memory of a job, and the tokens of each row."""
    prompts = ragged(PROMPTS, OWN, NEW, SHARED, params.config.vocab)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out"
        rows = [json.dumps({"tokens": x, "max_new_tokens": NEW}) for x in prompts.tokens]
        source.write_text("\n".join(rows))
        job = kind(source=source, out=out, params=params, config=parse(cache), batch=ROWS)
        report = run(job, lambda: False, lambda *_: None)
        found = [json.loads(x) for path in out.glob("rows-*") for x in path.read_text().splitlines()]
    about = {"tokens_per_s": report.tokens_per_s, "cache_bytes": report.cache_bytes, "compile_s": report.compile_s}
    return about, [row["tokens"] for row in sorted(found, key=lambda row: row["line"])]


if __name__ == "__main__":
    params = jkv.load("smollm2-135m", "float32")
    params = replace(params, config=replace(params.config, eos=()))
    about = meta("smollm2-135m", os.cpu_count() or 1, dtype="float32", shared=SHARED, prompts=PROMPTS, batch=ROWS)
    rows: list[dict[str, Any]] = []
    for cache in ("full", "int8", "int4"):
        for kind in (Copies, Job):
            ran(kind, params, cache)
        (copies, tokens), (once, same) = (ran(kind, params, cache) for kind in (Copies, Job))
        equal = sum(a == b for a, b in zip(tokens, same, strict=True))
        rows += [
            {"cache": cache, "held": "a copy a row", **copies},
            {"cache": cache, "held": "once", **once, "same": equal},
        ]
        print(*rows[-2:], sep="\n", flush=True)
        Path(sys.argv[1]).write_text(json.dumps({"meta": about, "rows": rows}, indent=1) + "\n")
