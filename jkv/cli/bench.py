"""The `jkv bench` commands and `jkv recommend`. Import jax only where needed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jkv.bench.environment import use_cores
from jkv.cli.bench_common import (
    CONTEXTS,
    Load,
    Setup,
    build,
    load_server,
    measure,
    numbers,
    start,
    subject,
    time_caches,
)
from jkv.cli.options import CACHES, MODEL, Caches, Context, Dtype, Machine, Model, Rounds, Subject, Timed, flat
from jkv.utils import console

if TYPE_CHECKING:
    from jkv.bench.speed import What

CODES = ("int8", "int4", "kivi(bits=2)")

app = typer.Typer(help="Measure speed, bytes and memory of caches on this machine.")

Versus = Annotated[str | None, typer.Option("--vs", metavar="CACHE", help="Alternate rounds with another cache.")]


@app.command()
@flat
def decode(
    o: Timed,
    steps: Annotated[int, typer.Option(min=1, help="Tokens per round, best a multiple of the cache's block.")] = 64,
    vs: Versus = None,
) -> None:
    """Time decode steps after a context: ms per token with percentiles, bytes, and bandwidth relative to a copy."""
    _speed("decode", o, steps, vs)


@app.command()
@flat
def prefill(o: Timed, vs: Versus = None) -> None:
    """Time the prefill of a whole prompt."""
    _speed("prefill", o, 0, vs)


@app.command()
@flat
def flush(o: Timed = Timed(rounds=15)) -> None:
    """Time one flush, which is added to one decode step per block."""
    _speed("flush", o, 0, None)


def _speed(what: What, o: Timed, steps: int, vs: str | None) -> None:
    specs, beside = o.cache or CACHES, [] if vs is None else [vs]
    cores, dtype = start(specs, o, o.dtype)
    from jkv.bench import speed
    from jkv.methods import parse

    try:
        for spec in beside:
            parse(spec)
    except ValueError as error:
        raise ValueError(f"--vs {vs}: {error}; other engines: python -m benchmarks.speed in a checkout") from None
    name, source = subject(o, dtype, 1)
    setup = Setup(name=name, source=source, cores=cores, dtype=dtype)
    peer = None if vs is None else lambda params: speed.Beside(params, vs)
    time_caches(what, o, specs, steps, setup, peer, beside)


@app.command("sampling")
@flat
def drawing(
    machine: Machine,
    vocab: Annotated[
        list[int] | None, typer.Option(min=1, help="Vocabulary size; repeatable. Default: 49152, 128256.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size; repeatable. Default: 1 and 16.")] = None,
    rounds: Rounds = 31,
) -> None:
    """Time sampling, from logits to one token per row: greedy, and with each sampling setting."""
    cores, _ = start((), machine)
    from jkv.bench import environment
    from jkv.bench import sampling as alone

    vocabs, batches = vocab or [49152, 128256], batch or [1, 16]
    says = lambda r: f"{r['sampling']}, {r['vocab']} words, {r['batch']} rows: {r['ms']:.2f} ms"  # noqa: E731
    found, total = partial(alone.rows, vocabs, batches, rounds), len(vocabs) * len(batches) * len(alone.WAYS)
    measure(total, found, says, alone.table, environment.meta("random logits", cores, rounds=rounds), machine.out)


@app.command("compile")
@flat
def compiling(
    o: Subject,
    machine: Machine,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 1024,
    cache: Caches = None,
) -> None:
    """Time the first tokens from a cold start: compiled layer by layer, and as one program."""
    specs = cache or CACHES
    cores, dtype = start(specs, machine, o.dtype)
    from jkv import models
    from jkv.bench import compile as waiting
    from jkv.bench import environment

    name, source = subject(o, dtype)
    waiting.check(specs, context, models.read_config(source.config))
    load = partial(build, o, source, dtype)
    says = lambda r: f"{r['cache']}, {r['how']}: {r['first_s']:.1f} s"  # noqa: E731
    about = environment.meta(name, cores, dtype=dtype, weights=o.weights, context=context)
    measure(2 * len(specs), lambda: waiting.rows(load(), specs, context), says, waiting.table, about, machine.out)


@app.command("weights")
@flat
def forms(
    machine: Machine,
    model: Model = MODEL,
    form: Annotated[
        list[str] | None, typer.Option(help="Weight format: int8, int4, file, bitstack(bytes=...); repeatable.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of texts, each 256 tokens of context and 64 scored.")] = 4,
) -> None:
    """Compare weight formats below 16 bits with float weights, alternating: bytes, KL, ms per token."""
    cores, dtype = start((), machine, None)
    from jkv.bench import environment
    from jkv.bench import weight_formats as kept
    from jkv.eval import corpora
    from jkv.io.load import check_weights, load, read

    asked = [None, *(form or ("int8", "int4", "file"))]
    for x in asked:
        check_weights(x)
    tokenizer = read(model).tokenizer
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer: give a model that reads text")
    texts = corpora.windows(tokenizer.encode(corpora.text("pydoc")), 320, samples, environment.SEED)
    found = partial(kept.rows, lambda x: load(model, dtype, weights=x), asked, texts, 256)
    says = lambda r: f"{r['weights']}: {r['ms']:.1f} ms a token"  # noqa: E731
    about = environment.meta(model, cores, dtype=dtype, corpus="pydoc", prefix=256, rest=64, samples=samples)
    measure(len(asked), found, says, kept.table, about, machine.out)


@app.command("drafts")
@flat
def guesses(
    machine: Machine,
    model: Model = MODEL,
    cache: Annotated[str, typer.Option(help="Cache to decode with.")] = "full",
    drafter: Annotated[list[str] | None, typer.Option(help="Drafter; repeatable. Default: suffix and recycle.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=12, help="Prompts per kind.")] = 3,
    new: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 128,
    rounds: Rounds = 3,
    batch: Annotated[int, typer.Option(min=1, help="With --context: batch size.")] = 1,
    context: Annotated[
        int, typer.Option(min=0, help="Continue texts of this many tokens, instead of the kinds of prompts.")
    ] = 0,
) -> None:
    """Compare speculative with plain decoding, alternating: ms per token and tokens per pass, by kind of text."""
    cores, dtype = start((cache,), machine, None)
    from jkv.bench import environment, speculative
    from jkv.io.load import load
    from jkv.speculative.build import build_drafter

    asked, params = drafter or ["suffix", "recycle"], load(model, dtype)
    if params.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer: give a model that reads text")
    for x in asked:
        build_drafter(x, params)
    found = partial(speculative.rows, params, cache, asked, samples, new, rounds)
    if context:
        found = partial(speculative.long, params, cache, asked, batch, context, new, rounds)
    says = lambda r: f"{r['kind']}, {r['draft']}: {r['speedup']:.2f}x"  # noqa: E731
    how = {"batch": batch, "context": context} if context else {"samples": samples}
    about = environment.meta(model, cores, dtype=dtype, cache=cache, **how, new=new, rounds=rounds)
    measure(len(asked) * (1 if context else len(speculative.KINDS)), found, says, speculative.table, about, machine.out)


@app.command("serve")
@flat
def serving(o: Load) -> None:
    """Start a server and load it: time to first token, ms per token, failed answers, memory."""
    load_server(o)


@app.command()
@flat
def kernel(
    machine: Machine,
    op: Annotated[str, typer.Option(help="Operation: decode_attention.")] = "decode_attention",
    shape: Annotated[str, typer.Option(help="Model shape: llama-3.1-8b, qwen3-8b, ...")] = "llama-3.1-8b",
    cache: Annotated[
        list[str] | None, typer.Option(help=f"Cache whose codec is read; repeatable. Default: {', '.join(CODES)}")
    ] = None,
    context: Context = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    kernels: Annotated[
        list[str] | None, typer.Option(help="Implementation: xla, tpu or gpu; repeatable. Default: all that run here.")
    ] = None,
    vs: Annotated[
        list[str] | None, typer.Option(help="GPU baseline: sdpa (torch) or cudnn (called by jax); repeatable.")
    ] = None,
    rounds: Rounds = 15,
    dtype: Dtype = None,
) -> None:
    """Time one layer's decode attention over quantized KV, compared with dense attention; results are checked first."""
    specs, contexts, versus = cache or CODES, context or CONTEXTS, vs or []
    cores, dtype = start(specs, machine, dtype)
    from jkv import kernels as own
    from jkv import models
    from jkv.bench import environment, model_shapes
    from jkv.bench import kernel as alone

    names = kernels or list(dict.fromkeys(["xla", own.native()]))
    alone.check(op, names, versus)
    model = models.read_config(model_shapes.find(shape))
    total = len(specs) * len(contexts) * (len(names) + len(alone.DENSE) + len(versus))
    found = partial(alone.rows, specs, names, versus, model, contexts, batch=batch, dtype=dtype, rounds=rounds)
    says = lambda r: f"{r['implementation']}, {r['cache']} at {r['context']}: {r['ms']:.3f} ms"  # noqa: E731
    about = environment.meta(shape, cores, operation=op, dtype=dtype, rounds=rounds)
    measure(total, found, says, alone.table, about, machine.out)


