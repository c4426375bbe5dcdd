"""The most memory that a process of a job holds after its model is loaded: one process, and one a stage.

python -m benchmarks.stages results/stages.json. SmolLM2-135M in float32; 6 prompts of 1,400 to 1,450 tokens of Python's
manual, 4 rows at once, answers of 32 tokens. Compilers are included.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jkv
from jkv.batch.disaggregated.coordinator import staged
from jkv.batch.job import Job
from jkv.batch.run import Work, run
from jkv.bench.environment import meta
from jkv.eval import corpora
from jkv.methods import parse
from jkv.utils import memory

MODEL, CACHE, BATCH, NEW = "smollm2-135m", "snapkv(budget=256) | int4", 4, 32
LENGTHS = range(1400, 1460, 10)
load = partial(jkv.load, MODEL, "float32")


def ran(divided: bool) -> dict[str, Any]:
    """Bytes at the peak of this process, what its report says of the stages, and the tokens of each row."""
    params = load()
    assert params.tokenizer is not None
    ids = params.tokenizer.encode(corpora.text("pydoc"))
    prompts = [ids[i * 1500 :][:n] for i, n in enumerate(LENGTHS)]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out"
        source.write_text("\n".join(json.dumps({"tokens": x, "max_new_tokens": NEW}) for x in prompts))
        job = Job(source=source, out=out, params=params, config=parse(CACHE), batch=BATCH, shares=False)
        memory.forget_peak()
        report = run(job, lambda: False, lambda *_: None, staged(job, (1, 1), load) if divided else Work.finish)
        rows = [json.loads(x) for path in out.glob("rows-*") for x in path.read_text().splitlines()]
    tokens = [row["tokens"] for row in sorted(rows, key=lambda row: row["line"])]
    return {"peak": memory.peak(), "stages": report.stages, "tokens": tokens}


if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        alone, parts = pool.map(ran, (False, True))
    stages = parts["stages"]
    rows = [{"process": "all", "peak_bytes": alone["peak"]}, {"process": "parent", "peak_bytes": parts["peak"]}]
    rows += [{"process": name, "peak_bytes": stages[name]["peak_bytes"]} for name in ("prefill", "decode")]
    handed = {"handed_bytes": stages["handed"]["file_bytes"] // stages["handed"]["rows"]}
    about = meta(MODEL, 2, dtype="float32", cache=CACHE, batch=BATCH, prompts=list(LENGTHS), new=NEW)
    same = {"same": parts["tokens"] == alone["tokens"]}
    Path(sys.argv[1]).write_text(json.dumps({"meta": about | handed | same, "rows": rows}, indent=1) + "\n")
    print(*rows, handed, same, sep="\n")
