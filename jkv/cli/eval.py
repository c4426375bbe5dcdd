"""The `jkv eval` commands: quality of caches, one command per experiment. Import jax only where needed."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.cli import eval_tasks
from jkv.cli.eval_common import Catalogue, drawn, setting, show
from jkv.cli.options import MODEL, Compared, Measured, Text, flat
from jkv.cli.weight_formats import weights
from jkv.utils import console

if TYPE_CHECKING:
    from jkv.eval.experiments import Setting
    from jkv.eval.results import Results

app = typer.Typer(
    no_args_is_help=True, help="Measure the quality of caches: perplexity, fidelity, tasks. Offline and resumable."
)
app.command()(weights)

ENDLESS = "streaming(budget=512)"
Frozen = Annotated[bool, typer.Option("--frozen", help="Compress only the prefix.")]
Layers = Annotated[bool, typer.Option("--layers", help="Also measure each layer compressed alone.")]


def _texts(s: Setting, text: Text, rest: int, samples: int, endless: bool = False) -> tuple[Any, Any]:
    """Return token ids of `samples` texts with `text.prefix` + `rest` tokens each, and the name of their source."""
    from jkv.eval import experiments

    return experiments.texts(
        s.params, text.corpus, text.text, text.tokens, text.prefix, rest, samples, s.seed, endless=endless
    )


def _spare(found: Results) -> None:
    """Print which layers to exclude from compression, for rows measured layer by layer."""
    for row in found.rows:
        if "spare" in row:
            print(f"{row['cache']}: spare layers {row['spare'] or 'none'}")


@app.command()
@flat
def ppl(o: Compared, text: Text, catalogue: Catalogue = False, frozen: Frozen = False) -> None:
    """Measure perplexity of a text's continuation, decoded token by token after its compressed prefix."""
    from jkv.eval import experiments

    s = setting(o, o.cache, text.prefix, o.batch, catalogue)
    ids, source = _texts(s, text, text.rest, o.samples)
    with console.progress(len(s.caches)) as say:
        found = experiments.perplexity(s, ids, source, text.prefix, frozen, say)
    show(found)


@app.command()
@flat
def fidelity(
    o: Compared,
    text: Text = Text(prefix=1024, rest=128),
    catalogue: Catalogue = False,
    frozen: Frozen = False,
    layers: Layers = False,
) -> None:
    """Compare with the full cache: KL, top-1 agreement, first divergence, attention kept; layers to exclude."""
    from jkv.eval import experiments

    s = setting(o, o.cache, text.prefix, o.batch, catalogue)
    ids, source = _texts(s, text, text.rest, o.samples)
    with console.progress(len(s.caches)) as say:
        found = experiments.fidelity(s, ids, source, text.prefix, frozen, layers, say)
    show(found)
    _spare(found)


@app.command()
@flat
def codecs(o: Compared, text: Text = Text(prefix=128, rest=896), layers: Layers = False) -> None:
    """Measure the loss of codecs in one forward pass each, where every token attends to dequantized KV."""
    from jkv.eval import experiments

    s = setting(o, o.cache, text.prefix)
    ids, source = _texts(s, text, text.rest, o.samples)
    with console.progress(len(s.caches)) as say:
        found = experiments.codecs(s, ids, source, text.prefix, layers, say)
    for row in found.rows:
        k, v = row["bits"]
        print(f"{row['cache']}: {k:.3g} and {v:.3g} bits, KL {row['kl']:.4g}, perplexity {row['ppl']:.3f}")
    _spare(found)


