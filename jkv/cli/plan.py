"""The `jkv plan` command. Imports jax only when it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkv.cli.options import Chunk, Weights
from jkv.utils import console

if TYPE_CHECKING:
    from jkv.aot.memory_estimate import Program
    from jkv.aot.targets import Target

NUMBERS = (
    "what",
    "weights",
    "kernels",
    "temporary",
    "peak",
    "flops",
    "moved",
    "cycles",
    "refused",
    "compile_s",
    "reading",
)


def plan(
    model: Annotated[
        str, typer.Option(help="Shape of a public model, such as llama-3.1-8b; or folder, .gguf file, hub id.")
    ],
    topology: Annotated[
        str, typer.Option(help="Target: TPUs (v5e:2x4, v5e:1x1), a GPU (h200, h100), or cpu (this machine).")
    ],
    context: Annotated[int, typer.Option(min=2, help="Tokens per sequence, prompt and answer.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    cache: Annotated[list[str] | None, typer.Option(help="Cache to plan for; repeatable. Default: full.")] = None,
    chunk: Chunk = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of weights and unquantized KV. Default: bfloat16; float32 for cpu.")
    ] = None,
    weights: Weights = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh, such as data=2,model=4,context=2. Default: model as large as kv heads allow."),
    ] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Also list the collectives of a decode step and a flush.")
    ] = False,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs", help="Also show the compiler's FLOPs, bytes moved and cycles, and the times they imply."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Also write the results to this file.")
    ] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Search for the largest batch whose decode step fits.")
    ] = False,
) -> None:
    """Check whether a job fits an accelerator you do not have, by compiling it ahead of time."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs, so a local accelerator stays free
    from jkv import methods
    from jkv.aot.memory_estimate import TRIES, Job, gib, programs
    from jkv.aot.memory_estimate import largest as search
    from jkv.aot.targets import target
    from jkv.bench import environment

    # Validate all arguments before compiling.
    dtype = dtype or ("float32" if topology == "cpu" else "bfloat16")  # what jkv.load would take there
    own = subject(model, dtype, weights)
    environment.check_path(out)
    configs = [methods.parse(x) for x in cache or ["full"]]
    longest = own["model"].context
    if context > longest:
        raise ValueError(f"--context {context}: the context of {model} is {longest}; give less")
    machine = target(topology)
    sizes: dict[str, Any] = dict(batch=batch, context=context, chunk=chunk)
    about = environment.meta(model, 1, topology=topology, dtype=dtype, **sizes)
    about |= {} if weights is None else {"weights": weights}
    # Compile each cache's programs, and save each result as it arrives.
    rows = []
    with console.progress(len(configs) * (TRIES if largest else 2)) as say:
        for config in configs:
            job = Job(config=config, mesh=mesh, **own, **sizes)
            if largest:
                print(f"{config}: largest batch {search(job, machine, say)}")
                continue
            for program in programs(job, machine):
                say(f"{config}, {program.what}: {program.refused or f'{gib(program.peak)} GiB at the peak'}")
                rows.append((str(config), program))
                numbers = [{"cache": c, "bytes": p.cache} | {k: vars(p)[k] for k in NUMBERS} for c, p in rows]
                environment.save(out, about, numbers)
    if rows:
        _show(rows, machine, costs, collectives)


def subject(model: str, dtype: str, weights: str | None) -> dict[str, Any]:
    """Return the weight arguments of a `Job`: model config, dtype, weight format and the blocks of a file.

    Args:
        model: shape of a public model, a config.json, or what `jkv.load` reads.
    """
    import jax.numpy as jnp

    from jkv import models
    from jkv.bench.model_shapes import SHAPES
    from jkv.io.load import check_dtype, check_weights, kept, read
    from jkv.io.model_source import Source

    check_dtype(dtype)
    check_weights(weights)
    if model.endswith(".json"):
        source = Source(json.loads(Path(model).read_text("utf-8")), {})
    else:
        source = Source(SHAPES[model], {}) if model in SHAPES else read(model)
    form, blocks = kept(model, source, dtype, weights)
    return dict(model=models.read_config(source.config), dtype=jnp.dtype(dtype), form=form, blocks=blocks)


def _show(rows: list[tuple[str, Program]], machine: Target, costs: bool, collectives: bool) -> None:
    """Print the tables of the compiled programs, and the compiler's messages for the ones that failed."""
    from jkv.aot import memory_estimate as plan
    from jkv.aot.collectives import table as messages

    console.show(plan.table(rows, machine))
    if costs:
        console.show(plan.costs(rows, machine))
    if collectives:
        console.show(messages([(name, p.what, p.collectives) for name, p in rows]))
    for name, program in rows:
        if program.reading:
            print(f"{name}, {program.what}: {program.reading}")
        if program.refused:
            print(f"{name}, {program.what}: {program.refused}")
