"""The `jkv eval pack` and `jkv eval unpack` commands. Import jax only when they run."""

from __future__ import annotations

import lzma
import sys
from pathlib import Path
from typing import Annotated

import typer

from jkv.cli.options import MODEL, Dtype, Model, Weights, flat
from jkv.utils.console import status

CACHE = "streaming(budget=512) | int4"


@flat
def pack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="UTF-8 text file.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="Output file.")],
    model: Model = MODEL,
    cache: Annotated[str, typer.Option(help="Cache that the model predicts through.")] = CACHE,
    dtype: Dtype = None,
    weights: Weights = None,
) -> None:
    """Compress a text losslessly with the model's predictions through a cache. Unpacking needs the same model."""
    try:
        text = file.expanduser().read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file} ({error}): give a UTF-8 text") from error
    from jkv.bench.environment import check_path
    from jkv.eval import pack as own
    from jkv.io.load import load
    from jkv.methods import parse

    parse(cache)
    check_path(out := out.expanduser())
    with status("packing"):
        tokens = own.pack(load(model, dtype, None, weights), text, cache, out)
    raw, size = text.encode(), out.stat().st_size
    xz = len(lzma.compress(raw, preset=9))
    print(f"{tokens:,} tokens, {len(raw):,} bytes: {size:,} packed ({8 * size / len(raw):.2f} bits a byte), xz {xz:,}")


@flat
def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File written by jkv eval pack.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="PATH", help="Output file. Default: stdout.")] = None,
    model: Model = MODEL,
    dtype: Dtype = None,
    weights: Weights = None,
) -> None:
    """Restore the text of a packed file, with the model and the cache that packed it."""
    from jkv.bench.environment import check_path
    from jkv.eval import pack as own
    from jkv.io.load import load

    check_path(out := out and out.expanduser())
    text = own.unpack(load(model, dtype, None, weights), file.expanduser())
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_bytes(text.encode())
