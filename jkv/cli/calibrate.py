"""The `jkv calibrate` commands. Import jax only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jkv.cli.options import MODEL, Floats, Model, Weights

calibrate = typer.Typer(
    no_args_is_help=True,
    help="Measure the model statistics (heads, keys, values) that a method needs; nothing is trained.",
)


def _check_free(out: Path) -> None:
    """Raise ValueError if the folder holds weights already."""
    from jkv.io.trained_weights import CARD

    if (out / CARD).exists():
        raise ValueError(f"{out} holds a {CARD} already: give another --out")


def _calibrated(name: str, about: str, most: int, long: int) -> None:
    """Add the calibration command `name`, by default with `most` texts of `long` tokens."""

    def command(
        out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
        model: Model = MODEL,
        texts: Annotated[int, typer.Option(help="Number of texts.")] = most,
        length: Annotated[int, typer.Option(help="Tokens per text.")] = long,
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


_calibrated("compresskv", "Find the retrieval heads of each layer.", 24, 1024)
_calibrated("channels", "Find the key channels and directions that tell tokens apart, for selectors.", 4, 1024)
_calibrated("moments", "Measure means, extremes and correlations of keys and values, for codecs.", 8, 1024)
_calibrated("queries", "Measure means and directions of queries, for scores and codecs.", 8, 1024)
_calibrated(
    "sensitivity",
    "Measure means, correlations and levels of keys and values, weighted by how much the output depends on them.",
    8,
    1024,
)
_calibrated("razorattention", "Find the copying heads, which need all tokens.", 4, 1601)


@calibrate.command(
    "layers",
    help="Choose a budget and codecs for each layer within a byte limit. Run the same command again to resume.",
)
def layers(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
    bytes: Annotated[str, typer.Option(help="Byte limit of one text's cache, metadata included, such as 2MiB.")],
    model: Model = MODEL,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="Cache whose budget or codecs of keys or values a layer may get; repeatable. Default: full, "
            "int8, and turboquant with 4, 3 and 2 bits."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 4,
    length: Annotated[int, typer.Option(min=16, help="Tokens per text.")] = 1024,
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
    kept = Measured(out / "measured.json", search.what(ids))  # a killed search resumes from this file
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


@calibrate.command(
    "bitstack", help="Decompose the weights into BitStack blocks and order them. Run the same command again to resume."
)
def bitstack(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder.")],
    model: Model = MODEL,
    k: Annotated[int, typer.Option(min=1, help="Rank of each block.")] = 16,
    levels: Annotated[int, typer.Option(min=1, help="Blocks per matrix.")] = 16,
    texts: Annotated[int, typer.Option(min=2, help="Number of texts, which measure the scale of inputs.")] = 16,
    judged: Annotated[int, typer.Option(min=1, help="Number of texts whose perplexity orders the blocks.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Tokens per text.")] = 512,
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
    kept = Measured(out / "measured.json", folder.what)  # a killed search resumes from this file
    with console.progress(bitstack.steps(params, levels)) as say:
        order = bitstack.calibrate(params, ids, judged, folder, kept, say)
    folder.finish(order, dict(name=model, sources=list(SOURCES), texts=texts, length=length, seed=seed))
    kept.remove()
    print(f"load: weights=\"{own.NAME}(bytes=..., blocks='{out}')\"")