@app.command()
@flat
def spare(o: Compared = Compared(samples=1), text: Text = Text(prefix=128, rest=128)) -> None:
    """Propose exact_layers= for a cache: one pass over a short text finds layers that quantization hurts most."""
    from jkv.eval import experiments

    if not o.cache:
        raise ValueError("--cache: name a cache whose codes are to be tried, such as int4")
    s = setting(o, o.cache, text.prefix)
    ids, source = _texts(s, text, text.rest, o.samples)
    with console.progress(len(s.caches)) as say:
        found = experiments.spare(s, ids, source, text.prefix, say)
    for row in found.rows:
        costs, out = row["moved"], row["spare"]
        most = max(range(len(costs)), key=costs.__getitem__)
        told, middle = f"write exact_layers={out}" if out else "no layer stands out", median(costs)
        times = f", {costs[most] / middle:.1f} times the median" if middle else ""
        print(f"{row['cache']}: {told} (layer {most} is moved most{times})")


@app.command()
@flat
def endless(
    o: Measured,
    cache: Annotated[list[str] | None, typer.Option(help=f"Cache to measure; repeatable. Default: {ENDLESS}.")] = None,
    text: Text = Text(corpus="stdlib", prefix=1024),
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 100_000,
    points: Annotated[
        int, typer.Option(help="Number of positions to measure at, the first after --prefix tokens.")
    ] = 11,
) -> None:
    """Measure perplexity along one long text, compared with the same tokens given only a short context."""
    from jkv.eval import experiments

    s = setting(o, cache or [ENDLESS], text.prefix)
    ids, source = _texts(s, text, length - text.prefix, 1, endless=True)
    with console.progress(len(s.caches) * points) as say:
        found = experiments.endless(s, ids[0], source, points, text.prefix, text.rest, say)
    for row in found.rows:
        print(
            f"{row['cache']} after {row['after']:,}: perplexity {row['ppl']:.3f}, fresh {row['fresh']:.3f}; "
            f"{row['bytes']:,} bytes"
        )


@app.command()
@flat
def attention(
    o: Compared,
    text: Text = Text(rest=64),
    spared: Annotated[int, typer.Option(help="First layers to leave out of the mean.")] = 2,
) -> None:
    """Measure the share of full attention that each decode step still reads after eviction or selection."""
    from jkv.eval import experiments

    s = setting(o, o.cache, text.prefix, o.batch)
    _check_spared(s, spared)
    ids, source = _texts(s, text, text.rest, o.samples)
    with console.progress(len(s.caches)) as say:
        found = experiments.attention(s, ids, source, text.prefix, spared, say)
    for row in found.rows:
        print(f"{row['cache']}: {row['recovered']:.4f} of the attention in {row['tokens_read']:.0f} tokens")


@app.command()
@flat
def picks(
    o: Compared,
    text: Text = Text(rest=16),
    spared: Annotated[int, typer.Option(help="First layers to leave out of the mean.")] = 2,
) -> None:
    """Measure the share of attention in the tokens selectors pick from a full cache, in one forward pass."""
    from jkv.eval import experiments

    s = setting(o, o.cache, text.prefix, o.batch)
    _check_spared(s, spared)
    ids, source = _texts(s, text, text.rest, o.samples)
    with console.progress(len(s.caches)) as say:
        found = experiments.picks(s, ids, source, text.prefix, spared, say)
    for row in found.rows:
        print(
            f"{row['cache']}: {row['recovered']:.4f} of the attention in {row['tokens_share']:.1%} of the tokens, "
            f"{row['bytes_share']:.1%} of the bytes"
        )


def _check_spared(s: Setting, spared: int) -> None:
    layers = s.params.config.layers
    if not 0 <= spared < layers:
        raise ValueError(f"--spared {spared}: 0 or more, and fewer than the model's {layers} layers")


for command in eval_tasks.COMMANDS:
    app.command()(command)

RENEWS = ("pie", "cacheblend(ratio=0.16)", "kvshare")


