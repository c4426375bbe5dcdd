"""The `jkv` command: one module per command or group of commands.

Importing this module does not import jax, so that `jkv --help` starts fast.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from jkv.cli import batch as batch_cli
from jkv.cli import bench as bench_cli
from jkv.cli import eval as eval_cli
from jkv.cli import methods as methods_cli
from jkv.cli import plan as aot_cli
from jkv.cli import serve as serve_cli
from jkv.cli import size as size_cli
from jkv.cli import stages as stages_cli
from jkv.cli.calibrate import calibrate
from jkv.cli.options import (
    MODEL,
    WHICH,
    Cached,
    ChatOptions,
    Chunk,
    Drawing,
    Dtype,
    Json,
    Mesh,
    Model,
    PrefillDtype,
    PrefixCacheOptions,
    Weights,
    default_cache,
    flat,
)
from jkv.cli.train import train
from jkv.utils import console
from jkv.utils.console import status
from jkv.utils.json_results import versions

if TYPE_CHECKING:
    from jkv.generation.inspect import Summary
    from jkv.models import Params

UsageError: Any = typer.BadParameter.__base__  # click's class or typer's copy; newer versions export only the subclass


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn user-facing errors into one line on stderr and exit code 1; JKV_DEBUG=1 shows the traceback instead.

    Invalid options and arguments exit with code 2. A closed pipe (`| head`) and Ctrl-C exit silently with the codes of
    their signals (141 and 130).
    """
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:  # a subclass of RuntimeError, which is caught below
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # otherwise the flush at exit would fail too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "jkv"
        print(f"error: {error.format_message().rstrip('.')} (see {command} --help)", file=sys.stderr)
        raise typer.Exit(2) from None
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if os.environ.get("JKV_DEBUG") == "1":
            raise
        print(f"error: {_said(error)}", file=sys.stderr)
        raise typer.Exit(1) from None


def _said(error: BaseException) -> str:
    """Format an error as one line, and suggest a fix if its own text has none."""
    text = textwrap.shorten(str(error) or type(error).__name__, 800)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; check the path, its permissions and the free space"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return f"out of memory; use --chunk 512, a smaller budget or --weights int8 ({text})"
    return text


class Command(TyperCommand):
    """A command that runs within `one_line`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with one_line():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with one_line():
            return super().invoke(ctx)


class Group(TyperGroup):
    """A command group that runs its commands within `one_line` and prints the help without a command."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with one_line():
            return super().make_context(info_name, args or ["--help"], parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with one_line():
            return super().invoke(ctx)


def application(*commands: Callable[..., None]) -> typer.Typer:
    """Return a command line: `jkv`'s, of several commands by name, or of one command without its name."""
    made = typer.Typer(cls=Group, add_completion=False, pretty_exceptions_enable=False)
    for command in commands:
        made.command(cls=Command if len(commands) == 1 else None)(flat(command))
    return made


app = application()


def print_version(asked: bool) -> None:
    if asked:
        print(", ".join(f"{name} {version}" for name, version in versions(("jkv", "jax", "jaxlib")).items()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions of jkv, jax and Python.", callback=print_version)
    ] = False,
) -> None:
    """Language-model inference in JAX through compressed KV caches."""


app.add_typer(eval_cli.app, name="eval", cls=Group)
bench_cli.app.command()(stages_cli.stages)
app.add_typer(bench_cli.app, name="bench", cls=Group)
app.add_typer(train, name="train", cls=Group)
app.add_typer(calibrate, name="calibrate", cls=Group)
app.command()(bench_cli.recommend)
app.command()(size_cli.size)
app.command()(aot_cli.plan)
app.command()(methods_cli.methods)
app.command()(batch_cli.batch)
app.command()(serve_cli.serve)

File = Annotated[str | None, typer.Option(metavar="PATH", help="Text file with the prompt; - is stdin.")]
Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. Default: if the model has one.")
]


