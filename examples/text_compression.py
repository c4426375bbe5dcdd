"""Lossless text compression: an arithmetic coder over a model's next-token probabilities through a compressed cache.

    python examples/text_compression.py pack FILE --out PACKED [--cache CACHE]
    python examples/text_compression.py unpack PACKED
    python examples/text_compression.py table results/pack.json       beside zlib, bz2 and xz, on held-back texts

Packing and unpacking run the same steps, so that both compute the same probabilities. It needs the extra `entropy`.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import platform
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jkv.bench.environment import check_path, meta
from jkv.cli.app import application, main
from jkv.cli.options import MODEL, Dtype, Model, Weights
from jkv.eval import corpora
from jkv.eval.results import digest
from jkv.generation.api import prefill
from jkv.generation.step import step
from jkv.io import array_file
from jkv.io import load as loading
from jkv.io.errors import FormatError
from jkv.io.fingerprint import fingerprint
from jkv.methods import parse
from jkv.models import Params
from jkv.prefix_cache.store_codec import streams
from jkv.utils.console import status
from jkv.utils.json_results import versions, write

KIND = "text by probabilities"
CACHE = "streaming(budget=512) | int4"
BYTES, TEXTS, CACHES = 8192, ("pydoc:test", "stdlib:test"), ("full", "int4", CACHE)  # of the table
OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda x: zlib.compress(x, 9),
    "bz2": lambda x: bz2.compress(x, 9),
    "xz": lambda x: lzma.compress(x, preset=9 | lzma.PRESET_EXTREME),
}


def compress(params: Params, text: str, cache: str, path: Path) -> int:
    """Compress a text to a file with -log2 p(token | tokens before it) bits per token.

    Tokens go through the cache one by one, flushes included. Probabilities depend on the machine, jax and its version,
    so `decompress` requires the same ones, and the file has a digest of the tokens.

    Args:
        params: The model.
        text: The text.
        cache: The cache, as text.
        path: The file to write.

    Returns:
        The number of tokens.

    Raises:
        ValueError: The text is empty, does not survive the tokenizer unchanged, or exceeds the cache's capacity.
    """
    tokenizer = _tokenizer(params)
    if not text:
        raise ValueError("the text is empty: give one that has a character or more")
    ids = tokenizer.within(text)
    if tokenizer.core.decode(ids, skip_special_tokens=False) != text:
        raise ValueError("the tokenizer does not give this text back as it is: pack it as another file, or with xz")
    coder = streams("packing").queue.RangeEncoder()
    rest = iter(ids)

    def choose(odds: Any) -> int:
        token = next(rest)
        coder.encode(token, odds)
        return token

    _walk(params, cache, len(ids), choose)
    array_file.write(path, {"words": coder.get_compressed()}, _meta(params, cache, len(ids)) | {"ids": _ids(ids)})
    return len(ids)


def decompress(params: Params, path: Path) -> str:
    """Decompress a file of `compress`.

    Raises:
        ValueError: The file is truncated or not one of `compress`; it was packed with another model, jax or processor;
            or this machine computes other probabilities nevertheless.
    """
    try:
        arrays, meta = array_file.read(path)
    except FormatError as error:
        raise ValueError(str(error).replace("write the checkpoint again", "pack the text again")) from error
    if meta.get("kind") != KIND or set(arrays) != {"words"}:
        raise FormatError(path, "it is no text that jkv packed", "give a file that this script packed")
    own = _meta(params, meta["cache"], meta["tokens"])
    if other := sorted(k for k in own if own[k] != meta.get(k)):
        said = ", ".join(f"{k} {meta.get(k)}, and not {own[k]}" for k in other)
        raise ValueError(f"{path}: it was packed with another {said}: unpack it with what packed it")
    # Decode with the same steps as `compress`, then compare the tokens' digest.
    coder = streams("packing").queue.RangeDecoder(arrays["words"])
    ids: list[int] = []
    otherwise = ValueError(
        f"{path}: its text does not come back, as another machine or jaxlib packed it: unpack it with that one"
    )

    def choose(odds: Any) -> int:
        try:
            ids.append(int(coder.decode(odds)))
        except AssertionError as error:  # raised by constriction for a code without a token
            raise otherwise from error
        return ids[-1]

    _walk(params, meta["cache"], meta["tokens"], choose)
    if _ids(ids) != meta["ids"]:
        raise otherwise
    return _tokenizer(params).core.decode(ids, skip_special_tokens=False)


def _walk(params: Params, cache: str, tokens: int, choose: Callable[[Any], int]) -> None:
    """Run the cache token by token; `choose` gets each next-token distribution and returns the token."""
    config, categorical = parse(cache), streams("packing").model.Categorical
    reserve = None if config.unlimited else tokens
    held, logits = prefill(params, config, [_start(params)], reserve=reserve, chunk=0)
    for _ in range(tokens):
        odds = np.asarray(jax.nn.softmax(logits[0].astype(jnp.float32)), np.float64)
        token = choose(categorical(odds / odds.sum(), perfect=False))
        held, logits = step(params, held, jnp.asarray([token], jnp.int32))


def _start(params: Params) -> list[int]:
    """Return the token before the text."""
    tokenizer = _tokenizer(params)
    return tokenizer.encode("")[:1] or list(tokenizer.eos_ids[:1]) or [0]


def _meta(params: Params, cache: str, tokens: int) -> dict[str, Any]:
    """Collect everything known that the probabilities depend on."""
    about = {"model": fingerprint(params), "dtype": str(params.embed.dtype), **versions(("jax", "jaxlib", "numpy"))}
    about |= {"device": jax.devices()[0].device_kind, "cpu": _cpu()}
    about["tokenizer"] = digest([_tokenizer(params).core.to_str(), repr(_start(params))])
    return {"kind": KIND, "cache": cache, "tokens": tokens, **about}


def _cpu() -> str:
    """Return the processor's model and a digest of its feature flags, which decide the instructions used."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n")[0] if info.exists() else ""
    told = {name.strip(): x.strip() for name, _, x in (line.partition(":") for line in first.splitlines())}
    model = told.get("model name") or told.get("CPU part") or platform.processor() or platform.machine()
    return f"{model} {digest([told.get('flags') or told.get('Features') or ''])}"


