"""The `jkv eval tokens` command. Imports jax only when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jkv.cli.options import Compared, Text, flat
from jkv.utils import console


@flat
def tokens(
    o: Compared,
    text: Text = Text(prefix=1024, rest=256),
    train: Annotated[
        list[int] | None,
        typer.Option(min=256, help="Train a tokenizer of this size instead of using a model; repeatable."),
    ] = None,
    megabytes: Annotated[
        list[float] | None, typer.Option(help="With --train: training text in MB; repeatable. Default: 1.")
    ] = None,
) -> None:
    """Measure a tokenizer: token entropies, the model's bits per token and byte, and KV bytes per byte of text."""
    from jkv.bench.environment import check_path
    from jkv.eval import corpora, experiments
    from jkv.eval import tokens as own
    from jkv.eval.results import digest
    from jkv.utils.json_results import versions, write

    model = {"--text": text.text, "--tokens": text.tokens, "--cache": o.cache, "--weights": o.weights}
    model |= {"--dtype": o.dtype, "--mesh": o.mesh}
    if train and (given := [name for name, x in model.items() if x is not None]):
        raise ValueError(f"--train trains on --corpus, and no model runs: leave out {', '.join(given)}, or --train")
    if megabytes and not train:
        raise ValueError("--megabytes is what tokenizers are trained on: give --train N with it, or leave it out")
    # Train and measure tokenizers, without a model.
    if train:
        check_path(out := o.out and o.out.expanduser())
        rows = own.study(text.corpus, train, megabytes or [1.0])
        for row in rows:
            _say(f"{row['vocabulary']:,} tokens of {row['megabytes']:g} MB", row)
        if out is not None:
            about = {"command": "tokens", "corpus": text.corpus, "text": digest([corpora.text(text.corpus)])}
            write(out, {**about, "versions": versions(("jkv", "numpy", "tokenizers"))}, rows)
        return
    # Measure a model's tokenizer, and its predictions through each cache.
    from jkv.io.load import load
    from jkv.methods import parse

    names = list(dict.fromkeys(o.cache or ["full"]))
    for name in names:
        parse(name)
    s = experiments.Setting(o.model, load(o.model, o.dtype, o.mesh, o.weights), names, o.batch, o.out, o.seed)
    ids, source = experiments.texts(
        s.params, text.corpus, text.text, text.tokens, text.prefix, text.rest, o.samples, s.seed
    )
    if s.params.tokenizer is None or text.tokens is not None:
        raise ValueError("bytes of a text are asked for: give a model with a tokenizer, and a text for --tokens")
    whole = corpora.text(str(text.text) if text.text else text.corpus)
    with console.progress(len(names)) as say:
        found = own.measured(s, ids, source, text.prefix, whole, say)
    for row in found.rows:
        if "once" in row:
            _say(source, row)
        else:
            print(f"{row['cache']}: {row['bits_token']:.3f} bits a token, {row['bits_byte']:.3f} a byte; ", end="")
            print(f"{row['kv_byte']:,.0f} bytes of cache for a byte of text")


def _say(what: str, row: dict[str, Any]) -> None:
    from jkv.eval.tokens import ENOUGH

    bits = [f"{x:.2f}{'*' if once > ENOUGH else ''}" for x, once in zip(row["bits"], row["once"], strict=True)]
    short = f" (*: more than {ENOUGH:.0%} of the n-grams occur once)" if any("*" in x for x in bits) else ""
    print(f"{what}: {row['bytes_token']:.2f} bytes a token; bits by order {', '.join(bits)}{short}; ", end="")
    print(f"{row['use']:.0%} of log2 V")
