"""jkv train NAME. Imports jax and optax only when it runs."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv import console
from jkv.options import MODEL, Dtype, Model

if TYPE_CHECKING:
    import numpy as np

    from jkv.models import Params
    from jkv.training.trainer import Recipe

METHODS = ("trimkv",)


def train(
    name: Annotated[str, typer.Argument(help="trimkv: retention gates.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Checkpoints, metrics, and what was learned.")],
    model: Model = MODEL,
    budget: Annotated[int, typer.Option(help="Tokens a head to train for.")] = 512,
    warm: Annotated[int, typer.Option(help="Steps of each layer alone, without gradients through the model.")] = 500,
    steps: Annotated[int, typer.Option(help="Steps of the whole model after that.")] = 0,
    corpus: Annotated[
        list[str] | None, typer.Option(help="pydoc, stdlib, tasks, a dataset or a text file; can be repeated.")
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts of all corpora together.")] = 36,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 2048,
    batch: Annotated[int, typer.Option(help="Texts at a time.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Batches of a step.")] = 1,
    rate: Annotated[float, typer.Option(help="The largest learning rate of the steps.")] = 2e-4,
    weight: Annotated[float, typer.Option(help="Of the capacity loss.")] = 1.0,
    width: Annotated[int, typer.Option(help="Of a gate.")] = 128,
    top: Annotated[int, typer.Option(help="Tokens of the teacher that are compared; 0: all.")] = 64,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 25,
    check: Annotated[int, typer.Option(help="Held-back texts to measure the result on; 0: none.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the weights, the texts and their order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what FOLDER holds.")] = False,
    dtype: Dtype = "float32",
) -> None:
    """Train what a method learns, for a frozen model: a killed run goes on where it was by --resume."""
    if name not in METHODS:
        raise ValueError(f"there is nothing to train for {name!r}; names are: {', '.join(METHODS)}")
    sizes = dict(
        budget=budget, length=length, texts=texts, batch=batch, accumulate=accumulate, width=width, every=every
    )
    if wrong := [f"{k}={v}" for k, v in sizes.items() if v < 1]:
        raise ValueError(f"{wrong[0]}: 1 or more")
    if warm < 0 or steps < 0 or warm + steps < 1 or check < 0 or top < 0 or budget >= length:
        raise ValueError(
            f"warm={warm}, steps={steps}, check={check}, top={top}, budget={budget}, length={length}: none below 0, "
            "something to do, and a budget below the length"
        )
    try:
        from jkv.training.trainer import Recipe
    except ImportError as error:
        raise ImportError(f"training needs optax and orbax ({error}); run: pip install 'jkv[train]'") from error
    from jkv.io.load import load

    recipe = Recipe(
        budget=budget, warm=warm, steps=steps, batch=batch, accumulate=accumulate, rate=rate, weight=weight, top=top,
        every=every, seed=seed,
    )  # fmt: skip
    params = load(model, dtype)
    _train(name, model, params, recipe, list(corpus or ("pydoc", "stdlib")), texts, length, width, out, resume, check)


def _train(
    name: str,
    model: str,
    params: Params,
    recipe: Recipe,
    corpora: list[str],
    texts: int,
    length: int,
    width: int,
    out: Path,
    resume: bool,
    check: int,
) -> None:
    import jax

    from jkv.eval.results import digest
    from jkv.io import learned
    from jkv.scores.learned import Retention, start
    from jkv.training import data
    from jkv.training.checkpoints import Folder
    from jkv.training.trainer import Training

    made = data.texts(params, corpora, length, texts, recipe.seed)
    held = data.held_back(params, corpora[0], length, check, recipe.seed) if check else None
    offset = math.log(length if recipe.warm else 10 * length)  # half faded at the end, or a tenth
    what: dict[str, Any] = {
        "method": name,
        "model": learned.identities(params)[0],
        "dtype": str(params.embed.dtype),
        "corpora": corpora,
        "texts": [texts, length, digest([jax.device_get(made.ids).tobytes()])],
        "width": width,
        "recipe": {k: v for k, v in asdict(recipe).items() if k != "every"},
    }
    folder = Folder(out, what, resume)
    gate = start(params.config, width, offset, jax.random.key(recipe.seed))
    layers = params.config.layers if recipe.warm else 0
    with console.progress(layers + recipe.steps) as say:
        state = Training(params, made, recipe, folder, say).run(Retention(gate=gate))
    card = what | {"name": model, "model": learned.identities(params), "losses": folder.metrics()[-1]}
    assert state.score.gate is not None
    learned.write(out, vars(state.score.gate), card)
    print(f"learned: {out}\ndrawn: {folder.draw()}")
    if held is not None:
        card["eval"] = _measure(params, recipe.budget, held, out)
        learned.write(out, vars(state.score.gate), card)


def _measure(params: Params, budget: int, held: tuple[np.ndarray, str], out: Path) -> dict[str, Any]:
    """Perplexity of the last eighth of held-back texts through the cache, as `jkv eval ppl` measures it."""
    from jkv.eval import measure
    from jkv.methods import parse

    (ids, source), found = held, {}
    about = measure.Texts(ids, ids.shape[1] * 7 // 8)
    for cache in ("full", f"streaming(budget={budget})", f"trimkv(budget={budget}, gate={str(out)!r})"):
        name = cache.partition("(")[0]
        found[name] = measure.perplexity(params, parse(cache), about)["ppl"]
        print(f"{source}, {name}: perplexity {found[name]}")
    return {"source": source, "samples": len(ids), "prefix": about.prefix, "budget": budget, "ppl": found}