def read_prompt(text: str | None, file: str | None) -> str:
    """Join the text of a file and `text` into one prompt.

    Args:
        text: Text that follows the file's; None for no text.
        file: Path of a UTF-8 file, "-" for stdin; None for no file.

    Raises:
        ValueError: The prompt is blank, or the file cannot be read or is not UTF-8.
    """
    parts = []
    if file is not None:
        try:
            raw = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
            parts.append(raw.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text: give a text file, or convert it (iconv -t UTF-8)") from None
        except OSError as error:
            raise ValueError(
                f"cannot read {file}: {error.strerror}; give a text file, or - to read from stdin"
            ) from error
    if text is not None:
        parts.append(text)
    prompt = "\n\n".join(parts)
    if not prompt.strip():
        where = f" ({file} has no text)" if file is not None else ""
        raise ValueError(f"the prompt is empty{where}: give a text, or --file PATH")
    return prompt


def _open(
    model: str,
    cache: str | None,
    dtype: str | None,
    mesh: str | None,
    weights: str | None,
    prefill_dtype: str | None,
) -> tuple[Params, str]:
    """Load a model, and return it and the cache, which is checked before the weights are loaded."""
    from jkv.io import load as loading
    from jkv.methods import parse

    parse(cache or "full")
    params = loading.load(model, dtype, mesh, weights, prefill_dtype)
    return params, cache or default_cache(params.config)


def show(pieces: Iterator[str]) -> Any:
    """Print pieces of text to stdout as they arrive, and return the generator's return value."""
    try:
        with status("compiling and reading the prompt"):
            piece = next(pieces)
        while True:
            print(piece, end="", flush=True)
            piece = next(pieces)
    except StopIteration as end:
        print(flush=True)
        return end.value


@app.command(epilog=WHICH)
@flat
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Prompt text; follows the text of --file if both are given.")
    ] = None,
    model: Model = MODEL,
    cache: Cached = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 128,
    drawing: Drawing = Drawing(),
    seed: Annotated[int, typer.Option(help="Random seed; answer i of -n uses seed + i.")] = 0,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of answers; the prompt is prefilled once.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    chunk: Chunk = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="Speculative decoding: suffix, recycle, drafter(...), or a cache; join two with |."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run the full cache; report KL and first difference.")
    ] = False,
    stored: PrefixCacheOptions = PrefixCacheOptions(),
    chat: Chat = None,
    chat_options: ChatOptions = ChatOptions(),
    file: File = None,
    dtype: Dtype = None,
    weights: Weights = None,
    prefill_dtype: PrefillDtype = None,
    mesh: Mesh = None,
    as_json: Json = False,
) -> None:
    """Generate text. The text streams to stdout; the receipt (tokens kept, bytes, time) follows on stderr."""
    text, prefix_cache = read_prompt(prompt, file), stored.open()
    params, cache = _open(model, cache, dtype, mesh, weights, prefill_dtype)
    params = chat_options.give(params)
    options: dict[str, Any] = dict(
        **vars(drawing),
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        chunk=chunk,
        compare=compare,
        n=n,
        drafter=drafter,
        prefix_cache=prefix_cache,
        chat=chat,
    )
    import jkv

    if as_json:
        out = jkv.generate(params, cache, text, **options)
        report = asdict(out.receipt) | {"ratio": out.receipt.ratio}
        print(json.dumps({"text": out.text, "tokens": out.tokens, "report": report}))
        return
    if n == 1:
        out = show(jkv.stream(params, cache, text, **options))
    else:
        out = jkv.generate(params, cache, text, **options)
        print("\n\n".join(f"[{i}] {text}" for i, text in enumerate(out.text)))
    print(f"\n{out.receipt}", file=sys.stderr)


@app.command()
def inspect(
    model: Model = MODEL,
    cache: Cached = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt text; follows the text of --file.")] = None,
    file: File = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Plot the kept tokens: out.png, .svg, .pdf")] = None,
    chunk: Chunk = None,
    chat: Chat = None,
    dtype: Dtype = None,
    weights: Weights = None,
    prefill_dtype: PrefillDtype = None,
    mesh: Mesh = None,
    as_json: Json = False,
) -> None:
    """Show what a cache holds after a prompt: tokens, positions and bytes of each layer."""
    from jkv.generation import inspect as inspecting

    if plot is not None:
        inspecting.check_path(plot)
    text = read_prompt(prompt, file)
    params, cache = _open(model, cache, dtype, mesh, weights, prefill_dtype)
    import jkv

    with status("compiling and reading the prompt"):
        held, _ = jkv.prefill(params, cache, text, reserve=1, chunk=chunk, chat=chat)
    found = inspecting.summary(held)
    if as_json:
        print(json.dumps(asdict(found) | {"nbytes": found.nbytes}))
    else:
        console.show(_layers(found, cache))
    if plot is not None:
        inspecting.plot(held, plot)
        print(f"drawn: {plot}", file=sys.stderr)


def _layers(found: Summary, cache: str) -> Table:
    seen, least = sum(found.seen) / len(found.seen), min(n for layer in found.layers for n in layer.kept)
    table = Table(
        title=f"{cache}: {least:.0f} or more of {seen:.0f} tokens per head, {found.nbytes:,} bytes",
        caption="KiB of codes + scales + metadata",
        show_footer=True,
    )
    widest = max((layer.parts for layer in found.layers), key=len)
    table.add_column("layer", justify="right", footer="all")
    table.add_column("tokens", justify="right")
    table.add_column("positions", justify="right")
    for part in widest:
        table.add_column(f"{part.name}\n{part.codec}", justify="right", footer=_kib(found, part.name))
    table.add_column("KiB", justify="right", footer=f"{found.nbytes / 1024:,.1f}")
    for i, layer in enumerate(found.layers):
        low, high = min(layer.kept), max(layer.kept)
        tokens = f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        parts = {part.name: _sizes(part.codes, part.scales, part.metadata) for part in layer.parts}
        cells = [parts.get(part.name, "-") for part in widest]
        table.add_row(str(i), tokens, f"{layer.first} to {layer.last}", *cells, f"{layer.nbytes / 1024:,.1f}")
    return table


def _kib(found: Summary, name: str) -> str:
    parts = [part for layer in found.layers for part in layer.parts if part.name == name]
    return _sizes(*(sum(getattr(part, kind) for part in parts) for kind in ("codes", "scales", "metadata")))


def _sizes(codes: int, scales: int, metadata: int) -> str:
    return " + ".join(f"{n / 1024:,.1f}" for n in (codes, scales, metadata))


@app.command()
def fetch(name: Annotated[str, typer.Argument(help=f"Model name, such as {MODEL}.")] = MODEL) -> None:
    """Download a known model (once) and print its path."""
    from jkv.io import hub

    print(hub.fetch(name))


def main(app: typer.Typer = app) -> None:
    """Run the `jkv` command line (console script entry point), or another one in the same way."""
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # a terminal that cannot show a character still shows the rest
    os.environ["JAX_ENABLE_X64"] = "0"  # jax is not imported yet: see arrays/x32.py
    app()
