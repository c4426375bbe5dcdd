"""Prefill chunk size: the whole prompt if memory allows, else the largest chunks that fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax

from jkv.attention.dense import scores_at_once
from jkv.cache.cache import Cache, device_bytes
from jkv.cache.padding import bucket
from jkv.cache.spec import LayerConfig
from jkv.core.sharding import MeshPlan
from jkv.kernels import HEADS, ROWS
from jkv.methods.compatibility import check
from jkv.methods.config import CacheConfig
from jkv.models import ModelConfig, rule
from jkv.utils import memory

# Tokens per chunk. Larger chunks gain nothing: matmuls are compute-bound long before, and with more queries a tile of a
# tier has fewer slots: 32 at 2,048 queries.
LEAST, MOST = 64, 2048
FLOAT = 4  # bytes per activation inside a block: compilers keep products in float32 for weights of any type


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The prefill chunk size and its reason.

    Attributes:
        size: tokens per chunk; 0: the whole prompt.
        why: the reason, for the receipt.
        open: whether smaller chunks may be tried.
    """

    size: int
    why: str
    open: bool = False

    @classmethod
    def asked(cls, size: int, longest: int) -> Chunks:
        """Return a requested chunk size, 0 for the whole prompt, regardless of memory.

        >>> Chunks.asked(512, 700).why, Chunks.asked(512, 90).size
        ('512 tokens at a time, as asked', 0)
        """
        if 0 < size < longest:
            return cls(size=size, why=f"{size:,} tokens at a time, as asked")
        return cls(size=0, why="whole" if size else "whole, as asked")

    def fewer(self, longest: int) -> Chunks | None:
        """Return the next smaller chunk size after an out-of-memory error, or None if there is none.

        Args:
            longest: tokens of the longest prompt.
        """
        most = self.size or longest
        if not self.open or most <= LEAST:
            return None
        size = min(_below(most), MOST)
        return replace(self, size=size, why=f"{size:,} tokens at a time: the compiler found no room for {most:,}")


def chosen(config: CacheConfig, empty: Cache, longest: int, free: int, over: MeshPlan | None, copies: bool) -> Chunks:
    """Choose how to prefill prompts of at most `longest` tokens.

    The whole prompt if it fits; else the largest chunk that does, a power of two up to MOST, so that prompts share
    programs.

    Args:
        empty: shapes of the empty cache.
        free: free bytes per device, weights already subtracted.
        over: the mesh, if any.
        copies: as in `needed`.
    """
    take = partial(needed, empty, over=over, copies=copies)
    whole, cuts = take(bucket(longest), fresh=True), cut(config, empty.model)
    about = f"about {gib(whole)} GiB, and {gib(free)} GiB are free"
    if not cuts:
        return Chunks(size=0, why=f"whole, as this method needs it: {about}")
    if whole <= free or longest <= LEAST:
        return Chunks(size=0, why=f"whole: {about}", open=True)
    size = min(_below(longest), MOST)
    while size > LEAST and take(size, fresh=False) > free:
        size = _below(size)
    return Chunks(size=size, why=f"{size:,} tokens at a time: whole it takes {about}", open=True)


def needed(empty: Cache, n: int, *, fresh: bool, over: MeshPlan | None, copies: bool) -> int:
    """Estimate the bytes per device, without the weights, to prefill n tokens per row.

    Counts the cache, the most expensive block, and the logits, before anything is compiled; 0.8 to 1.8 times what the
    compiled programs take (`tests/prompts/test_chunking.py`).

    Args:
        empty: shapes of the empty cache.
        n: tokens per row and chunk.
        fresh: whether the cache is still empty.
        over: the mesh, if any.
        copies: whether the compiler copies 16-bit matrices to float32, as XLA for CPUs does.
    """
    model, held = empty.model, device_bytes(empty) if over is None else over.bytes(empty)
    rows = empty.rows // (1 if over is None else over.mesh.shape[ROWS])
    shares = 1 if over is None else over.mesh.shape[HEADS]  # devices that share a block's heads and hidden units
    window = n if fresh else n + empty.recent_size
    exact = empty.dtype.itemsize
    kinds = dict.fromkeys(map(_kind, empty.plan))
    # The most expensive block: attention or recurrence, attention's tiles, the MLP, and its input and output.
    blocks = [_attention(model, *kind, rows * n, rows * window, exact) // shares for kind in kinds]
    if model.mixers:
        blocks.append(FLOAT * rule(model.mixers).floats(model.mixers, rows, n) // shares)
    tiles = 3 * FLOAT * scores_at_once(rows * model.heads * model.groups // shares, n, window)
    feed = FLOAT * rows * n * _units(model, shares)
    between = 2 * rows * n * model.width * exact  # a block's input and output
    worst = max(max(blocks) + tiles, feed + rows * window * model.heads * model.cached * exact // shares) + between
    logits = FLOAT * rows * model.vocab
    if copies:
        worst += FLOAT * 2 * model.hidden * model.width // shares
        logits += FLOAT * model.vocab * model.width // shares
    return held + max(worst, logits)


def spare(over: MeshPlan | None) -> int:
    """Return the free bytes of each local device; on CPUs, an equal share of four fifths of the free memory."""
    own = jax.local_devices()
    devices = own[:1] if over is None else [d for d in over.mesh.devices.flat if d in own]
    if all(d.memory_stats() for d in devices):
        return min(map(memory.free, devices))
    return memory.available() * 4 // 5 // len(devices)


def _kind(plan: LayerConfig) -> tuple[bool, bool]:
    """Return whether a layer's flush reads every query of the prompt, and whether prompt queries attend to codes."""
    return plan.needs.new or plan.needs.prompt, plan.coded


def _attention(m: ModelConfig, queries: bool, coded: bool, new: int, window: int, exact: int) -> int:
    """Return the bytes of an attention block.

    Args:
        queries: whether the flush reads every query of the prompt.
        coded: whether prompt queries attend to encoded keys and values.
        new: new tokens of all rows.
        window: window tokens of all rows.
        exact: bytes per uncompressed number.
    """
    q, kv = m.heads * m.groups * m.head_dim, m.heads * (m.head_dim + m.value_dim)
    inside = 2 * q + kv + m.heads * m.groups * m.value_dim + m.width  # projections, rotated queries, attention output
    kept = window * kv * (exact + 2 * FLOAT * coded) + new * q * exact * queries
    return FLOAT * new * inside + kept


def _units(m: ModelConfig, shares: int) -> int:
    """Return the activations per token of an MLP, or of its experts, whose outputs are computed one by one."""
    one = m.width + 3 * m.hidden // shares
    if m.experts is None:
        return one
    each = m.width + 2 * m.experts.active * m.width + 3 * m.experts.shared // shares
    return max(one, each) if len(m.experts.at) < m.depth else each


def cut(config: CacheConfig, model: ModelConfig) -> bool:
    """Whether the method can prefill in chunks."""
    try:
        check(config, model, LEAST)
    except ValueError:
        return False
    return True


def _below(n: int) -> int:
    """Return the largest power of two below n.

    >>> _below(512), _below(700)
    (256, 512)
    """
    return 1 << (n - 1).bit_length() - 1


def gib(x: float) -> str:
    """Format bytes as GiB.

    >>> gib(3 << 29), gib(1 << 20)
    ('1.50', '0.00')
    """
    return f"{x / 2**30:,.2f}"
