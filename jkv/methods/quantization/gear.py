"""GEAR: integers, plus a low-rank term of their error, plus exact outliers."""

from __future__ import annotations

from math import floor

import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import bits_of, floats
from jkv.arrays.pytree import part
from jkv.methods.quantization.groups import Grouped, Widest
from jkv.methods.quantization.integer import Affine
from jkv.methods.registry import Axes, Positive, method
from jkv.protocols import Code


@part
class Gear(Grouped):
    """GEAR: x ~ y + q p, y from `inner` with outliers restored, q p of `rank` fitted to x - y by power iteration.

    `group` tokens are coded, moved and dropped together (grain = group): q [group,r] orthonormal, p [r,D]. Outliers are
    the floor(outliers / 2 * n) largest and smallest numbers, at least one each, of every vector of n that has a scale
    (a channel of the group, or a token); `inner` sees their vector's mean in their place. With rank=0 and outliers=0 it
    is `inner`. Source: GEAR (2403.05527), which factors a prompt as one group and counts outliers over all heads.
    """

    inner: Affine
    group: int = 64
    rank: int = 2
    outliers: float = 0.02
    rounds: int = 3

    @property
    def label(self) -> str:
        return f"{self.inner.label} and rank {self.rank}"

    @property
    def channels(self) -> bool:
        """Whether scales are per channel instead of per token."""
        return self.inner.axis == "channel"

    def aside(self, n: int) -> int:
        """Outliers at each end of a vector of n.

        >>> Gear(inner=Affine(), outliers=0.02).aside(64), Gear(inner=Affine(), outliers=0.5).aside(64)
        (1, 16)
        """
        return max(floor(self.outliers / 2 * n), 1) if self.outliers else 0

    def check(self, dim: int) -> None:
        super().check(dim)
        self.inner.check(dim)
        if self.channels and self.group != self.inner.group:
            raise ValueError(f"gear codec: group={self.group}, and scales of {self.inner.group} tokens: take as many")
        if not 0 <= self.rank <= min(self.group, dim):
            raise ValueError(f"gear codec: rank={self.rank}: from 0 to the {min(self.group, dim)} of a full rank")
        if not 0 <= self.outliers <= 1:
            raise ValueError(f"gear codec: outliers={self.outliers}: the share that is kept beside, 0 to 1")
        if self.outliers and max(self.group, dim) > 256:
            raise ValueError(f"gear codec: group={self.group}, head_dim={dim}: an outlier's place is a byte, up to 256")

    def encode(self, x: Array) -> Code:
        y = x.astype(jnp.float32).reshape(-1, self.group, x.shape[1])
        bare, mine, shared = self._aside(y)
        inner = self.inner.encode(bare.reshape(x.shape))
        slots, grains = (inner.slots, mine), (inner.grains, shared)
        code = Code(slots=(*slots, ()), grains=(*grains, ()))
        if not self.rank:
            return code
        q, p = factors(y - self.decode(code).reshape(y.shape), self.rank, self.rounds)
        q, p = (bits_of(a.astype(jnp.dtype(self.inner.scale_dtype))) for a in (q, p))
        return Code(slots=(*slots, (q.reshape(len(x), -1),)), grains=(*grains, (p.reshape(len(y), -1),)))

    def _aside(self, y: Array) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
        """Take the outliers out of y [m,group,D].

        A channel's outliers are stored for the group, with the numbers of their tokens, so each token also stores its
        own number.

        Returns:
            y with means in place of the outliers, what each token stores of the outliers, and what the group stores.
        """
        turn = (lambda a: a.swapaxes(1, 2)) if self.channels else (lambda a: a)  # vectors on the last axis, and back
        x = turn(y)
        n, k = x.shape[2], self.aside(x.shape[2])
        if not k:
            return y, (), ()
        order = jnp.argsort(x, -1)
        at = jnp.concatenate([order[:, :, :k], order[:, :, n - k :]], -1)
        kept = jnp.take_along_axis(x, at, -1).astype(jnp.dtype(self.inner.scale_dtype))
        out = (at[..., None] == jnp.arange(n)[None, None, None]).any(-2)
        bare = turn(jnp.where(out, x.mean(-1, keepdims=True), x))
        number = jnp.tile(jnp.arange(self.group, dtype=jnp.uint8), len(y))[:, None]
        rows = len(y) if self.channels else len(number)
        beside = tuple(turn(a).reshape(rows, -1) for a in (at.astype(jnp.uint8), bits_of(kept)))
        return (bare, (number,), beside) if self.channels else (bare, beside, ())

    def decode(self, code: Code) -> Array:
        (slots, mine, q), (grains, shared, p) = code.slots, code.grains
        x = self.inner.decode(Code(slots=slots, grains=grains))
        if mine:
            x = self._restored(x, mine, shared)
        if not q:
            return x
        (q, p) = (floats(a[0], self.inner.scale_dtype).astype(jnp.float32) for a in (q, p))
        m = p.shape[0]
        low = jnp.einsum("mtr,mrd->mtd", q.reshape(m, -1, q.shape[1]), p.reshape(m, q.shape[1], -1))
        return x + low.reshape(x.shape)

    def _restored(self, x: Array, mine: tuple[Array, ...], shared: tuple[Array, ...]) -> Array:
        """x [n,D] with the outliers put back in their places."""
        place, value = shared if self.channels else mine
        m, d = place.shape[0], x.shape[1]
        own = mine[0].reshape(m, -1, 1) if self.channels else jnp.arange(d, dtype=jnp.uint8)[None, None]
        place, value = (a.reshape(m, -1, d if self.channels else 1) for a in (place, value))
        y, value = x.reshape(m, -1, d), floats(value, self.inner.scale_dtype).astype(jnp.float32)
        for j in range(place.shape[1]):
            y = jnp.where(own == place[:, j : j + 1], value[:, j : j + 1], y)
        return y.reshape(x.shape)


def factors(x: Array, rank: int, rounds: int) -> tuple[Array, Array]:
    """Low-rank factors of x [m,n,D] by power iteration: q [m,n,rank] orthonormal and p [m,rank,D] = q' x."""
    start = np.random.default_rng(0).standard_normal((x.shape[2], rank)).astype(np.float32)
    p = jnp.broadcast_to(jnp.asarray(start), (x.shape[0], *start.shape))
    q = jnp.zeros((*x.shape[:2], rank))
    for i in range(rounds):
        last = i == rounds - 1
        q = x @ (jnp.linalg.qr(p)[0] if last else p)
        q = jnp.linalg.qr(q)[0] if last else q
        p = x.swapaxes(1, 2) @ q
    return q, p.swapaxes(1, 2)


@method(
    "2403.05527",
    "approximation: a prompt is factored block by block too, outliers are counted per head; the tail is exact",
    "near-lossless at 4 bits; up to 2.38x the throughput, 2.29x less peak memory",
)
def gear(
    *, bits: Positive = 3, group: Positive = Widest(64), rank: int = 1, outliers: float = 0.0, recent: int = 0
) -> Axes:
    """GEAR: what integers miss of each block comes back as a low rank, and the largest numbers stay beside them.

    The authors' 2 bits are bits=2, rank=2, outliers=0.02: at least one number at either end of a head's vector, so
    4.3 bits with 64 channels. The default is nearer to the full cache in 4.
    """
    inner = Affine(bits=bits, axis="channel", group=group), Affine(bits=bits, group=group)
    k, v = (Gear(inner=x, group=group, rank=rank, outliers=float(outliers)) for x in inner)
    return dict(codec=(k, v), recent=recent, block=group)
