"""Receipts: memory, cost and exactness of one generation."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.attention.dense import prompt_kernel
from jkv.attention.recent_window import window_kernel
from jkv.attention.selection import staying
from jkv.attention.tier_attention import reader_of
from jkv.cache.cache import Cache, Tier, tree_bytes
from jkv.cache.offload import is_far
from jkv.kernels import Choice
from jkv.methods import parse
from jkv.prompts.allocation import CacheShape
from jkv.utils.tables import html_table

ENOUGH = 32  # minimum tokens per row for a throughput figure


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The receipt of one generation.

    Attributes:
        config: the composition, also that of a given cache; "continued" if it has no name.
        exactness: the exactness claims of the composition's parts.
        rows: sequences in the batch.
        tokens_prompt: prompt tokens of all rows.
        tokens_new: generated tokens of all rows.
        tokens_kept: tokens held per layer and kv head, mean over rows.
        tokens_seen: tokens that went through the cache, mean over rows; with those before, if it was given.

        dtype: float type of uncompressed keys and values.
        bits: bits per number of keys, and of values, in tiers, metadata included; 0: no tiers.
        bytes_full: bytes of the full cache with the same capacity, in `dtype`.
        bytes_bfloat16: bytes of that full cache in bfloat16.
        bytes_kept: bytes of all arrays of the cache.
        bytes_states: bytes of recurrent layers, included in the three above; no method changes them.
        bytes_predicted: bytes predicted from the config before running.
        bytes_temporary: the decode loop's temporary bytes, as compiled.
        chunk: prompt tokens per prefill chunk; 0: the whole prompt at once.
        reading: why this chunk.
        bytes_peak_prefill: peak bytes of prefill as compiled, with the cache, without the weights.
        bytes_peak_decode: peak bytes of decoding as compiled, with the cache, without the weights.
        bytes_weights: bytes of the model.
        weights: storage format of the weight matrices.
        bytes_host: bytes of `bytes_kept` in host memory.
        bytes_disk: bytes of `bytes_kept` on disk.
        bytes_moved: bytes that a decode step moves from host or disk to the device.
        pages_hit: offloaded pages of keys, and of values, that were on the device when a step read them.
        pages_missed: offloaded pages that a step waited for.

        prefill_s: prefill seconds, without waiting for the compiler.
        decode_s: decode seconds, without waiting for the compiler or for the caller of a stream.
        first_token_s: seconds from the call to the first token, compilation included; None if none came.
        compile_s: compilation seconds.
        prefill_tokens_per_s: None if a program was being compiled meanwhile, here or in another thread, and below 32
            tokens per row, which measure a program's first run more than its speed.
        decode_tokens_per_s: the speed of the blocks that ran while nothing was being compiled; None if they have fewer
            than 32 tokens per row.
        kernels: what reads the tiers in a decode step: "xla", or the layers that each kernel serves.
        prefill_kernel: what computes attention among the prompt's tokens.
        kernels_off: why the platform's kernels do not run; "" if they do, or if there are none.

        kl: mean KL(full || compressed) in nats over the generated tokens; None if not requested.
        divergence: index of the first token that the full cache would have chosen differently; -1: none; None if not
            requested.

        passes: forward passes over the cache, plain steps included; None without drafts, as the next six.
        drafted: draft tokens verified per row, besides the next token of each pass.
        drafted_taken: draft tokens accepted.
        tokens_alone: new tokens per pass, mean over rows, if rows did not wait for each other.
        bytes_draft: bytes that the drafter held besides the cache.
        draft_pauses: (first, last) new tokens between which nothing was drafted, because no draft would have paid.
        draft_failed: index of the new token at which the drafter failed, and its error.

        tokens_stored: prompt tokens that the store had; None without a store.
        store_codec: codec that rounded the stored keys and values; "": exact.
    """

    config: str
    exactness: str
    rows: int
    tokens_prompt: int
    tokens_new: int
    tokens_kept: list[list[float]]
    tokens_seen: float
    dtype: str
    bits: tuple[float, float]
    bytes_full: int
    bytes_bfloat16: int
    bytes_kept: int
    bytes_states: int
    bytes_predicted: int
    bytes_temporary: int
    chunk: int
    reading: str
    bytes_peak_prefill: int
    bytes_peak_decode: int
    bytes_weights: int
    weights: str
    prefill_s: float
    decode_s: float
    compile_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    first_token_s: float | None
    kernels: str
    prefill_kernel: str
    kernels_off: str = ""
    kl: float | None = None
    divergence: int | None = None
    passes: int | None = None
    drafted: int | None = None
    drafted_taken: int | None = None
    tokens_alone: float | None = None
    bytes_draft: int | None = None
    draft_pauses: list[tuple[int, int]] | None = None
    draft_failed: tuple[int, str] | None = None
    tokens_stored: int | None = None
    store_codec: str = ""
    bytes_host: int = 0
    bytes_disk: int = 0
    bytes_moved: int = 0
    pages_hit: int = 0
    pages_missed: int = 0

    @property
    def ratio(self) -> float:
        """Size of the full cache in the same dtype, relative to this cache."""
        return self.bytes_full / max(self.bytes_kept, 1)

    @property
    def ratio_bfloat16(self) -> float:
        """Size of the full cache in bfloat16, relative to this cache."""
        return self.bytes_bfloat16 / max(self.bytes_kept, 1)

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table([], [re.split(" {2,}", line, maxsplit=1) for line in str(self).splitlines()])

    def __str__(self) -> str:
        seen = self.tokens_seen
        tokens, beside = f"{seen:.0f} seen; no block attends", ""
        if self.bytes_bfloat16 != self.bytes_full:
            beside = f", {_times(self.ratio_bfloat16)} than in bfloat16"
        if self.tokens_kept:
            tokens = f"{np.mean(self.tokens_kept):.0f} kept of {seen:.0f} seen, per layer and head"
        # Lines that every receipt has.
        lines = [
            f"cache        {self.config}",
            f"exactness    {self.exactness}",
            f"bytes        {self.bytes_kept:,} kept of {self.bytes_full:,} full in {self.dtype}: "
            f"{_times(self.ratio)}{beside}",
            f"codes        {self.bits[0]:.3g} bits a number of keys, {self.bits[1]:.3g} of values, metadata included",
            f"tokens       {tokens}",
            f"speed        first token after {speed(self.first_token_s, 2)} s, prefill "
            f"{speed(self.prefill_tokens_per_s, 0)} tokens/s, decode {speed(self.decode_tokens_per_s, 1)} tokens/s, "
            f"compiling {self.compile_s:.1f} s, "
            f"kernels {self.kernels} (prefill {self.prefill_kernel})",
            f"memory       {self.bytes_peak_prefill:,} bytes while the prompt is read, {self.bytes_peak_decode:,} "
            f"while decoding, beside the weights ({self.bytes_weights:,}, {self.weights})",
        ]
        # Lines that depend on the run.
        if self.chunk:
            lines.append(f"prompt       {self.reading}")
        if self.kernels_off:
            lines.append(f"kernels off  {self.kernels_off}")
        if self.bytes_states:
            lines.insert(3, f"states       {self.bytes_states:,} of these bytes, whatever the length; not compressed")
        if self.bytes_host or self.bytes_disk:
            away, where = (self.bytes_disk, "disk") if self.bytes_disk else (self.bytes_host, "the host")
            near = self.bytes_kept - self.bytes_host - self.bytes_disk
            hits, every = self.pages_hit, self.pages_hit + self.pages_missed
            asked = f", {hits:,} of {every:,} pages were there" if every else ""
            lines.insert(
                3,
                f"placement    {away:,} of these bytes on {where}, {near:,} on the device; a step moves "
                f"{self.bytes_moved:,} to it{asked}",
            )
        if self.kl is not None:
            where = "none" if self.divergence == -1 else f"at token {self.divergence}"
            lines.append(f"fidelity     KL {self.kl:.4f} nats to the full cache, first divergence {where}")
        if self.passes is not None and self.drafted is not None:
            each, pauses = self.tokens_new / self.rows / max(self.passes, 1), self.draft_pauses or []
            lines.append(f"drafts       {each:.2f} tokens a pass, {self.drafted_taken} of {self.drafted} drafted taken")
            if self.rows > 1:
                lines[-1] += f"; rows that waited for none would take {self.tokens_alone:.2f} or more"
            if pauses:
                first = ", ".join(f"{a} to {b}" for a, b in pauses[:3]) + ", ..." * (len(pauses) > 3)
                lines[-1] += f"; paused for {sum(b - a for a, b in pauses)} tokens: {first}"
            if self.draft_failed is not None:
                lines[-1] += f"; plain steps from token {self.draft_failed[0]} on: {self.draft_failed[1]}"
        if self.tokens_stored is not None:
            by = f", rounded by {self.store_codec}" if self.store_codec else ""
            lines.append(f"store        {self.tokens_stored:,} of {self.tokens_prompt:,} prompt tokens were there{by}")
        return "\n".join(lines)


