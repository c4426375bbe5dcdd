"""The `jkv eval weights` command. Imports jax only when it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from jkv.cli.options import MODEL, Model


def weights(
    form: Annotated[
        list[str], typer.Option(help="Weight format: int8, int4, file or bitstack(bytes=...); repeatable.")
    ],
    model: Model = MODEL,
    corpus: Annotated[str, typer.Option(help="Corpus, such as pydoc:test.")] = "pydoc:test",
    prefix: Annotated[int, typer.Option(min=1, help="Context tokens per text.")] = 256,
    rest: Annotated[int, typer.Option("--continue", min=1, help="Scored tokens after the context.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the text positions.")] = 0,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Result file.")] = None,
) -> None:
    """Compare weight formats with float32: bytes, perplexity, and KL of the predictions."""
    from jkv.cli.bench_common import measure
    from jkv.eval import corpora
    from jkv.eval import weight_formats as kept
    from jkv.eval.results import digest
    from jkv.io.load import check_weights, load, read
    from jkv.utils.json_results import versions

    for x in form:
        check_weights(x)
    tokenizer = read(model).tokenizer
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer: give a model that reads text")
    texts = corpora.windows(tokenizer.encode(corpora.text(corpus)), prefix + rest, samples, seed)
    about = dict(command="weights", model=model, source=corpus, texts=digest([texts.tobytes()]), prefix=prefix)
    about |= {"continue": rest, "samples": samples, "seed": seed, "versions": versions(("jkv", "jax", "numpy"))}
    found = partial(kept.rows, lambda x: load(model, "float32", weights=x), [None, *form], texts, prefix)
    says = lambda r: f"{r['weights']}: perplexity {r['ppl']:.4g}"  # noqa: E731
    measure(1 + len(form), found, says, kept.table, about, out)
