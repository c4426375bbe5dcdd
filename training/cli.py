"""jkv train NAME. Imports jax and optax only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jkv.options import MODEL, Dtype, Model

# What each method is trained by, and how much of it where nothing is said.
DEFAULTS: dict[str, dict[str, Any]] = {
    "trimkv": dict(
        budget=512, warm=500, steps=0, batch=1, accumulate=1, rate=2e-4, weight=1.0, width=128, top=64, every=25
    ),
    "dms": dict(
        window=128, ratio=8.0, fall=480, steps=512, batch=1, accumulate=1, rate=2e-4, weight=1.0, top=64, every=25
    ),
    "attentionpredictor": dict(steps=1000, batch=32, rate=2e-3, moments=2, page=16, dense_layers=2, every=100),
}
POSITIVE = ("budget", "batch", "accumulate", "width", "every", "window", "fall", "moments", "page", "texts", "length")


def train(
    name: Annotated[str, typer.Argument(help="trimkv (gates), dms (switches) or attentionpredictor (a forecast).")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Checkpoints, metrics, and what was learned.")],
    model: Model = MODEL,
    budget: Annotated[int | None, typer.Option(help="Tokens a head to train for. trimkv: 512.")] = None,
    warm: Annotated[
        int | None, typer.Option(help="Steps of each layer alone, without gradients through the model. trimkv: 500.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the whole model, after that. trimkv: 0; dms: 512; attentionpredictor: 1000."),
    ] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="pydoc, stdlib, tasks, a dataset or a text file; can be repeated.")
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts of all corpora together.")] = 36,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 2048,
    batch: Annotated[
        int | None, typer.Option(help="Texts, or moments, at a time. trimkv, dms: 1; attentionpredictor: 32.")
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches of a step. trimkv, dms: 1.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="The largest learning rate. trimkv, dms: 2e-4; attentionpredictor: 2e-3.")
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Of the capacity loss. trimkv, dms: 1.")] = None,
    width: Annotated[int | None, typer.Option(help="Of a gate. trimkv: 128.")] = None,
    top: Annotated[
        int | None, typer.Option(help="Tokens of the teacher that are compared; 0: all. trimkv: 64.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens that a marked one still lives. dms: 128.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Of all tokens to those not marked, at the end. dms: 8.")] = None,
    fall: Annotated[int | None, typer.Option(help="Steps until that ratio. dms: 480.")] = None,
    moments: Annotated[
        int | None, typer.Option(help="Drawn of each text, layer and kv head. attentionpredictor: 2.")
    ] = None,
    page: Annotated[int | None, typer.Option(help="Tokens of a page. attentionpredictor: 16.")] = None,
    dense_layers: Annotated[
        int | None, typer.Option(help="First layers, which select nothing. attentionpredictor: 2.")
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. trimkv, dms: 25; attentionpredictor: 100.")
    ] = None,
    check: Annotated[int, typer.Option(help="Held-back texts to measure the result on; 0: none.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the weights, the texts and their order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what FOLDER holds.")] = False,
    dtype: Dtype = "float32",
) -> None:
    """Train what a method learns, for a frozen model: a killed run goes on where it was by --resume."""
    asked = dict(
        budget=budget, warm=warm, steps=steps, batch=batch, accumulate=accumulate, rate=rate, weight=weight,
        width=width, top=top, window=window, ratio=ratio, fall=fall, moments=moments, page=page,
        dense_layers=dense_layers, every=every,
    )  # fmt: skip
    chosen = settings(name, {k: v for k, v in asked.items() if v is not None}, texts, length, check)
    try:
        from jkv.training import methods
    except ImportError as error:
        raise ImportError(f"training needs optax and orbax ({error}); run: pip install 'jkv[train]'") from error
    from jkv.io.load import load

    run = methods.Run(
        name=name, model=model, params=load(model, dtype), corpora=tuple(corpus or ("pydoc", "stdlib")), texts=texts,
        length=length, check=check, seed=seed, out=out, resume=resume,
    )  # fmt: skip
    methods.METHODS[name](run, **chosen)


def settings(name: str, asked: dict[str, Any], texts: int, length: int, check: int) -> dict[str, Any]:
    """What a method is trained by: what was asked for, else its defaults. ValueError names what cannot be."""
    if name not in DEFAULTS:
        raise ValueError(f"there is nothing to train for {name!r}; names are: {', '.join(DEFAULTS)}")
    if unknown := sorted(asked.keys() - DEFAULTS[name].keys()):
        known = ", ".join(f"--{option.replace('_', '-')}" for option in DEFAULTS[name])
        raise ValueError(f"--{unknown[0].replace('_', '-')} is nothing that {name} is trained by; it takes {known}")
    chosen = DEFAULTS[name] | asked
    sizes = chosen | dict(texts=texts, length=length)
    if wrong := [f"{k}={sizes[k]}" for k in POSITIVE if sizes.get(k, 1) < 1]:
        raise ValueError(f"{wrong[0]}: 1 or more")
    amounts = {k: chosen[k] for k in ("warm", "steps", "top", "dense_layers") if k in chosen} | {"check": check}
    work, budget = chosen.get("warm", 0) + chosen["steps"], chosen.get("budget", 0)
    if min(amounts.values()) < 0 or work < 1 or budget >= length:
        told = ", ".join(f"{k}={x}" for k, x in {**amounts, "budget": budget, "length": length}.items())
        raise ValueError(f"{told}: none below 0, something to do, and a budget below the length")
    return chosen
