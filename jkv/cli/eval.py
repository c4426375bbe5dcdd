"""jkv eval ppl | fidelity | ruler | niah | multiturn | report. Imports jax only where a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.cli.options import Dtype, Model
from jkv.host import console

if TYPE_CHECKING:
    from jkv.eval.experiments import Setting
    from jkv.eval.results import Results
    from jkv.models import Params

app = typer.Typer(no_args_is_help=True, help="Quality of caches: perplexity, fidelity, tasks; offline, and resumable.")

Caches = Annotated[list[str] | None, typer.Option("--cache", help="A composition; can be repeated. Default: full.")]
Catalogue = Annotated[bool, typer.Option("--catalogue", help="Every method, at 0.5, 0.25 and 0.125 of the tokens.")]
Corpus = Annotated[str, typer.Option(help="pydoc (prose), stdlib (code), either with :test, a dataset: wikitext, ...")]
Text = Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Your own UTF-8 text instead.")]
Tokens = Annotated[Path | None, typer.Option("--tokens", metavar="FILE.npz", help="int32 [n, prefix + continue].")]
ENDLESS = "streaming(budget=512)"
Prefix = Annotated[int, typer.Option(help="Tokens that are read and compressed.")]
Rest = Annotated[int, typer.Option("--continue", help="Tokens after them that are predicted one by one.")]
Frozen = Annotated[bool, typer.Option("--frozen", help="Compress the prefix only, nothing after it.")]
Samples = Annotated[int, typer.Option(help="Texts, or prompts of each task.")]
Batch = Annotated[int, typer.Option(help="Rows at a time.")]
Seed = Annotated[int, typer.Option(help="Of the texts' places and of the tasks.")]
Out = Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Result file; a re-run goes on where it was.")]
Length = Annotated[int, typer.Option(help="Tokens of a whole prompt.")]
Names = Annotated[list[str] | None, typer.Option("--tasks", help="A task; can be repeated. Default: all.")]
Seen = Annotated[
    str, typer.Option("--question", help="seen: compressed knowing the question; unseen: before it comes; both.")
]


def _setting(
    model: str,
    caches: list[str] | None,
    all_: bool,
    length: int | Callable[[Params], int],
    batch: int,
    path: Any,
    seed: int,
    dtype: str,
) -> Setting:
    """The setting; length: of what is compressed, of which the catalogue takes its shares."""
    from jkv.eval.experiments import Setting, catalogue
    from jkv.io.load import load
    from jkv.methods import parse

    names = list(caches or ([] if all_ else ["full"]))
    for name in names:  # what is wrong is said before anything is loaded
        parse(name)
    if batch < 1:
        raise ValueError(f"batch={batch}: rows at a time, 1 or more")
    params = load(model, dtype)
    if all_:
        names += catalogue(length if isinstance(length, int) else length(params), params)
    return Setting(model, params, list(dict.fromkeys(names)), batch, path, seed)


def _show(found: Results) -> None:
    from jkv.eval.points import points
    from jkv.eval.report import table

    console.show(table(points([("", found.meta, found.rows)])))
    if found.path is not None:
        print(f"written: {found.path}", file=sys.stderr)


def _draw(found: list[tuple[str, Any, list[Any]]], folder: Path) -> None:
    from jkv.eval import report
    from jkv.eval.points import points

    for path in report.draw([row for *_, rows in found for row in rows], points(found), folder):
        print(f"drawn: {path}")


@app.command()
def ppl(
    model: Model = "smollm2-135m",
    cache: Caches = None,
    catalogue: Catalogue = False,
    corpus: Corpus = "pydoc",
    text: Text = None,
    tokens: Tokens = None,
    prefix: Prefix = 2048,
    rest: Rest = 256,
    frozen: Frozen = False,
    samples: Samples = 4,
    batch: Batch = 4,
    seed: Seed = 0,
    out: Out = None,
    dtype: Dtype = "float32",
) -> None:
    """Perplexity of a text's continuation, token by token through the compressed cache of its beginning."""
    from jkv.eval import experiments

    s = _setting(model, cache, catalogue, prefix, batch, out, seed, dtype)
    ids, source = experiments.texts(s.params, corpus, text, tokens, prefix, rest, samples, seed)
    with console.progress(len(s.caches)) as say:
        found = experiments.perplexity(s, ids, source, prefix, frozen, say)
    _show(found)


