"""Text compression by a model: an arithmetic coder over the next-token probabilities of a cache.

Packing and unpacking run the same steps, so that both compute the same probabilities.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.eval.results import digest
from jkv.generation.api import prefill
from jkv.generation.step import step
from jkv.io import array_file
from jkv.io.errors import FormatError
from jkv.io.fingerprint import fingerprint
from jkv.methods import parse
from jkv.models import Params
from jkv.prefix_cache.store_codec import streams
from jkv.utils.json_results import versions

KIND = "text by probabilities"


def pack(params: Params, text: str, cache: str, path: Path) -> int:
    """Compress a text to a file with -log2 p(token | tokens before it) bits per token.

    Tokens go through the cache one by one, flushes included. Probabilities depend on the machine, jax and its version,
    so `unpack` requires the same ones, and the file has a digest of the tokens.

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


def unpack(params: Params, path: Path) -> str:
    """Decompress a file of `pack`.

    Raises:
        ValueError: The file is truncated or not one of `pack`; it was packed with another model, jax or processor; or
            this machine computes other probabilities nevertheless.
    """
    try:
        arrays, meta = array_file.read(path)
    except FormatError as error:
        raise ValueError(str(error).replace("write the checkpoint again", "pack the text again")) from error
    if meta.get("kind") != KIND or set(arrays) != {"words"}:
        raise FormatError(path, "it is no text that jkv packed", "give a file of jkv eval pack")
    own = _meta(params, meta["cache"], meta["tokens"])
    if other := sorted(k for k in own if own[k] != meta.get(k)):
        said = ", ".join(f"{k} {meta.get(k)}, and not {own[k]}" for k in other)
        raise ValueError(f"{path}: it was packed with another {said}: unpack it with what packed it")
    # Decode with the same steps as `pack`, then compare the tokens' digest.
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
