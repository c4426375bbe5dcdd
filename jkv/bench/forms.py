"""Forms of weights: their bytes, the time of a token, and how far the model is from the one in floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

import jkv
from jkv.bench.measure import weight_bytes
from jkv.core.compiled import forget
from jkv.generation.report import divergence
from jkv.models import Params, forward

Load = Callable[[str | None], Params]


def rows(
    load: Load, forms: Sequence[str | None], texts: np.ndarray, rest: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Of each form a row: KL (nats) of the predictions of the last `rest` tokens of texts i32[n, T] by the floats, as
    `load(None)` has them, to its own, and medians of `rounds` rounds of generation, in which the forms take turns."""
    near = {form: list(far(load, form, texts, rest)) for form in forms if form}
    held = {form: load(form) for form in forms}
    prompt, found = texts[0].tolist(), {form: [] for form in forms}
    for _ in range(rounds + 1):  # the first one compiles
        for form, params in held.items():
            report = jkv.generate(params, "full", prompt, max_new_tokens=64, stop_ids=()).report
            found[form].append((1e3 / report.decode_tokens_per_s, len(prompt) / report.prefill_tokens_per_s, report))
    for form, (_, *times) in found.items():
        yield {
            "weights": form or str(held[form].embed.dtype),
            "held": times[0][2].weights,
            "bytes": weight_bytes(held[form]),
            "ms": median(x[0] for x in times),
            "prefill_s": median(x[1] for x in times),
            "kl": float(np.mean(near[form])) if form else None,
            "kl_texts": near[form] if form else None,
        }


def far(load: Load, form: str, texts: np.ndarray, rest: int) -> Iterator[float]:
    """The KL of each text."""
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda params, ids: forward(params, ids, jnp.arange(ids.shape[1])[None])[:, -rest:])
        whole, own = load(None), load(form)
        for text in texts:
            ids = jnp.asarray(text[None], jnp.int32)
            yield float(divergence(run(whole, ids), run(own, ids))[0].mean())
    forget()


def table(rows: Sequence[dict[str, Any]]) -> Table:
    out = Table("weights", "MB", "KL", "ms a token", "of floats", "prefill, s", box=box.MARKDOWN)
    for r in rows:
        kl = "-" if r["kl"] is None else f"{r['kl']:.2g}"
        share = f"{r['ms'] / rows[0]['ms']:.2f}"
        out.add_row(r["weights"], f"{r['bytes'] / 1e6:,.1f}", kl, f"{r['ms']:.1f}", share, f"{r['prefill_s']:.2f}")
    return out