@app.command()
@flat
def hardware(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder of hardware.json and hardware.html.")],
    dtype: Dtype = None,
) -> None:
    """Check and time a device in 20 minutes: kernel self-tests, memory bandwidth, attention, decoding of an 8B model.

    Both files are updated after every measurement. The exit code is 1 if anything is wrong or failed.
    """
    cores = use_cores(None)
    from jkv.bench import environment
    from jkv.bench import hardware as asking
    from jkv.io.load import dtype_of

    floats = dtype_of(dtype)
    for name in (asking.FILE, asking.PAGE):
        environment.check_path(out / name)
    size = asking.size_of(floats)
    record = asking.Record(out, environment.meta(size.shape, cores, dtype=floats, size=vars(size)))
    asking.measured(size, floats, record, lambda text: print(text, file=sys.stderr, flush=True))
    if record.problem:
        raise OSError(record.problem)
    print(f"{len(record.rows)} rows: {out / asking.FILE} and {out / asking.PAGE}")
    if not asking.right(record.rows):
        raise typer.Exit(1)


@app.command()
@flat
def growth(
    o: Subject,
    machine: Machine,
    cache: Annotated[
        list[str] | None, typer.Option(help="Cache to measure; repeatable. Default: streaming(budget=256).")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate without --marks.")] = 32768,
    marks: Annotated[
        str | None,
        typer.Option(help="Token counts to measure at, such as 1024,8192. Default: 1024, doubling up to --tokens."),
    ] = None,
    over: Annotated[int, typer.Option(min=16, help="Tokens timed before each mark, 16 at a time.")] = 128,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Plot the result: out.png, .svg, .pdf")] = None,
) -> None:
    """Time decoding and count cache bytes while one text grows, generating every token."""
    specs = cache or ["streaming(budget=256)"]
    cores, dtype = start(specs, machine, o.dtype)
    from jkv import models
    from jkv.bench import environment
    from jkv.bench import long_context as growing
    from jkv.generation import inspect

    if plot is not None:
        inspect.check_path(plot)
    at = numbers(marks) if marks is not None else growing.doubling(tokens, over)
    name, source = subject(o, dtype)
    growing.check(specs, at, over, models.read_config(source.config))
    load = partial(build, o, source, dtype)
    says = lambda r: f"{r['cache']} at {r['tokens']}: {r['ms']:.2f} ms"  # noqa: E731
    about = environment.meta(name, cores, dtype=dtype, weights=o.weights, over=over)
    found = lambda: growing.rows(load(), specs, at, over)  # noqa: E731
    rows = measure(len(specs) * len(at), found, says, growing.table, about, machine.out)
    if plot is not None:
        growing.plot(rows, plot)
        print(f"drawn: {plot}", file=sys.stderr)


def recommend(
    files: Annotated[
        list[str] | None, typer.Argument(help="Result files of jkv eval, instead of those shipped.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model: shape of a public model, or as given to jkv eval.")] = MODEL,
    context: Annotated[int, typer.Option(min=2, help="Context length in tokens, prompt and answer.")] = 8192,
    memory: Annotated[
        str, typer.Option(help="Memory for one sequence's cache, such as 4GiB, or a device: t4, rtx-4090, ...")
    ] = "4GiB",
    results: Annotated[list[str] | None, typer.Option(help="As FILES; repeatable.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List all measured caches.")] = False,
    dtype: Dtype = None,
) -> None:
    """Recommend caches that fit in memory, by measured quality and by the bytes that they take for this model.

    The shipped measurements are of SmolLM2-135M; --results takes those that jkv eval made of your model.
    """
    from jkv import models
    from jkv.aot.size import cache_bytes, human, longer, memory_of
    from jkv.bench import recommend as choosing
    from jkv.bench.model_shapes import config_of
    from jkv.io.load import dtype_of

    limit, kind = memory_of(memory), dtype_of(dtype)
    c = models.read_config(config_of(model))
    full = cache_bytes("full", longer(c, context), context, kind)
    nbytes = partial(cache_bytes, model=c, context=context, dtype=kind)
    if patterns := [*(results or ()), *(files or ())]:
        console.show(choosing.table(choosing.best(patterns, model, nbytes, limit), full, context))
        return
    own, measured = choosing.evidence()
    measured = [x for x in measured if model == own or not choosing.trained(x.cache)]
    if every:
        found = [x for x in choosing.sized(measured, nbytes) if x.nbytes <= limit]
    else:
        found = choosing.answers(measured, nbytes, limit)
    title = f"{model}, {context:,} tokens in {kind}: a full cache takes {human(full)}"
    console.show(choosing.answer_table(found, full, title))
    print(
        "KL to the full cache on prose, in nats; share of later questions answered (full: 0.87), needles found (1.00)."
        f"\nMeasured on {own} after 1,024 or 2,048 tokens; a fixed budget= keeps a smaller part of a longer text."
    )
    if model != own:
        print(f"{model} differs: measure it with jkv eval fidelity --model {model} --text FILE --cache ...")
    if not every:
        print(f"--all lists {len(measured)} caches.")