def rate(tokens: int, rows: int, seconds: float) -> float | None:
    """Return tokens per second over all rows, or None below ENOUGH tokens per row.

    >>> rate(64, 2, 0.5), rate(62, 2, 0.5)
    (128.0, None)
    """
    return tokens / max(seconds, 1e-9) if tokens >= ENOUGH * rows else None


def speed(rate: float | None, digits: int) -> str:
    """Format a throughput; "-" for None.

    >>> speed(1234.56, 1), speed(None, 1)
    ('1,234.6', '-')
    """
    return "-" if rate is None else f"{rate:,.{digits}f}"


def _times(ratio: float) -> str:
    """Format a size ratio.

    >>> _times(2), _times(0.25)
    ('2.0x smaller', '4.0x larger')
    """
    return f"{ratio:.1f}x smaller" if ratio >= 1 else f"{1 / ratio:.1f}x larger"


def roomy_bytes(cache: Cache, longest: int, dtype: Any) -> int:
    """Return the bytes of a full cache in `dtype` for the cache's rows, `longest` tokens and reserve of new tokens."""
    return tree_bytes(CacheShape(parse("full"), cache.model, cache.rows, longest, cache.new, dtype).layout()[1])


def full_bytes(cache: Cache) -> int:
    """Return the bytes of all seen tokens' keys and values in the window's dtype, without padding, plus the states."""
    m = cache.model
    token = m.layers * m.heads * m.cached * cache.dtype.itemsize
    return int(cache.seen.sum()) * token + tree_bytes(cache.states)


