"""jkv calibrate METHOD. Imports jax only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jkv.cli.options import MODEL, Floats, Model, Weights

calibrate = typer.Typer(
    no_args_is_help=True,
    help="Measure what a method needs to know of a model's heads, keys and values; nothing is trained.",
)


def _check_free(out: Path) -> None:
    """ValueError for a folder in which weights are already."""
    from jkv.io.trained_weights import CARD

    if (out / CARD).exists():
        raise ValueError(f"{out} holds a {CARD} already: give another --out")


def _calibrated(name: str, about: str, most: int, long: int) -> None:
    """Adds the command that finds a method's heads."""

    def command(
        out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
        model: Model = MODEL,
        texts: Annotated[int, typer.Option(help="Number of texts.")] = most,
        length: Annotated[int, typer.Option(help="Tokens of a text.")] = long,
        seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
        dtype: Floats = "float32",
        weights: Weights = None,
    ) -> None:
        from jkv.io import trained_weights
        from jkv.io.load import load
        from jkv.training.calibrate import channels, heads, moments, queries, sensitivity
        from jkv.utils import console

        _check_free(out)
        params = load(model, dtype, None, weights)
        layers = params.config.layers
        steps = {
            "compresskv": 2 * texts,
            "channels": layers,
            "moments": layers,
            "queries": layers,
            "sensitivity": layers + sensitivity.BACK,
        }
        methods = channels.METHODS | heads.METHODS | moments.METHODS | queries.METHODS | sensitivity.METHODS
        wide = {"moments": moments.wide, "sensitivity": sensitivity.wide}.get(name, lambda _: name == "queries")
        with console.progress(steps.get(name, texts)) as say:
            arrays, told = methods[name](params, texts, length, seed, say)
        card = dict(
            method=name, model=trained_weights.identities(params), name=model, texts=texts, length=length, seed=seed
        )
        trained_weights.write(out, arrays, card | told, wide)
        print(f"found: {out}")

    calibrate.command(name, help=about)(command)


_calibrated("compresskv", "Which heads of a layer find what was asked for.", 24, 1024)
_calibrated("channels", "Which channels and directions of keys tell tokens apart, for selectors.", 4, 1024)
_calibrated("moments", "Means, extremes and correlations of keys and values, for codecs.", 8, 1024)
_calibrated("queries", "Means and directions of queries, for scores and codecs.", 8, 1024)
_calibrated("sensitivity", "Means, correlations and levels of keys and values, by what depends on them.", 8, 1024)
_calibrated("razorattention", "Which heads copy, so that they need all tokens.", 4, 1601)


@calibrate.command(
    "layers", help="Which budget, and which codecs, each layer has, within so many bytes; the same command resumes it."
)
def layers(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
    bytes: Annotated[str, typer.Option(help="Bytes of the cache of a text, everything counted, such as 2MiB.")],
    model: Model = MODEL,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="A cache whose budget, or whose codec of keys or of values, may be chosen; repeatable. Default: full, "
            "int8 and turboquant of 4, 3, 2 bits."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 4,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a text.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    dtype: Floats = "float32",
) -> None:
    import numpy as np

    from jkv.io import trained_weights
    from jkv.io.load import load
    from jkv.methods.layer_plan import METHOD, alike
    from jkv.training.calibrate.layer_plan import CANDIDATES, Search
    from jkv.training.calibrate.moments import SOURCES
    from jkv.training.data import corpora as data
    from jkv.training.resumable_search import Measured
    from jkv.utils import console
    from jkv.utils.validation import read_bytes

    _check_free(out)
    asked, most = tuple(candidate or CANDIDATES), read_bytes(bytes)
    alike(asked)
    params = load(model, dtype)
    search = Search(params, asked, length, most)
    ids = np.asarray(data.texts(params, SOURCES, length, texts, seed).ids)
    kept = Measured(out / "measured.json", search.what(ids))  # a killed search goes on from there
    with console.progress(search.steps) as say:
        arrays, told = search.run(ids, say, kept)
    card = dict(
        method=METHOD, model=trained_weights.identities(params), name=model, texts=texts, length=length, seed=seed
    )
    trained_weights.write(out, arrays, card | told)
    kept.remove()
    print(f"{told['bytes']:,} bytes, KL {told['kl']:.4g}; the same in all layers:")
    for row in told["uniform"]:
        print(f"{row['bytes']:,} bytes, KL {row['kl']:.4g}: {row['cache']}")
    print(f"write: planned(plan='{out}')")


@calibrate.command("bitstack", help="The blocks of the weights, and their order; the same command resumes it.")
def bitstack(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
    model: Model = MODEL,
    k: Annotated[int, typer.Option(min=1, help="Rank of a block.")] = 16,
    levels: Annotated[int, typer.Option(min=1, help="Blocks of a matrix.")] = 16,
    texts: Annotated[int, typer.Option(min=2, help="Number of texts, which say how large inputs are.")] = 16,
    judged: Annotated[int, typer.Option(min=1, help="Texts whose perplexity orders the blocks.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a text.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
) -> None:
    import numpy as np

    from jkv.eval.results import digest
    from jkv.io import bitstack as own
    from jkv.io.fingerprint import sampled
    from jkv.io.load import load, read
    from jkv.training.calibrate import bitstack
    from jkv.training.calibrate.moments import SOURCES
    from jkv.training.data import corpora as data
    from jkv.training.resumable_search import Measured
    from jkv.utils import console

    _check_free(out)
    if judged > texts:
        raise ValueError(f"--judged {judged}: there are {texts} texts")
    params = load(model, "float32")
    ids = np.asarray(data.texts(params, SOURCES, length, texts, seed).ids)
    what = dict(model=sampled(params.config, read(model).tensors), k=k, levels=levels, judged=judged)
    folder = own.Folder(out, what | dict(texts=digest([ids.tobytes()])))
    kept = Measured(out / "measured.json", folder.what)  # a killed search goes on from there
    with console.progress(bitstack.steps(params, levels)) as say:
        order = bitstack.calibrate(params, ids, judged, folder, kept, say)
    folder.finish(order, dict(name=model, sources=list(SOURCES), texts=texts, length=length, seed=seed))
    kept.remove()
    print(f"load: weights=\"{own.NAME}(bytes=..., blocks='{out}')\"")
