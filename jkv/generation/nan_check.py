"""NaN checks: detect NaN logits and report the cause."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jkv.core.sampling import LOST
from jkv.models import Params


def check(params: Params, rows: Iterable[list[int]]) -> None:
    """Raise ValueError if the new tokens of a row end in LOST."""
    for i, tokens in enumerate(rows):
        if why := nan_message(params, tokens):
            raise ValueError(f"row {i}: {why}")


def nan_message(params: Params, tokens: list[int]) -> str | None:
    """Return the error message (cause and remedy) for a row whose new tokens end in LOST, else None."""
    if tokens[-1:] != [LOST]:
        return None
    return f"the logits after {len(tokens) - 1} new tokens are NaN, so there is no next token: {_cause(params)}"


def check_scores(params: Params, scores: np.ndarray, start: int = 0) -> None:
    """Raise ValueError if a log-probability is NaN.

    Args:
        scores: f[B,n], of given tokens.
        start: index in each row of the first token of `scores`.
    """
    rows, at = np.nonzero(np.isnan(scores))
    if len(rows):
        raise ValueError(f"row {rows[0]}: the log-probability of its token {start + at[0]} is NaN: {_cause(params)}")


def _cause(params: Params) -> str:
    """Name the weights that are not finite; if all are, the dtype whose range was exceeded."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(x.dtype, jnp.floating) and not bool(jnp.isfinite(x).all()):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return f"{name} of the weights holds NaN or infinity; get the model's files anew"
    dtype = params.embed.dtype
    return f"a number has grown beyond {dtype}" + ("" if dtype == jnp.float32 else "; load the model as float32")
