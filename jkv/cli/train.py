"""jkv train NAME, jkv calibrate NAME. Imports jax and optax only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jkv.cli.options import MODEL, Dtype, Model
from jkv.host.extras import install


def _whole(**own: Any) -> dict[str, Any]:
    """A method's own defaults, and those of the whole model's steps."""
    return own | {k: x for k, x in (START | WHOLE).items() if k not in own}


START = dict(start=None)
WHOLE = dict(steps=0, batch=1, accumulate=1, weight=1.0, top=64, every=25)
# What each method is trained by, and how much of it where nothing is said.
DEFAULTS: dict[str, dict[str, Any]] = {
    "trimkv": _whole(budget=512, warm=500, early=3e-3, rate=2e-4, width=128),
    "makeeach": _whole(budget=512, steps=1000, rate=1e-3, width=64),
    "locret": START | dict(budget=512, warm=3000, answer=64, rate=5e-4, width=128),
    "lococo": START | dict(budget=128, warm=200, chunk=512, rate=2e-3, width=21),
    "dms": _whole(window=128, ratio=8.0, warm=600, early=3e-4, weight=3.0, fall=480, rate=2e-4),
    "attentiongate": _whole(price=0.75, answer=256, share=0.5, warm=300, early=1e-2, weight=10.0, rate=1e-3, width=8),
    "attentionpredictor": dict(steps=1000, batch=32, rate=5e-4, moments=3, page=16, dense_layers=2, every=100),
}
# What is found out about a model by forward passes: how many texts, of how many tokens, where nothing is said.
FOUND: dict[str, dict[str, int]] = {
    "compresskv": dict(texts=24, length=1024),
    "razorattention": dict(texts=4, length=1601),
}
POSITIVE = (
    "budget",
    "chunk",
    "batch",
    "accumulate",
    "width",
    "every",
    "window",
    "fall",
    "moments",
    "page",
    "answer",
    "texts",
    "length",
)


def _told(option: str, about: str) -> str:
    """The help of an option, with the methods that take it and their defaults."""
    taken = "; ".join(f"{name}: {chosen[option]}" for name, chosen in DEFAULTS.items() if option in chosen)
    return f"{about} {taken}."


Budget = Annotated[int | None, typer.Option(help=_told("budget", "Tokens a head to train for."))]
Warm = Annotated[
    int | None, typer.Option(help=_told("warm", "Steps of each layer alone, without gradients through the model."))
]
Early = Annotated[float | None, typer.Option(help=_told("early", "The largest learning rate of layers alone."))]
Steps = Annotated[
    int | None, typer.Option(help=_told("steps", "Steps of the whole model, or of what is trained without it."))
]
Batch = Annotated[int | None, typer.Option(help=_told("batch", "Texts, or moments, at a time."))]
Accumulate = Annotated[int | None, typer.Option(help=_told("accumulate", "Batches of a step."))]
Rate = Annotated[float | None, typer.Option(help=_told("rate", "The largest learning rate."))]
Weight = Annotated[float | None, typer.Option(help=_told("weight", "Of the capacity loss."))]
Width = Annotated[int | None, typer.Option(help=_told("width", "Of a gate, or of a convolution."))]
Top = Annotated[int | None, typer.Option(help=_told("top", "Tokens of the teacher that are compared; 0: all."))]
Window = Annotated[int | None, typer.Option(help=_told("window", "Tokens that a marked one still lives."))]
Ratio = Annotated[
    float | None, typer.Option(help=_told("ratio", "Of all tokens to those that are not marked, at the end."))
]
Fall = Annotated[int | None, typer.Option(help=_told("fall", "Steps until that ratio."))]
Moments = Annotated[int | None, typer.Option(help=_told("moments", "Drawn of each text, layer and kv head."))]
Answer = Annotated[
    int | None, typer.Option(help=_told("answer", "Last tokens of a text, by which the others are judged."))
]
Share = Annotated[
    float | None,
    typer.Option(help=_told("share", "Of a prompt's tokens that are to stay, by steps of the whole model.")),
]
Price = Annotated[float | None, typer.Option(help=_told("price", "Nats that a layer alone pays for all its tokens."))]
Page = Annotated[int | None, typer.Option(help=_told("page", "Tokens of a page."))]
Spared = Annotated[int | None, typer.Option(help=_told("dense_layers", "First layers, which select nothing."))]
Chunk = Annotated[int | None, typer.Option(help=_told("chunk", "Tokens of a text that are read at a time."))]
Every = Annotated[int | None, typer.Option(help=_told("every", "Steps between checkpoints."))]
Corpus = Annotated[
    list[str] | None, typer.Option(help="pydoc, stdlib, tasks, a dataset or a text file; can be repeated.")
]


def train(
    name: Annotated[
        str,
        typer.Argument(help="trimkv, makeeach, attentiongate, locret, lococo, dms or attentionpredictor."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Checkpoints, metrics, and what was learned.")],
    model: Model = MODEL,
    budget: Budget = None,
    warm: Warm = None,
    early: Early = None,
    steps: Steps = None,
    corpus: Corpus = None,
    texts: Annotated[int, typer.Option(help="Texts of all corpora together.")] = 36,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 2048,
    batch: Batch = None,
    accumulate: Accumulate = None,
    rate: Rate = None,
    weight: Weight = None,
    width: Width = None,
    top: Top = None,
    window: Window = None,
    ratio: Ratio = None,
    fall: Fall = None,
    moments: Moments = None,
    page: Page = None,
    answer: Answer = None,
    share: Share = None,
    price: Price = None,
    dense_layers: Spared = None,
    chunk: Chunk = None,
    every: Every = None,
    start: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Weights of the same method to go on from, with other settings."),
    ] = None,
    check: Annotated[int, typer.Option(help="Held-back texts to measure the result on; 0: none.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the weights, the texts and their order.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what FOLDER holds.")] = False,
    dtype: Dtype = "float32",
) -> None:
    """Train what a method learns, for a frozen model: a killed run goes on where it was by --resume."""
    asked = dict(
        budget=budget, warm=warm, early=early, steps=steps, batch=batch, accumulate=accumulate, rate=rate,
        weight=weight, width=width, top=top, window=window, ratio=ratio, fall=fall, moments=moments, page=page,
        answer=answer, share=share, price=price, dense_layers=dense_layers, chunk=chunk, every=every, start=start,
    )  # fmt: skip
    chosen = settings(name, {k: v for k, v in asked.items() if v is not None}, texts, length, check)
    try:
        from jkv.training import methods
    except ImportError as error:
        raise ImportError(f"training needs optax and orbax ({error}); {install('train')}") from error
    from jkv.io.load import load

    run = methods.Run(
        name=name, model=model, params=load(model, dtype), corpora=tuple(corpus or ("pydoc", "stdlib")), texts=texts,
        length=length, check=check, seed=seed, out=out, resume=resume, start=chosen.pop("start", None),
    )  # fmt: skip
    methods.METHODS[name](run, **chosen)


def settings(name: str, asked: dict[str, Any], texts: int, length: int, check: int) -> dict[str, Any]:
    """What a method is trained by: what was asked for, else its defaults. ValueError names what cannot be."""
    if name not in DEFAULTS:
        raise ValueError(f"there is nothing to train for {name!r}; names are: {', '.join(DEFAULTS)}")
    if unknown := sorted(asked.keys() - DEFAULTS[name].keys()):
        known = ", ".join(f"--{option.replace('_', '-')}" for option in DEFAULTS[name])
        raise ValueError(f"--{unknown[0].replace('_', '-')} is nothing that {name} is trained by; it takes {known}")
    if "start" in asked and "width" in asked:
        raise ValueError("--width is that of the weights in --start: leave it out")
    chosen = DEFAULTS[name] | asked
    sizes = chosen | dict(texts=texts, length=length)
    if wrong := [f"{k}={sizes[k]}" for k in POSITIVE if sizes.get(k, 1) < 1]:
        raise ValueError(f"{wrong[0]}: 1 or more")
    amounts = {k: chosen[k] for k in ("warm", "steps", "top", "dense_layers") if k in chosen} | {"check": check}
    work = chosen.get("warm", 0) + chosen.get("steps", 0)
    held = {k: chosen[k] for k in ("budget", "window", "answer") if k in chosen}
    if min(amounts.values()) < 0 or work < 1 or max(held.values(), default=0) >= length:
        told = ", ".join(f"{k}={x}" for k, x in {**amounts, **held, "length": length}.items())
        raise ValueError(f"{told}: none below 0, something to do, and a budget below the length, a window too")
    if chosen.get("ratio", 2) <= 1:
        raise ValueError(f"ratio={chosen['ratio']}: all tokens to those that stay; above 1, or nothing is to be marked")
    return chosen


def calibrate(
    name: Annotated[str, typer.Argument(help="compresskv or razorattention: which heads look back, and for what.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="What was found.")],
    model: Model = MODEL,
    texts: Annotated[int | None, typer.Option(help="Texts to look at: 24 and 4.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a text: 1,024 and 1,601.")] = None,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    dtype: Dtype = "float32",
) -> None:
    """Find out what a method must know about a model's heads, from texts that are made for it; nothing is trained."""
    if name not in FOUND:
        raise ValueError(f"there is nothing to calibrate for {name!r}; names are: {', '.join(FOUND)}")
    from jkv.host import console
    from jkv.io import learned
    from jkv.io.load import load
    from jkv.training import heads

    if (out / learned.CARD).exists():
        raise ValueError(f"{out} holds a {learned.CARD} already: give another --out")
    given = {k: FOUND[name][k] if x is None else x for k, x in dict(texts=texts, length=length).items()}
    params = load(model, dtype)
    with console.progress(2 * given["texts"] if name == "compresskv" else given["texts"]) as say:
        arrays, told = heads.METHODS[name](params, given["texts"], given["length"], seed, say)
    card = {"method": name, "model": learned.identities(params), "name": model, **given, "seed": seed, **told}
    learned.write(out, arrays, card)
    print(f"found: {out}")
