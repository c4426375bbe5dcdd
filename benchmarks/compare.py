"""The full cache beside transformers on the same weights, and beside the hardware: python -m benchmarks.compare"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich import box
from rich.table import Table

from benchmarks.engines import Transformers, largest_difference
from benchmarks.requirements import check_engine
from jkv.bench import environment
from jkv.bench.environment import SEED
from jkv.bench.measure import arithmetic, read_rate, turns, weight_bytes
from jkv.bench.speed import number
from jkv.bench.trials import Jkv
from jkv.cli.app import application, main
from jkv.cli.bench_common import measure, start
from jkv.cli.options import MODEL, Machine, Model, Rounds
from jkv.io import load
from jkv.io.model_source import Source
from jkv.models import ModelConfig, Params, build, read_config

NARROW = "prefill in bfloat16"  # jkv with matrix products in bfloat16; the peer stays in float32


@dataclass(frozen=True)
class Line:
    """One record of the comparison; all times in milliseconds.

    Attributes:
        what: What is timed.
        tokens: Context or prompt length.
        jkv, other: Medians of jkv and transformers.
        jkv_best, other_best: Their fastest trials.
        floor: Lower bound from the hardware's measured rates.
    """

    what: str
    tokens: int
    jkv: float
    other: float
    jkv_best: float
    other_best: float
    floor: float

    @property
    def ratio(self) -> float:
        return self.jkv / self.other


def step_bytes(params: Params, cached: int) -> int:
    """Return the bytes that a float32 decode step must read: every weight, and `cached` tokens of keys and values."""
    c = params.config
    return weight_bytes(params) + cached * c.layers * c.heads * c.cached * 4


def prompt_operations(params: Params, tokens: int) -> int:
    """Return the multiplications and additions of a causal prefill, with the LM head applied to the last token only."""
    c = params.config
    weights = sum(x.size for x in jax.tree.leaves(params.layers))
    attention = 2 * c.heads * c.groups * (c.head_dim + c.value_dim) * c.layers * tokens * (tokens + 1) // 2
    return 2 * weights * tokens + attention + 2 * c.vocab * c.width


def check(model: ModelConfig, lengths: Sequence[int], prompts: Sequence[int], steps: int) -> None:
    """Raise ValueError for lengths beyond the model's context."""
    longest = max([*(n + steps for n in lengths), *prompts])
    if longest > model.context:
        raise ValueError(f"{longest} tokens are asked for and the model's context is {model.context}: give less")


def rows(
    source: Source, lengths: Sequence[int], prompts: Sequence[int], steps: int, rounds: int, threads: int
) -> Iterator[dict[str, Any]]:
    """Yield every record of the comparison as soon as it is measured, with the best hardware rates so far."""
    params = build(source.config, source.tensors, jnp.float32)
    engines = Jkv(params), Transformers(source, threads)
    narrow = Jkv(replace(params, prefill_dtype=jnp.dtype("bfloat16"))), engines[1]
    difference = largest_difference(*engines)
    rng, reads, computes = np.random.default_rng(SEED), 0.0, {NARROW: 0.0, "prefill": 0.0}
    prompted = [(kind, n) for n in prompts for kind in ("prefill", NARROW)]
    for kind, tokens in [("decode", n) for n in lengths] + prompted:
        ids = rng.integers(0, params.config.vocab, (1, tokens))
        both = narrow if kind == NARROW else engines
        a, b = turns([e.decode(ids, steps) if kind == "decode" else e.prefill(ids) for e in both], rounds)
        reads = max(reads, read_rate())
        for x, dtype in ((NARROW, jnp.bfloat16), ("prefill", jnp.float32)):
            computes[x] = max(computes[x], arithmetic(dtype))
        rates = {
            "logits_apart": difference,
            "read_bytes_per_s": reads,
            "operations_per_s": computes.get(kind, computes["prefill"]),
        }
        if kind == "decode":
            floor = step_bytes(params, tokens) / reads
        else:
            floor = prompt_operations(params, tokens) / computes[kind]
        line = Line(kind, tokens, median(a), median(b), min(a), min(b), floor * 1e3)
        yield asdict(line) | {"ratio": line.ratio} | rates


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Format the comparison as a table that also renders as markdown."""
    out = Table("", "jkv ms", "transformers ms", "ratio", "floor ms", "jkv best", "transformers best", box=box.MARKDOWN)
    for x in found:
        numbers = (x["jkv"], x["other"], x["ratio"], x["floor"], x["jkv_best"], x["other_best"])
        unit = "ms/token at" if x["what"] == "decode" else "ms for"
        out.add_row(f"{x['what']}, {unit} {x['tokens']}", *map(number, numbers))
    return out


def compare(
    machine: Machine,
    model: Model = MODEL,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Context tokens before decoding; repeatable. Default: 512, 2048 and 4096."),
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(min=1, help="Prefill lengths; repeatable. Default: 512 and 2048.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decoded tokens per round.")] = 32,
    rounds: Rounds = 5,
) -> None:
    """Compare the full cache with transformers on the same float32 weights, and with this machine's lower bound.

    Prefill is timed with matrix products in float32, as in transformers, and in bfloat16 (--prefill-dtype).
    """
    cores, _ = start((), machine)
    check_engine("transformers")
    lengths, prompts, source = context or [512, 2048, 4096], prompt or [512, 2048], load.read(model)
    check(read_config(source.config), lengths, prompts, steps)
    found = partial(rows, source, lengths, prompts, steps, rounds, cores)
    says = lambda r: f"{r['what']} {r['tokens']}: jkv {r['jkv']:.1f}, transformers {r['other']:.1f} ms"  # noqa: E731
    about = environment.meta(model, cores, dtype="float32", steps=steps, rounds=rounds)
    measure(len(lengths) + 2 * len(prompts), found, says, table, about, machine.out)


app = application(compare)

if __name__ == "__main__":
    main(app)
