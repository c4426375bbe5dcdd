"""Weight formats compared by bytes, perplexity, and KL to the unquantized model. Nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich import box
from rich.table import Table

from jkv.cache.cache import tree_bytes
from jkv.generation.receipt import divergence
from jkv.models import Params, forward
from jkv.models.weights.linear import forms as held


def rows(load: Callable[[str | None], Params], forms: Sequence[str | None], ids: np.ndarray, prefix: int) -> Iterator:
    """Measure each weight format, one row each.

    Args:
        load: Loads the model in a format; None is the unquantized model.
        forms: The formats, the first of which is None.
        ids: i32[n,T], texts, each read in one pass.
        prefix: Tokens of each text that are not scored.

    Yields:
        `weights`, `held` (formats in use), `bytes` of all weights, `ppl`, and `kl`, the mean KL in nats from the
        unquantized model (None for itself).
    """
    whole: list[Array] = []
    for form in forms:
        params = load(form)
        said = [_said(params, jnp.asarray(text[None]), prefix) for text in ids]
        whole = whole or said
        kl = np.mean([float(divergence(a, b)[0].mean()) for a, b in zip(whole, said, strict=True)])
        nll = np.mean([_cost(a, text[prefix:]) for a, text in zip(said, ids, strict=True)])
        name = form or str(params.embed.dtype)
        about = {"weights": name, "held": held(params), "bytes": tree_bytes(params)}
        yield about | {"ppl": float(np.exp(nll)), "kl": float(kl) if form else None}


@partial(jax.jit, static_argnames="prefix")
def _said(params: Params, ids: Array, prefix: int) -> Array:
    """Compute the logits f32[1, T - prefix, V] that predict the tokens after `prefix`."""
    pos = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return forward(params, ids, pos)[:, prefix - 1 : -1]


def _cost(logits: Array, tokens: np.ndarray) -> float:
    """Compute the mean negative log-likelihood of tokens, in nats."""
    said = jax.nn.log_softmax(logits[0])
    return -float(jnp.take_along_axis(said, jnp.asarray(tokens)[:, None], 1).mean())


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Build a table of rows from `rows`."""
    out = Table("weights", "held as", "MB", "perplexity", "KL", box=box.MARKDOWN)
    for r in rows:
        kl = "-" if r["kl"] is None else f"{r['kl']:.2g}"
        out.add_row(r["weights"], r["held"], f"{r['bytes'] / 1e6:,.1f}", f"{r['ppl']:.2f}", kl)
    return out