def kept_tokens(cache: Cache) -> list[list[float]]:
    """Return the tokens per layer and kv head, mean over rows."""
    return np.asarray(cache.kept(), np.float32).mean(1).round(1).tolist()


def kept_by_row(cache: Cache) -> np.ndarray:
    """Return f[B], the tokens that each row holds, mean over layers and heads.

    Without attention layers, these are all seen tokens.
    """
    return np.asarray(cache.kept(), float).mean((0, 2)) if cache.layers else np.asarray(cache.seen, float)


def tier_bits(cache: Cache) -> tuple[float, float]:
    """Return the bits per number of keys, and of values, in tiers, metadata included; 0 without tiers."""
    tiers, m = [tier for layer in cache.layers for tier in layer.tiers], cache.model
    slots = sum(tier.pos.shape[2] * (1 if tier.head is not None else m.heads) for tier in tiers) * cache.rows
    held = [((tier.k, tier.taught[0]), (tier.v, tier.taught[1])) for tier in tiers]
    sides = ([k for k, _ in held], m.head_dim), ([v for _, v in held], m.value_dim)
    k, v = (round(8 * tree_bytes(codes) / max(slots * dim, 1), 4) for codes, dim in sides)
    return k, v


def moved_bytes(cache: Cache, ran: bool = False) -> int:
    """Return the bytes that a decode step moves from host or disk: the pages that each tier selects, or all.

    Args:
        ran: count only the share of page reads that missed the resident pages, measured over the steps that the cache
            has run. Otherwise every read counts.
    """
    total = 0
    for layer, plan in zip(cache.layers, cache.plan, strict=True):
        for tier, config in zip(layer.tiers, plan.tiers, strict=True):
            units = config.select.reads(tier.pos.shape[2]) if config.select else None
            again = tier.k if config.stateful and staying(tier)[0] is None else None  # read twice, to observe attention
            moved = sum(x.moved(units) for x in (tier.k, tier.v, again) if is_far(x))
            hits, misses = _asked([tier]) if ran else (0, 0)
            total += moved * misses // (hits + misses) if hits + misses else moved
    return total


