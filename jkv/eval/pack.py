"""Texts by a model's probabilities: an arithmetic coder and the steps of a cache, the same ones in both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.generation.api import prefill
from jkv.generation.steps import step
from jkv.host.extras import install
from jkv.io import checkpoint
from jkv.io.errors import FormatError
from jkv.io.identity import fingerprint
from jkv.methods import parse
from jkv.models import Params

KIND = "text by probabilities"


def pack(params: Params, text: str, cache: str, path: Path) -> int:
    """Write a text as codes of its tokens, each in -log2 p(token | tokens before it) bits; how many tokens it has.

    The cache steps from token to token, and its flushes are where they fall: what a step says depends on the machine,
    jax and its version, so `unpack` asks for the same ones. Raises ValueError for an empty text, for one that the
    tokenizer does not give back as it was, and for one that the cache has no room for.
    """
    tokenizer = _tokenizer(params)
    ids = tokenizer.within(text)
    if not ids or tokenizer.core.decode(ids, skip_special_tokens=False) != text:
        raise ValueError("the tokenizer does not give this text back as it is: pack it as another file, or with xz")
    coder = _constriction().stream.queue.RangeEncoder()
    rest = iter(ids)

    def choose(odds: Any) -> int:
        token = next(rest)
        coder.encode(token, odds)
        return token

    _walk(params, cache, len(ids), choose)
    checkpoint.write(path, {"words": coder.get_compressed()}, _meta(params, cache, len(ids)))
    return len(ids)


def unpack(params: Params, path: Path) -> str:
    """The text of a file of `pack`. Raises FormatError for one that is cut or none of its own, and ValueError for one
    of another model or another jax."""
    arrays, meta = checkpoint.read(path)
    if meta.get("kind") != KIND or set(arrays) != {"words"}:
        raise FormatError(path, "it is no text that jkv packed", "give a file of jkv eval pack")
    own = _meta(params, meta["cache"], meta["tokens"])
    if other := sorted(k for k in own if own[k] != meta.get(k)):
        said = ", ".join(f"{k} {meta.get(k)}, and not {own[k]}" for k in other)
        raise ValueError(f"{path}: it was packed with another {said}: unpack it with what packed it")
    coder = _constriction().stream.queue.RangeDecoder(arrays["words"])
    ids: list[int] = []

    def choose(odds: Any) -> int:
        ids.append(int(coder.decode(odds)))
        return ids[-1]

    _walk(params, meta["cache"], meta["tokens"], choose)
    return _tokenizer(params).core.decode(ids, skip_special_tokens=False)


def _walk(params: Params, cache: str, tokens: int, choose: Callable[[Any], int]) -> None:
    """One token after the other: what is chosen of the odds after those before it."""
    config, categorical = parse(cache), _constriction().stream.model.Categorical
    start = params.tokenizer.encode("")[:1] or list(params.tokenizer.eos_ids[:1]) or [0]
    held, logits = prefill(params, config, [start], room=None if config.unlimited else tokens, chunk=0)
    for _ in range(tokens):
        odds = np.asarray(jax.nn.softmax(logits[0].astype(jnp.float32)), np.float64)
        token = choose(categorical(odds / odds.sum(), perfect=False))
        held, logits = step(params, held, jnp.asarray([token], jnp.int32))


def _meta(params: Params, cache: str, tokens: int) -> dict[str, Any]:
    about = {"model": fingerprint(params), "dtype": str(params.embed.dtype), "jax": jax.__version__}
    return {"kind": KIND, "cache": cache, "tokens": tokens, **about, "device": jax.devices()[0].device_kind}


def _tokenizer(params: Params) -> Any:
    if params.tokenizer is None:
        raise ValueError("texts are packed by tokens: this model was built without a tokenizer")
    return params.tokenizer


def _constriction() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise ImportError(f"packing needs constriction: {install('entropy')}") from error
    return constriction
