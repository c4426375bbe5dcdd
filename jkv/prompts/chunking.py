"""How prompts are read: whole, where memory has room for that, or else in the largest chunks that it has room for."""

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

# Tokens of a chunk. Larger ones gain nothing: products are bound by arithmetic long before, and the more queries there
# are, the fewer slots has a tile of a tier (`tiles.tile_size`): 32 for 2,048.
LEAST, MOST = 64, 2048
FLOAT = 4  # bytes of a number inside of a block: compilers keep products there in float32, whatever the weights' type


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How prompts are read: `size` tokens at a time (0: all), and why; open: fewer may be taken."""

    size: int
    why: str
    open: bool = False

    @classmethod
    def asked(cls, size: int, longest: int) -> Chunks:
        """So many tokens at a time, 0: all, whatever room there is.

        >>> Chunks.asked(512, 700).why, Chunks.asked(512, 90).size
        ('512 tokens at a time, as asked', 0)
        """
        if 0 < size < longest:
            return cls(size=size, why=f"{size:,} tokens at a time, as asked")
        return cls(size=0, why="whole" if size else "whole, as asked")

    def fewer(self, longest: int) -> Chunks | None:
        """Of prompts of at most `longest` tokens, where a compiler found no room for so many; None: as it is."""
        most = self.size or longest
        if not self.open or most <= LEAST:
            return None
        size = min(_below(most), MOST)
        return replace(self, size=size, why=f"{size:,} tokens at a time: the compiler found no room for {most:,}")


def chosen(config: CacheConfig, empty: Cache, longest: int, room: int, over: MeshPlan | None, copies: bool) -> Chunks:
    """How prompts of at most `longest` tokens are read into caches of the shapes of `empty`.

    Whole, if the `room` bytes of a device for all but the weights are enough; else in the largest chunks for which they
    are, of powers of two tokens, so that prompts share programs, up to MOST. copies: as for `needed`.
    """
    take = partial(needed, empty, over=over, copies=copies)
    whole, cuts = take(bucket(longest), fresh=True), cut(config, empty.model)
    about = f"about {gib(whole)} GiB, and {gib(room)} GiB are free"
    if not cuts:
        return Chunks(size=0, why=f"whole, as this method needs it: {about}")
    if whole <= room or longest <= LEAST:
        return Chunks(size=0, why=f"whole: {about}", open=True)
    size = min(_below(longest), MOST)
    while size > LEAST and take(size, fresh=False) > room:
        size = _below(size)
    return Chunks(size=size, why=f"{size:,} tokens at a time: whole it takes {about}", open=True)


def needed(empty: Cache, n: int, *, fresh: bool, over: MeshPlan | None, copies: bool) -> int:
    """About the bytes of a device, beside the weights, while n tokens a row are read into caches like `empty`.

    An estimate before anything is compiled: of the cache, of a block at its worst, and of the logits; 0.8 to 1.8
    times what the compiled programs take (`tests/prompts/test_chunking.py`). fresh: nothing was read before; copies:
    of 16-bit matrices the compiler makes float32 ones, as XLA for CPUs does.
    """
    model, held = empty.model, device_bytes(empty) if over is None else over.bytes(empty)
    rows = empty.rows // (1 if over is None else over.mesh.shape[ROWS])
    shares = 1 if over is None else over.mesh.shape[HEADS]  # devices that divide a block's heads and hidden units
    window = n if fresh else n + empty.room
    exact = empty.dtype.itemsize
    kinds = dict.fromkeys(map(_kind, empty.plan))
    blocks = [_attention(model, *kind, rows * n, rows * window, exact) // shares for kind in kinds]
    if model.mixers:
        blocks.append(FLOAT * rule(model.mixers).floats(model.mixers, rows, n) // shares)
    tiles = 3 * FLOAT * scores_at_once(rows * model.heads * model.groups // shares, n, window)
    feed = FLOAT * rows * n * _units(model, shares)
    between = 2 * rows * n * model.width * exact  # what a block is given, and what it gives
    worst = max(max(blocks) + tiles, feed + rows * window * model.heads * model.cached * exact // shares) + between
    logits = FLOAT * rows * model.vocab
    if copies:
        worst += FLOAT * 2 * model.hidden * model.width // shares
        logits += FLOAT * model.vocab * model.width // shares
    return held + max(worst, logits)


def spare(over: MeshPlan | None) -> int:
    """Bytes free on each device of this process; on a CPU, four fifths of the free memory for all of them together."""
    own = jax.local_devices()
    devices = own[:1] if over is None else [d for d in over.mesh.devices.flat if d in own]
    if all(d.memory_stats() for d in devices):
        return min(map(memory.free, devices))
    return memory.available() * 4 // 5 // len(devices)


def _kind(plan: LayerConfig) -> tuple[bool, bool]:
    """Whether a layer's flush is given every query of the prompt, and whether these see codes."""
    return plan.needs.new or plan.needs.prompt, plan.coded


def _attention(m: ModelConfig, queries: bool, coded: bool, new: int, window: int, exact: int) -> int:
    """Bytes of a block that attends, for so many new tokens of all rows, and tokens of their windows."""
    q, kv = m.heads * m.groups * m.head_dim, m.heads * (m.head_dim + m.value_dim)
    inside = 2 * q + kv + m.heads * m.groups * m.value_dim + m.width  # projected, rotated, and what is attended to
    kept = window * kv * (exact + 2 * FLOAT * coded) + new * q * exact * queries
    return FLOAT * new * inside + kept


def _units(m: ModelConfig, shares: int) -> int:
    """Numbers of a token in the MLP of a block, or in its experts, whose outputs are there one by one."""
    one = m.width + 3 * m.hidden // shares
    if m.experts is None:
        return one
    each = m.width + 2 * m.experts.active * m.width + 3 * m.experts.shared // shares
    return max(one, each) if len(m.experts.at) < m.depth else each


def cut(config: CacheConfig, model: ModelConfig) -> bool:
    """Whether the method takes a prompt in chunks."""
    try:
        check(config, model, LEAST)
    except ValueError:
        return False
    return True


def _below(n: int) -> int:
    """The largest power of two below n.

    >>> _below(512), _below(700)
    (256, 512)
    """
    return 1 << (n - 1).bit_length() - 1


def gib(x: float) -> str:
    """
    >>> gib(3 << 29), gib(1 << 20)
    ('1.50', '0.00')
    """
    return f"{x / 2**30:,.2f}"
