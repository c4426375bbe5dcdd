"""The `jkv serve` command. Imports jax only when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from jkv.cli.options import (
    CACHE,
    MODEL,
    ChatOptions,
    Dtype,
    Model,
    PrefillDtype,
    PrefixCacheOptions,
    Weights,
    default_cache,
    flat,
)
from jkv.utils.console import status
from jkv.utils.optional_deps import install

TOKEN = "JKV_TOKEN"  # environment variable with the bearer token that clients must send


@flat
def serve(
    model: Model = MODEL,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache",
            help=f"Default cache ({CACHE}; full, if no layer attends). Repeat to allow more caches that refer to local "
            "folders.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to bind. Anything but localhost requires a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Model name shown to clients. Default: --model.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Sequences per running batch.")] = 8,
    prompt_tokens_limit: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt in tokens. Default: 2048, or less if the context is smaller."),
    ] = None,
    new_tokens_limit: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer in tokens. Default: 512, or less if the context is smaller."),
    ] = None,
    caches: Annotated[int, typer.Option(min=1, help="Most caches with a running batch at once.")] = 4,
    queue: Annotated[int, typer.Option(min=1, help="Most waiting sequences; further requests get status 429.")] = 64,
    token_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help=f"File with the API token. Default: ${TOKEN}, else none.")
    ] = None,
    grace: Annotated[int, typer.Option(min=0, help="Seconds to finish running requests after SIGTERM.")] = 30,
    drafter: Annotated[str | None, typer.Option(help="Speculative decoding: suffix or recycle.")] = None,
    chat_options: ChatOptions = ChatOptions(),
    stored: PrefixCacheOptions = PrefixCacheOptions(),
    dtype: Dtype = None,
    weights: Weights = None,
    prefill_dtype: PrefillDtype = None,
) -> None:
    """Serve an OpenAI-compatible HTTP API: completions, chat completions, models. A request may choose its cache."""
    token, prefix_cache = read_token(token_file), stored.open()
    from jkv.methods import parse

    for text in cache or ():
        parse(text)
    try:
        from jkv.serve.server import LOCAL, bind
        from jkv.serve.server import serve as run
    except ImportError as error:
        raise ImportError(f"jkv serve needs {error.name}: {install('serve')}") from error
    from jkv.io import load as loading
    from jkv.serve.batches import Limits
    from jkv.serve.routes import Access

    bound = bind(host, port, token)
    with status("loading"):
        params = chat_options.give(loading.load(model, dtype, None, weights, prefill_dtype))
    given = tuple(cache or (default_cache(params.config),))
    sizes = prompt_tokens_limit, new_tokens_limit
    limits = Limits.of(params.config.context, *sizes, rows=rows, caches=caches, queue=queue)
    run(
        params,
        name or model,
        given,
        limits,
        Access(token=token, hosts=(*LOCAL, host)),
        bound,
        grace,
        prefix_cache,
        drafter,
    )


def read_token(path: Path | None) -> str:
    """Read the API token from a file, or from the environment variable TOKEN; "" if there is none.

    Raises:
        ValueError: The file cannot be read, or the token is shorter than 8 characters, not ASCII or contains blanks.
    """
    if path is None:
        token = os.environ.get(TOKEN, "")
        return token if not token else _checked(token, TOKEN)
    try:
        text = path.expanduser().read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} ({error}): give a text file with the token in it") from error
    return _checked(text.strip(), str(path))


def _checked(token: str, where: str) -> str:
    if len(token) < 8 or not token.isascii() or any(x.isspace() for x in token):
        raise ValueError(f"{where}: a token has 8 or more letters, digits or signs, and no blanks")
    return token
