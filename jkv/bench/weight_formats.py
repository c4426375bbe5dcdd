"""Weight formats: bytes, time per token, and divergence from the model with float weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from rich import box
from rich.table import Table

from jkv.bench.measure import weight_bytes
from jkv.eval.quality import Follow
from jkv.generation.receipt import divergence
from jkv.methods import as_config
from jkv.models import Params
from jkv.models.weights.linear import forms as forms_of
from jkv.prompts.prefill import prefilled

Load = Callable[[str | None], Params]


def rows(load: Load, forms: Sequence[str | None], texts: np.ndarray, prefix: int) -> Iterator[dict[str, Any]]:
    """Yield a record for each weight format: bytes, speed, and KL from float weights.

    Speed is the median over texts: ms per token after the prefix, and seconds of the prefix. KL (nats) compares the
    first format's predictions after the prefix with this format's, token by token with the full cache. Formats take
    turns, and the first turn compiles.

    Args:
        load: Loads the model in a format.
        forms: Weight formats; the first one is None (floats).
        texts: Token ids i32[n, T].
        prefix: Tokens that are prefilled.
    """
    held = {form: load(form) for form in forms}
    found: dict[str | None, list[tuple[float, float, float]]] = {form: [] for form in forms}
    for text in [texts[0], *texts]:
        said: list[Array] = []
        for form, params in held.items():
            start, follow = followed(params, text[None], prefix)
            said.append(jnp.concatenate(list(follow), 1))
            found[form].append((follow.ms[-1], start, float(divergence(said[0], said[-1])[0].mean())))
    for form, (_, *turns) in found.items():
        ms, prompt, kl = zip(*turns, strict=True)
        about = {"weights": form or str(held[form].embed.dtype), "held": forms_of(held[form])}
        times = {"ms": median(ms), "ms_least": min(ms), "prefill_s": median(prompt)}
        yield about | {"bytes": weight_bytes(held[form]), **times, "kl": float(np.mean(kl)) if form else None}


def followed(params: Params, text: np.ndarray, prefix: int) -> tuple[float, Follow]:
    """Prefill the prefix of one text; return its seconds, and the `Follow` that runs through the rest."""
    rest = text.shape[1] - prefix
    cache, logits, cost, _ = prefilled(params, as_config(None), text[:, :prefix].tolist(), rest, 0)
    return cost.running, Follow(params, cache, logits, text[:, prefix:])


def table(rows: Sequence[dict[str, Any]]) -> Table:
    out = Table("weights", "MB", "KL", "ms a token", "of floats", "prefill, s", box=box.MARKDOWN)
    for r in rows:
        kl = "-" if r["kl"] is None else f"{r['kl']:.2g}"
        share = f"{r['ms'] / rows[0]['ms']:.2f}"
        out.add_row(r["weights"], f"{r['bytes'] / 1e6:,.1f}", kl, f"{r['ms']:.1f}", share, f"{r['prefill_s']:.2f}")
    return out
