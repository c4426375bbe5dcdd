"""The `jkv bench` commands and `jkv recommend`. Import jax only where needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.bench.environment import use_cores
from jkv.cli.bench_common import PEERS, build, measure, numbers, start, subject
from jkv.cli.options import CACHES, MODEL, Caches, Context, Dtype, Machine, Model, Rounds, Subject, Timed, flat
from jkv.utils import console

if TYPE_CHECKING:
    from jkv.bench.speed import What

CODES = ("int8", "int4", "kivi(bits=2)")
CONTEXTS = (512, 2048)

app = typer.Typer(help="Measure speed, bytes and memory of caches on this machine, also against other engines.")

Versus = Annotated[
    str | None,
    typer.Option(
        "--vs",
        help="Alternate rounds with, on CPU: transformers (full cache) or kvpress (same budget) on the same weights; "
        "llama.cpp on the same .gguf file and its quantized blocks; or another cache.",
    ),
]


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
    specs, contexts = o.cache or (PEERS[vs].caches if vs in PEERS else CACHES), o.context or CONTEXTS
    cores, dtype = start(specs, o, o.dtype, vs)
    from jkv import models
    from jkv.bench import environment, speed

    name, source = subject(o, dtype, vs)
    beside = [vs] if vs and vs not in PEERS else []
    speed.check(what, [*specs, *beside], contexts, steps, models.read_config(source.config))

    def found() -> Iterator[dict[str, Any]]:
        params = build(o, source, dtype)
        peer = speed.peer_of(vs, params, source, cores, dtype)
        return speed.rows(what, params, specs, contexts, batch=o.batch, steps=steps, rounds=o.rounds, peer=peer)

    about = environment.meta(name, cores, timed=speed.TIMED[what], dtype=dtype, weights=o.weights, rounds=o.rounds)
    says = lambda r: f"{what} {r['cache']} at {r['context']}: {r['ms']:.2f} ms"  # noqa: E731
    measure(len(specs) * len(contexts), found, says, partial(speed.table, what), about, o.out)


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
def serving(
    machine: Machine,
    model: Model = MODEL,
    cache: Annotated[
        list[str] | None, typer.Option(help="Cache of the requests; repeat to alternate. Default: full.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent streams.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="Duration of the load.")] = 180,
    new: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Batch size of the server.")] = 8,
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help='Also measure "transformers", followed by options of its `serve`, on the same weights; repeatable.'
        ),
    ] = None,
) -> None:
    """Start a server and load it: time to first token, ms per token, failed answers, memory."""
    specs, peers = cache or ["full"], [x.partition(" ") for x in vs or []]
    if unknown := [name for name, *_ in peers if name != "transformers"]:
        raise ValueError(f"--vs {unknown[0]}: transformers, the only server beside jkv's")
    cores, dtype = start(specs, machine, None, vs="transformers" if peers else None)
    from jkv.bench import environment
    from jkv.bench import serve as under
    from jkv.io.load import read

    # Options of the `jkv serve` process.
    arguments = ["--model", model, "--dtype", dtype, "--port", "0", "--rows", str(rows)]
    arguments += ["--prompt-tokens-limit", "512", "--new-tokens-limit", str(new), "--caches", str(len(set(specs)))]
    arguments += [x for spec in dict.fromkeys(specs) for x in ("--cache", spec)]

    def found() -> Iterator[dict[str, Any]]:
        with under.started(arguments) as (port, pid):
            answers, held, elapsed = under.load(port, pid, model, specs, clients, seconds, new)
            yield {"server": "jkv", "clients": clients, **under.row(answers, held, elapsed)}
        with TemporaryDirectory() as place:
            path = under.folder(read(model), Path(place) / "model") if peers else Path(place)
            for name, _, options in peers:
                with under.beside(path, options, cores) as (port, pid):
                    answers, held, elapsed = under.load(port, pid, str(path), [""], clients, seconds, new, b"")
                yield {"server": f"{name} {options}".strip(), "clients": clients, **under.row(answers, held, elapsed)}

    says = lambda r: f"{r['server']}, {r['clients']} clients: {r['answers']} answers, {r['lost']} lost"  # noqa: E731
    about = environment.meta(model, cores, dtype=dtype, caches=specs, rows=rows, new=new, seconds=seconds)
    measure(1 + len(peers), found, says, under.table, about, machine.out)


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


@app.command()
@flat
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
    cores, _ = start((), machine, vs="transformers")
    from jkv import models
    from jkv.bench import compare as comparing
    from jkv.bench import environment
    from jkv.io.load import read

    lengths, prompts, source = context or [512, 2048, 4096], prompt or [512, 2048], read(model)
    comparing.check(models.read_config(source.config), lengths, prompts, steps)
    found = partial(comparing.rows, source, lengths, prompts, steps, rounds, cores)
    says = lambda r: f"{r['what']} {r['tokens']}: jkv {r['jkv']:.1f}, transformers {r['other']:.1f} ms"  # noqa: E731
    about = environment.meta(model, cores, dtype="float32", steps=steps, rounds=rounds)
    measure(len(lengths) + 2 * len(prompts), found, says, comparing.table, about, machine.out)


@app.command()
@flat
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
    cores, _ = start((cache,), machine, vs="transformers")
    from jkv import models
    from jkv.bench import batch as many
    from jkv.bench import compare as comparing
    from jkv.bench import environment
    from jkv.io.load import read

    heads, source = shared if shared else [0, 512], read(model)
    comparing.check(models.read_config(source.config), [longest + max(heads)], [], new)
    found = partial(many.rows, source, prompts, longest, new, heads, cache, at_once, cores)
    says = lambda r: f"{r['engine']}, {r['shared']} tokens in common: {r['tokens_per_s']:.1f} tokens/s"  # noqa: E731
    about = environment.meta(model, cores, dtype="float32", longest=longest, new=new, cache=cache)
    measure(sum(3 if n else 2 for n in heads), found, says, many.table, about, machine.out)


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