def pages_asked(cache: Cache) -> tuple[int, int]:
    """Return hits and misses over all page reads of tiers that keep some offloaded pages on the device."""
    return _asked([tier for layer in cache.layers for tier in layer.tiers])


def _asked(tiers: list[Tier]) -> tuple[int, int]:
    """Sum the hits and misses of the tiers' resident pages."""
    every = [hot for tier in tiers for hot in staying(tier) if hot is not None]
    return sum(int(x.hits.sum()) for x in every), sum(int(x.misses.sum()) for x in every)


def kernels_of(cache: Cache) -> str:
    """Return what reads the tiers in a decode step: "xla", or the number of layers per kernel."""
    count = Counter(choice.name for choice in _readers(cache))
    return next(iter(count), "xla") if len(count) < 2 else ", ".join(f"{name} {n}" for name, n in count.items())


def prefill_kernel_of(cache: Cache) -> str:
    """Return what computes attention among a prompt's tokens and its column sums; existing tiers are read by XLA."""
    return _exact_reader(cache, prompt_kernel).name


def kernels_off(cache: Cache) -> str:
    """Return why the platform's kernels do not run, each reason once; "" if all run, or if there are none."""
    exact = (_exact_reader(cache, of) for of in (prompt_kernel, window_kernel))
    return "; ".join(dict.fromkeys(x.why for x in (*exact, *_readers(cache)) if x.why))


def _readers(cache: Cache) -> list[Choice]:
    """Return the kernel choice of each tier of each layer."""
    groups, dim = cache.model.groups, cache.model.head_dim
    return [
        reader_of(tier, config, dim, groups if tier.head is None else groups * cache.model.heads)
        for layer, plan in zip(cache.read, cache.plan, strict=True)
        for tier, config in zip(layer.tiers, plan.tiers, strict=True)
    ]


def _exact_reader(cache: Cache, of: Callable[..., Choice]) -> Choice:
    """Return the kernel choice for a prompt's tokens or the recent windows, by the function `of` that makes it."""
    if not cache.plan:
        return Choice("xla")
    m = cache.model
    return of(cache.plan[0].kernels, cache.dtype, m.head_dim, m.value_dim, m.groups)


def check_compressed(cache: Cache, bounded: bool, config: str) -> None:
    """Raise RuntimeError if the context exceeds the budget by more than the slack and nothing was evicted."""
    if not bounded or not cache.plan:
        return
    longest = int(cache.seen.max())
    slack = cache.plan[0].block + cache.plan[0].unit - 1
    least = min(plan.capacity for plan in cache.plan)
    if longest > least + slack and int(cache.kept().min(axis=(0, 2)).max()) >= longest:
        raise RuntimeError(
            f"{config} should hold {least} tokens, but all {longest} are still there: nothing was evicted"
        )


@jax.jit
def divergence(full: Array, own: Array) -> tuple[Array, Array]:
    """Return KL(full || own) f32[B,N] in nats and argmax agreement bool[B,N], from logits [B,N,V]."""
    p, q = jax.nn.log_softmax(full), jax.nn.log_softmax(own)
    return (jnp.exp(p) * (p - q)).sum(-1), full.argmax(-1) == own.argmax(-1)


def fidelity(full: Array, own: Array, tokens: np.ndarray) -> tuple[float, int]:
    """Return mean KL(full || own) in nats and the first divergence.

    Args:
        full: f32[B,N,V] logits of the full cache.
        own: f32[B,N,V] logits of the compressed cache at the same tokens.
        tokens: i32[B,N]; -1 is not counted.

    Returns:
        Mean KL, and the index of the first disagreement over all rows, or -1.
    """
    kl, same = (np.asarray(x) for x in divergence(full, own))
    live = tokens >= 0
    other = ~same & live
    first = np.where(other.any(1), other.argmax(1), tokens.shape[1]).min()
    return float(kl[live].mean()), -1 if first == tokens.shape[1] else int(first)