@app.command()
def fidelity(
    model: Model = "smollm2-135m",
    cache: Caches = None,
    catalogue: Catalogue = False,
    corpus: Corpus = "pydoc",
    text: Text = None,
    tokens: Tokens = None,
    prefix: Prefix = 1024,
    rest: Rest = 128,
    frozen: Frozen = False,
    layers: Annotated[bool, typer.Option("--layers", help="Also compress one layer at a time.")] = False,
    samples: Samples = 4,
    batch: Batch = 4,
    seed: Seed = 0,
    out: Out = None,
    dtype: Dtype = "float32",
) -> None:
    """KL to the full cache, top-1 agreement, first divergence, attention kept; which layers to spare."""
    from jkv.eval import experiments

    s = _setting(model, cache, catalogue, prefix, batch, out, seed, dtype)
    ids, source = experiments.texts(s.params, corpus, text, tokens, prefix, rest, samples, seed)
    with console.progress(len(s.caches)) as say:
        found = experiments.fidelity(s, ids, source, prefix, frozen, layers, say)
    _show(found)
    for row in found.rows:
        if "spare" in row:
            print(f"{row['cache']}: spare layers {row['spare'] or 'none'}")


@app.command()
def endless(
    model: Model = "smollm2-135m",
    cache: Annotated[list[str] | None, typer.Option(help=f"Can be repeated. Default: {ENDLESS}.")] = None,
    corpus: Corpus = "stdlib",
    text: Text = None,
    tokens: Tokens = None,
    length: Annotated[int, typer.Option(help="Tokens of the text, as many as you like.")] = 100_000,
    points: Annotated[int, typer.Option(help="Places where it is measured, the first after --prefix tokens.")] = 11,
    prefix: Prefix = 1024,
    rest: Rest = 256,
    seed: Seed = 0,
    out: Out = None,
    dtype: Dtype = "float32",
) -> None:
    """Perplexity ever farther into one text, beside that of the same tokens after the few before them alone."""
    from jkv.eval import experiments

    s = _setting(model, cache or [ENDLESS], False, prefix, 1, out, seed, dtype)
    ids, source = experiments.texts(s.params, corpus, text, tokens, prefix, length - prefix, 1, seed, endless=True)
    with console.progress(len(s.caches) * points) as say:
        found = experiments.endless(s, ids[0], source, points, prefix, rest, say)
    for row in found.rows:
        print(
            f"{row['cache']} after {row['after']:,}: perplexity {row['ppl']:.3f}, fresh {row['fresh']:.3f}; "
            f"{row['bytes']:,} bytes"
        )


@app.command()
def attention(
    model: Model = "smollm2-135m",
    cache: Caches = None,
    corpus: Corpus = "pydoc",
    text: Text = None,
    tokens: Tokens = None,
    prefix: Prefix = 2048,
    rest: Rest = 64,
    spared: Annotated[int, typer.Option(help="First layers to leave out of the mean.")] = 2,
    samples: Samples = 4,
    batch: Batch = 4,
    seed: Seed = 0,
    out: Out = None,
    dtype: Dtype = "float32",
) -> None:
    """The share of the full model's attention that each step of a cache reads: what eviction or selection leaves."""
    from jkv.eval import experiments

    s = _setting(model, cache, False, prefix, batch, out, seed, dtype)
    if not 0 <= spared < s.params.config.layers:
        raise ValueError(f"--spared {spared}: 0 or more, and fewer than the model's {s.params.config.layers} layers")
    ids, source = experiments.texts(s.params, corpus, text, tokens, prefix, rest, samples, seed)
    with console.progress(len(s.caches)) as say:
        found = experiments.attention(s, ids, source, prefix, spared, say)
    for row in found.rows:
        print(f"{row['cache']}: {row['recovered']:.4f} of the attention in {row['tokens_read']:.0f} tokens")


