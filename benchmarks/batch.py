"""Batch throughput on ragged prompts: `jkv batch` and a loop of transformers: python -m benchmarks.batch"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import typer
from rich import box
from rich.table import Table

from benchmarks import compare
from benchmarks.engines import Transformers
from benchmarks.requirements import check_engine
from jkv.batch.job import Job
from jkv.batch.report import Report
from jkv.batch.run import run
from jkv.bench.environment import SEED, meta
from jkv.bench.speed import number
from jkv.cli.app import application, main
from jkv.cli.bench_common import measure, start
from jkv.cli.options import MODEL, Machine, Model
from jkv.io.load import read
from jkv.io.model_source import Source
from jkv.methods import parse
from jkv.models import Params, build, read_config

TRIED = (1, 4, 8, 16, 32)  # batch sizes tried for the peer
SAMPLE = 32  # prompts for choosing its batch size


@dataclass(frozen=True)
class Prompts:
    """Prompts of random tokens with a shared prefix.

    Attributes:
        shared: Tokens of the shared prefix.
        tokens: Token ids of each prompt.
        new: Tokens to generate for each prompt.
    """

    shared: int
    tokens: list[list[int]]
    new: list[int]

    def first(self, n: int) -> Prompts:
        return Prompts(self.shared, self.tokens[:n], self.new[:n])


def ragged(count: int, longest: int, new: int, shared: int, vocab: int) -> Prompts:
    """Draw prompts of `shared` common plus longest / 16 to `longest` own tokens; answers have new / 4 to `new`."""
    rng = np.random.default_rng(SEED)
    head = rng.integers(0, vocab, shared).tolist()
    own = [rng.integers(0, vocab, rng.integers(max(longest // 16, 1), longest + 1)).tolist() for _ in range(count)]
    return Prompts(shared, [head + x for x in own], rng.integers(max(new // 4, 1), new + 1, count).tolist())


def run_job(params: Params, prompts: Prompts, cache: str, batch: int, shares: bool) -> tuple[Report, list[list[int]]]:
    """Run one batch job in a temporary folder; return its report and the tokens of each row."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out"
        rows = zip(prompts.tokens, prompts.new, strict=True)
        source.write_text("".join(json.dumps({"tokens": t, "max_new_tokens": n}) + "\n" for t, n in rows))
        job = Job(source=source, out=out, params=params, config=parse(cache), batch=batch, shares=shares)
        report = run(job, lambda: False, lambda *_: None)
        found = [json.loads(x) for path in out.glob("rows-*") for x in path.read_text().splitlines()]
    return report, [row["tokens"] for row in sorted(found, key=lambda row: row["line"])]


def looped(peer: Transformers, prompts: Prompts, batch: int) -> tuple[float, list[list[int]]]:
    """Time transformers.generate over batches in file order. Returns the seconds, and the tokens of each row.

    A batch runs until its longest answer ends, as usual in transformers; tokens beyond a row's own end are not counted.
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
    """Yield a record for each engine and each length of the shared prefix, as soon as it is measured.

    jkv runs twice and the second run counts, when all programs are compiled; compile seconds are reported separately.
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
    """Format the comparison as a table that also renders as markdown."""
    names = ("prompts", "common tokens", "engine", "rows at once", "tokens/s", "ratio", "compiling s", "same rows")
    out = Table(*names, box=box.MARKDOWN)
    for x in found:
        mine = (number(x["compile_s"]), str(x["same_rows"])) if "compile_s" in x else ("-", "-")
        speed = (number(x["tokens_per_s"]), number(x["ratio"]))
        out.add_row(str(x["prompts"]), str(x["shared"]), x["engine"], str(x["batch"]), *speed, *mine)
    return out


def batch(
    machine: Machine,
    model: Model = MODEL,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 200,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt, after the shared prefix.")] = 256,
    new: Annotated[int, typer.Option(min=1, help="Tokens of the longest answer.")] = 64,
    shared: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Tokens of the shared prefix; repeatable. Default: 0 and 512."),
    ] = None,
    cache: Annotated[str, typer.Option(help="Cache to decode with.")] = "full",
    at_once: Annotated[int, typer.Option("--batch", min=1, help="Batch size of jkv.")] = 32,
) -> None:
    """Compare jkv batch on ragged prompts with a loop of transformers.generate at its best batch size."""
    cores, _ = start((cache,), machine)
    check_engine("transformers")
    heads, source = shared or [0, 512], read(model)
    compare.check(read_config(source.config), [longest + max(heads)], [], new)
    found = partial(rows, source, prompts, longest, new, heads, cache, at_once, cores)
    says = lambda r: f"{r['engine']}, {r['shared']} tokens in common: {r['tokens_per_s']:.1f} tokens/s"  # noqa: E731
    about = meta(model, cores, dtype="float32", longest=longest, new=new, cache=cache)
    measure(sum(3 if n else 2 for n in heads), found, says, table, about, machine.out)


app = application(batch)

if __name__ == "__main__":
    main(app)
