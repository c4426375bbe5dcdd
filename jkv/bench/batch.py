"""Many ragged prompts: `jkv batch` against a loop of transformers.generate, and against itself without sharing."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

from jkv.batch.job import Job
from jkv.batch.report import Report
from jkv.batch.run import run
from jkv.bench.engines import Transformers
from jkv.bench.environment import SEED
from jkv.bench.speed import number
from jkv.io.model_source import Source
from jkv.methods import parse
from jkv.models import Params, build

TRIED = (1, 4, 8, 16, 32)  # batch sizes of the peer
SAMPLE = 32  # prompts on which its best one is found


@dataclass(frozen=True)
class Prompts:
    """Prompts of random tokens that share their first `shared`, and how many tokens each answer has."""

    shared: int
    tokens: list[list[int]]
    new: list[int]

    def first(self, n: int) -> Prompts:
        return Prompts(self.shared, self.tokens[:n], self.new[:n])


def ragged(count: int, longest: int, new: int, shared: int, vocab: int) -> Prompts:
    """Prompts of `shared` common tokens and longest / 16 to `longest` of their own; answers of new / 4 to `new`."""
    rng = np.random.default_rng(SEED)
    head = rng.integers(0, vocab, shared).tolist()
    own = [rng.integers(0, vocab, rng.integers(max(longest // 16, 1), longest + 1)).tolist() for _ in range(count)]
    return Prompts(shared, [head + x for x in own], rng.integers(max(new // 4, 1), new + 1, count).tolist())


def run_job(params: Params, prompts: Prompts, cache: str, batch: int, shares: bool) -> tuple[Report, list[list[int]]]:
    """One job in a folder of its own: its report and the tokens of each row."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out"
        rows = zip(prompts.tokens, prompts.new, strict=True)
        source.write_text("".join(json.dumps({"tokens": t, "max_new_tokens": n}) + "\n" for t, n in rows))
        job = Job(source=source, out=out, params=params, config=parse(cache), batch=batch, shares=shares)
        report = run(job, lambda: False, lambda *_: None)
        found = [json.loads(x) for path in out.glob("rows-*") for x in path.read_text().splitlines()]
    return report, [row["tokens"] for row in sorted(found, key=lambda row: row["line"])]


def looped(peer: Transformers, prompts: Prompts, batch: int) -> tuple[float, list[list[int]]]:
    """Seconds of transformers.generate over batches in the order of the file, and the tokens of each row.

    A batch runs to the end of its longest answer, as it does there; a row's tokens beyond its own end are not counted.
    """
    torch, out = peer.torch, []
    start = time.perf_counter()
    for i in range(0, len(prompts.tokens), batch):
        rows, new = prompts.tokens[i : i + batch], prompts.new[i : i + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
        with torch.inference_mode():
            got = peer.model.generate(
                ids, attention_mask=mask, max_new_tokens=max(new), do_sample=False, eos_token_id=None, pad_token_id=0
            )
        out.extend(row[longest : longest + n].tolist() for row, n in zip(got, new, strict=True))
    return time.perf_counter() - start, out


def rows(
    source: Source, count: int, longest: int, new: int, shared: Sequence[int], cache: str, batch: int, threads: int
) -> Iterator[dict[str, Any]]:
    """A line for each engine and each length of a common beginning, as soon as it is measured.

    jkv runs twice, and the second run counts: its programs are compiled, and the seconds of that are told apart.
    """
    params = build(source.config, source.tensors, jnp.float32)
    params = replace(params, config=replace(params.config, eos=()))
    peer = Transformers(source, threads)
    for head in shared:
        prompts = ragged(count, longest, new, head, params.config.vocab)
        some, total = prompts.first(SAMPLE), sum(prompts.new)
        tried = [b for b in TRIED if b < 2 * len(some.tokens)]
        best = min(tried, key=lambda b: looped(peer, some, b)[0])
        seconds, theirs = looped(peer, prompts, best)
        about = {"shared": head, "prompts": count, "tokens": total}
        peers = total / seconds
        yield about | {"engine": "transformers", "batch": best, "seconds": seconds, "tokens_per_s": peers, "ratio": 1.0}
        for shares in (True, False) if head else (True,):
            compile_s = run_job(params, prompts, cache, batch, shares)[0].compile_s
            report, ours = run_job(params, prompts, cache, batch, shares)
            yield about | {
                "engine": "jkv batch" if shares else "jkv batch, no sharing",
                "cache": cache,
                "batch": report.batch,
                "seconds": report.seconds,
                "tokens_per_s": report.tokens_per_s,
                "ratio": report.tokens_per_s / peers,
                "compile_s": compile_s,
                "saved": report.saved,
                "cache_bytes": report.cache_bytes,
                "same_rows": sum(a == b for a, b in zip(ours, theirs, strict=True)),
            }


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The comparison as a table that is markdown too."""
    names = ("prompts", "common tokens", "engine", "rows at once", "tokens/s", "ratio", "compiling s", "same rows")
    out = Table(*names, box=box.MARKDOWN)
    for x in found:
        mine = (number(x["compile_s"]), str(x["same_rows"])) if "compile_s" in x else ("-", "-")
        speed = (number(x["tokens_per_s"]), number(x["ratio"]))
        out.add_row(str(x["prompts"]), str(x["shared"]), x["engine"], str(x["batch"]), *speed, *mine)
    return out