def _asked(question: str) -> list[bool]:
    ways = {"seen": [True], "unseen": [False], "both": [True, False]}
    if question not in ways:
        raise ValueError(f"--question {question}: seen, unseen or both")
    return ways[question]


@app.command()
def ruler(
    model: Model = "smollm2-135m",
    cache: Caches = None,
    catalogue: Catalogue = False,
    task: Names = None,
    length: Length = 1024,
    samples: Samples = 4,
    question: Seen = "seen",
    batch: Batch = 4,
    seed: Seed = 0,
    out: Out = None,
    dtype: Dtype = "float32",
) -> None:
    """The 13 RULER tasks (2404.06654) in our own words, generated offline."""
    from jkv.eval import experiments, tasks

    names = task or [t.name for t in tasks.TASKS.values() if t.suite == "ruler"]
    for name in names:
        tasks.find(tasks.TASKS, name)
    s, seen = _setting(model, cache, catalogue, length, batch, out, seed, dtype), _asked(question)
    with console.progress(len(s.caches) * len(names) * len(seen)) as say:
        found = experiments.ruler(s, names, length, samples, seen, say)
    _show(found)


@app.command()
def niah(
    model: Model = "smollm2-135m",
    cache: Caches = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens; can be repeated. Default: 512, 1024.")] = None,
    depths: Annotated[int, typer.Option(help="Even depths from start to end.")] = 5,
    samples: Samples = 1,
    question: Seen = "seen",
    batch: Batch = 4,
    seed: Seed = 0,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the heat maps.")] = None,
    dtype: Dtype = "float32",
) -> None:
    """Needle in a haystack: a grid of lengths and depths, and its heat map."""
    from jkv.eval import experiments

    if depths < 2:
        raise ValueError(f"depths={depths}: 2 or more, the start and the end are the first two")
    s = _setting(model, cache, False, 1024, batch, out, seed, dtype)
    lengths, places = length or [512, 1024], [i / (depths - 1) for i in range(depths)]
    seen = _asked(question)
    with console.progress(len(s.caches) * len(lengths) * depths * len(seen)) as say:
        found = experiments.needle(s, lengths, places, samples, seen, say)
    _show(found)
    if plot is not None:
        _draw([("", found.meta, found.rows)], plot)


@app.command()
def multiturn(
    model: Model = "smollm2-135m",
    cache: Caches = None,
    catalogue: Catalogue = False,
    task: Names = None,
    length: Length = 1536,
    mode: Annotated[
        list[str] | None, typer.Option(help="reused, turns, rebuilt; can be repeated. Default: all.")
    ] = None,
    samples: Samples = 2,
    batch: Annotated[int, typer.Option(help="Questions of a session at a time.")] = 6,
    seed: Seed = 0,
    out: Out = None,
    dtype: Dtype = "float32",
) -> None:
    """Several questions about one context in the manner of SCBench (2412.10319), and one that has no answer."""
    from jkv.eval import experiments, shared, tasks

    names, modes = task or list(shared.SESSIONS), mode or ["reused", "turns", "rebuilt"]
    for name in names:
        tasks.find(shared.SESSIONS, name)
    if unknown := [m for m in modes if m not in ("reused", "turns", "rebuilt")]:
        raise ValueError(f"--mode {unknown[0]}: reused, turns or rebuilt")

    def held(params: Params) -> int:
        return experiments.context(params, names, length, samples, seed)

    s = _setting(model, cache, catalogue, held, batch, out, seed, dtype)
    with console.progress(len(s.caches) * len(names) * len(modes)) as say:
        found = experiments.multiturn(s, names, length, samples, modes, say)
    _show(found)


@app.command()
def report(
    files: Annotated[list[str], typer.Argument(help="Result files of these commands.")],
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw quality against bytes and time.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="One page to explore; it needs no network.")] = None,
) -> None:
    """One table of result files, their pictures, and a page to explore them."""
    from jkv.eval.points import load, points
    from jkv.eval.report import table

    found = load(files)
    if not (measured := points(found)):
        raise ValueError("these files have no rows yet: run jkv eval first")
    console.show(table(measured))
    if plots is not None:
        _draw(found, plots)
    if html is not None:
        from jkv.eval import page

        page.write(measured, html)
        print(f"written: {html}")