def _ids(ids: list[int]) -> str:
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def _tokenizer(params: Params) -> Any:
    if params.tokenizer is None:
        raise ValueError("texts are packed by tokens: this model was built without a tokenizer")
    return params.tokenizer


# ------------------------------------------------------------------------------------------------------- the commands


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
    parse(cache)
    check_path(out := out.expanduser())
    with status("packing"):
        tokens = compress(loading.load(model, dtype, None, weights), text, cache, out)
    raw, size = text.encode(), out.stat().st_size
    xz = len(lzma.compress(raw, preset=9))
    print(f"{tokens:,} tokens, {len(raw):,} bytes: {size:,} packed ({8 * size / len(raw):.2f} bits a byte), xz {xz:,}")


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that was packed.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="PATH", help="Output file. Default: stdout.")] = None,
    model: Model = MODEL,
    dtype: Dtype = None,
    weights: Weights = None,
) -> None:
    """Restore the text of a packed file, with the model and the cache that packed it."""
    check_path(out := out and out.expanduser())
    text = decompress(loading.load(model, dtype, None, weights), file.expanduser())
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_bytes(text.encode())


def table(out: Annotated[Path, typer.Argument(metavar="JSON", help="Result file.")]) -> None:
    """Pack the first 8,192 bytes of held-back prose and code, in float32, beside other compressors."""
    check_path(out)
    params, rows = loading.load(MODEL, "float32"), []
    about = meta(MODEL, 1, dtype="float32", text_bytes=BYTES)
    for name in TEXTS:
        text = corpora.text(name).encode()[:BYTES].decode(errors="ignore")
        own = {"text": name, "text_bytes": len(text.encode())}
        rows += [own | {"by": by, "bytes": len(shrink(text.encode()))} for by, shrink in OTHERS.items()]
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                tokens = compress(params, text, cache, path := Path(folder) / "packed")
                found = {"bytes": path.stat().st_size, "tokens": tokens, "same": decompress(params, path) == text}
                rows.append(own | {"by": "jkv", "cache": cache} | found)
                print(rows[-1], flush=True)
                write(out, about, rows)


app = application(pack, unpack, table)

if __name__ == "__main__":
    main(app)