@app.command()
@flat
def reuse(
    o: Compared = Compared(samples=20),
    bed: Annotated[str, typer.Option(help="Workload: documents, edits or agents.")] = "documents",
    renew: Annotated[
        list[str] | None, typer.Option(help=f"Recompute policy; repeatable. Default: {', '.join(RENEWS)}.")
    ] = None,
    length: Annotated[int, typer.Option(min=64, help="Tokens per reused text.")] = 96,
    timed: Annotated[bool, typer.Option("--times", help="Measure time to first token instead.")] = False,
) -> None:
    """Measure reuse of cached texts anywhere in a prompt: KL and needles against full prefill, tokens recomputed."""
    from jkv.eval import experiments
    from jkv.eval.chunk_reuse import BEDS, summed
    from jkv.prefix_cache.recompute import renewal

    renews = renew or list(RENEWS)
    if bed not in BEDS:
        raise ValueError(f"--bed {bed}: {', '.join(BEDS)}")
    if o.samples < 1:
        raise ValueError(f"--samples {o.samples}: prompts of the bed, 1 or more")
    for x in renews:
        renewal(x)
    s = setting(o, o.cache, length)
    with console.progress(len(s.caches) * (1 + len(renews)) * (1 if timed else o.samples)) as say:
        found = experiments.reuse(s, bed, renews, o.samples, length, timed, say)
    for row in found.rows if timed else summed(found.rows):
        if timed:
            print(f"{row['cache']}, {row['renew']}: {row['first_ms']:.0f} ms to the first token")
        else:
            score = f", needles {row['score']:.2f}" if row["score"] is not None else ""
            edits = f", {row['edits']} edits" if row["edits"] else ""
            kl = "" if row["kl"] is None else ", KL {:.4g} ± {:.2g}".format(*row["kl"])
            said = f"{row['samples']} prompts, {row['read']:.1%} read{kl}{score}"
            print(f"{row['cache']}, {row['renew']}{edits}: {said}")


@app.command()
def store(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help='JSON lines {"time": seconds, "prompt": ...}.')],
    model: Annotated[str, typer.Option(help="Model whose tokenizer encodes texts and messages.")] = MODEL,
    evict: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy: lru, belady, lpc:FILE; repeatable. Default: lru and belady."),
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Store size in blocks of 64 tokens; repeatable. Default: 1% to 40% of all."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Simulate the hit rate of a prefix cache on a trace of prompts, by eviction policy and size. No model runs."""
    from jkv.bench.environment import check_path
    from jkv.eval.results import PACKAGES, digest
    from jkv.eval.store_replay import encoder, rows
    from jkv.eval.store_replay import trace as read
    from jkv.prefix_cache.store import BLOCK
    from jkv.prefix_cache.store_eviction import policy
    from jkv.utils.json_results import versions, write

    orders = evict or ["lru", "belady"]
    for text in orders:
        if text != "belady":
            policy(text)
    check_path(out)
    visits = read(trace, encoder(model))
    every = len({name for x in visits for name in x.names})
    sizes = sorted(blocks or {max(every * share // 100, 1) for share in (1, 2, 5, 10, 20, 40)})
    found = rows(visits, orders, sizes)
    for row in found:
        print(f"{row['evict']}, {row['blocks']:,} blocks: {row['hits']:.1%} of the blocks that were asked for")
    if out is not None:
        about = {"command": "store", "model": model, "prompts": len(visits), "blocks": every, "block": BLOCK}
        write(out, {**about, "trace": digest([repr(x.names) for x in visits]), "versions": versions(PACKAGES)}, found)


@app.command()
def report(
    files: Annotated[list[str], typer.Argument(help="Result files of jkv eval.")],
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Plot quality against bytes and time.")] = None,
) -> None:
    """Show result files as one table; optionally plot them."""
    from jkv.eval.pareto import load, points
    from jkv.eval.report import table

    found = load(files)
    if not any(rows for *_, rows in found):
        raise ValueError("these files have no rows yet: run jkv eval first")
    measured = points(found)  # rows of `picks` have no cache bytes: they are only plotted
    if measured:
        console.show(table(measured))
    if plots is not None:
        drawn(found, plots)
