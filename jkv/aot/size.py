"""Bytes of weights, cache and peak by arithmetic: nothing is loaded, compiled or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import jax.numpy as jnp
from rich import box
from rich.table import Table

from jkv import models
from jkv.aot import cuda, tpu
from jkv.cache.cache import Cache, tree_bytes
from jkv.cache.padding import answer_bucket, bucket
from jkv.methods import parse
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig
from jkv.prompts.allocation import CacheShape
from jkv.prompts.chunking import chosen, needed
from jkv.prompts.tokenization import check_length, limit_reserve, reaching
from jkv.utils.validation import read_bytes

NEW = 256  # tokens of the context that are generated
CARDS = {  # GiB as sold; those that jkv compiles for are in cuda.py and tpu.py
    "t4": 16, "l4": 24, "a10": 24, "a100-40gb": 40, "a100-80gb": 80, "rtx-3090": 24, "rtx-4090": 24, "rtx-5090": 32,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes of a cache at a context, with the weights and the prefill around it.

    Attributes:
        cache: the composition.
        weights: bytes of the weights.
        held: bytes of the cache, as its receipt will say; of one that `divides`, about these.
        full: bytes of the full cache.
        peak: estimated bytes at the peak, weights included.
        chunk: prompt tokens per prefill chunk; 0: the whole prompt.
        memory: bytes of the device; None if not given.
    """

    cache: str
    weights: int
    held: int
    full: int
    peak: int
    chunk: int
    memory: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the memory; None without one."""
        return None if self.memory is None else self.peak <= self.memory


def shapes(config: CacheConfig, model: ModelConfig, context: int, dtype: Any, batch: int = 1) -> tuple[Cache, int]:
    """Return the shapes of the cache that `jkv.generate` makes, and its prompt tokens.

    Args:
        context: tokens of a row, of which the last 256, or the second half, are generated.

    Raises:
        ValueError: the context is longer than the model's, and the cache is bound to it.
    """
    new = min(NEW, context // 2)
    prompt = context - new
    check_length(config, model, prompt, new)
    reserve = limit_reserve(config, model, prompt, answer_bucket(new))
    if config.unlimited:
        model = reaching(model, prompt + reserve)
    shape = CacheShape(config, model, batch, bucket(prompt) + reserve, reserve, jnp.dtype(dtype))
    return shape.shapes(), prompt


def longer(model: ModelConfig, context: int) -> ModelConfig:
    """Return the model with at least this context, for the full cache that a bounded one is compared with."""
    return replace(reaching(model, context), context=max(context, model.context))


def divides(cache: str) -> bool:
    """Return whether a prompt decides how the layers share the budget, so that bytes vary a little with it."""
    return parse(cache).budget.statistic is not None


def cache_bytes(cache: str, model: ModelConfig, context: int, dtype: Any) -> int:
    """Return the bytes of a cache for one row at a context."""
    return shapes(parse(cache), model, context, dtype)[0].nbytes


def sizes(
    caches: Sequence[str],
    model: ModelConfig,
    context: int,
    dtype: str,
    *,
    batch: int = 1,
    memory: int | None = None,
    form: Any = None,
    blocks: Any = None,
    copies: bool = False,
) -> list[Size]:
    """Return the sizes of caches.

    Args:
        form: quantization of the weights, and `blocks`, those of a file, as `models.abstract` takes them.
        copies: whether the device copies 16-bit matrices to float32, as XLA for CPUs does.
    """
    weights = tree_bytes(models.abstract(model, jnp.dtype(dtype), form, blocks or {}))
    full = shapes(parse("full"), longer(model, context), context, dtype, batch)[0].nbytes
    out = []
    for cache in caches:
        config = parse(cache)
        empty, prompt = shapes(config, model, context, dtype, batch)
        free: Any = inf if memory is None else memory - weights
        chunk = chosen(config, empty, prompt, free, None, copies).size if memory is not None else 0
        peak = weights + needed(empty, chunk or bucket(prompt), fresh=not chunk, over=None, copies=copies)
        held = empty.nbytes
        out.append(Size(cache=cache, weights=weights, held=held, full=full, peak=peak, chunk=chunk, memory=memory))
    return out


def memory_of(name: str) -> int:
    """Return the memory of a device by name, or of a size with a unit, in bytes.

    Raises:
        ValueError: the name is unknown, or the size has no unit.

    >>> memory_of("t4") == memory_of("16GiB") == 16 << 30
    True
    """
    known = {card: gib << 30 for card, gib in CARDS.items()}
    known |= {chip: found[2] for chip, found in cuda.CHIPS.items()} | dict(tpu.CHIPS)
    if name.lower() in known:
        return int(known[name.lower()])
    if not name.strip()[-1:].isalpha():
        raise ValueError(f"--memory {name}: give a unit, such as {name.strip() or 4}GiB")
    try:
        return read_bytes(name)
    except ValueError:
        raise ValueError(
            f"--memory {name}: give a number with a unit, such as 16GiB, or one of {', '.join(known)}"
        ) from None


def human(n: float) -> str:
    """Format bytes in MiB, or in GiB from 1 GiB on.

    >>> human(8 << 20), human(3 << 29)
    ('8.0 MiB', '1.5 GiB')
    """
    return f"{n / 2**30:,.1f} GiB" if n >= 1 << 30 else f"{n / 2**20:,.1f} MiB"


def table(found: Sequence[Size], title: str) -> Table:
    """Format sizes as a table, one cache per row."""
    memory = found[0].memory
    fits = () if memory is None else (f"fits {human(memory)}",)
    out = Table(
        "cache", "weights", "cache bytes", "of full", "peak", *fits, box=box.MARKDOWN, title=title,
        caption="weights and cache from the config; the peak is an estimate of the prefill, 0.8 to 1.8 times",
    )  # fmt: skip
    for x in found:
        said = [] if x.fits is None else [("yes" if x.fits else "no") + (f", --chunk {x.chunk}" if x.chunk else "")]
        share, held = f"{x.held / x.full:.1%}", "~" * divides(x.cache) + human(x.held)
        out.add_row(x.cache, human(x.weights), held, share, human(x.peak), *said)
    return out
