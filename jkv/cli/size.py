"""The `jkv size` command. Imports jax only when it runs, and compiles nothing."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from jkv.cli.options import CACHE, MODEL, Dtype, Weights
from jkv.utils import console


def size(
    model: Annotated[
        str, typer.Option(help="Shape of a public model, such as llama-3.1-8b; or config.json, folder, .gguf, hub id.")
    ] = MODEL,
    context: Annotated[int, typer.Option(min=2, help="Tokens per sequence, prompt and answer.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    cache: Annotated[
        list[str] | None, typer.Option(help=f"Cache to size; repeatable. Default: full, {CACHE} and int4.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory to fit into: 24GiB, or a device such as t4, l4, rtx-4090, h100, v5e.")
    ] = None,
    dtype: Dtype = None,
    weights: Weights = None,
) -> None:
    """Print the bytes of weights, cache and peak, and whether they fit: by arithmetic, in about a second."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, so a local accelerator stays free
    from jkv.aot import size as sizing
    from jkv.cli.plan import subject

    limit = None if memory is None else sizing.memory_of(memory)
    dtype = dtype or ("float32" if memory in (None, "t4") else "bfloat16")  # what jkv.load would take there
    own = subject(model, dtype, weights)
    caches = cache or ["full", CACHE, "int4"]
    found = sizing.sizes(
        caches, own["model"], context, dtype, batch=batch, memory=limit, form=own["form"], blocks=own["blocks"],
        copies=memory is None and dtype != "float32",
    )  # fmt: skip
    rows = "" if batch == 1 else f", {batch} rows"
    console.show(sizing.table(found, f"{model} in {dtype}, {context:,} tokens{rows}"))
