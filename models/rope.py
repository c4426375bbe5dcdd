"""Rotary position embedding (RoPE) from two small exact tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

COARSE_BITS = 8
COARSE = 1 << COARSE_BITS  # position = COARSE * a + b: a and b have float64 angle tables


@dataclass(frozen=True)
class Rope:
    """Rotate the halves of a head: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), angle = pos * inv_freq.

    Angles stay exact at any position, because the rotation is the complex product of two tables computed in float64
    instead of one float32 angle. A position past the tables gives NaN, which ends the row with an error; `ahead` has no
    limit.

    Attributes:
        inv_freq: D/2 frequencies; with fewer, only the first 2 * len(inv_freq) channels rotate (none if empty).
        longest: Largest position plus one.
        scale: Factor of cos and sin (YaRN).

    >>> import jax.numpy as jnp
    >>> rope = Rope(inv_freq=(1.0, 0.1), longest=512)
    >>> rope.rotate(jnp.ones((3, 4)), jnp.array([0, 1, 300])).shape
    (3, 4)
    """

    inv_freq: tuple[float, ...]
    longest: int
    scale: float = 1.0

    def tables(self, pos: Array) -> tuple[Array, Array]:
        """Return cos and sin f32[..., D/2] of int positions; negative positions (pad tokens) count as 0."""
        freq = np.asarray(self.inv_freq, np.float64)
        fine = np.arange(COARSE)[:, None] * freq
        coarse = np.arange(-(-self.longest // COARSE))[:, None] * COARSE * freq
        p = jnp.maximum(pos, 0)
        ca, sa = (_rows(f(coarse), p >> COARSE_BITS) for f in (np.cos, np.sin))
        cb, sb = (_rows(f(fine) * self.scale, p & (COARSE - 1)) for f in (np.cos, np.sin))
        return ca * cb - sa * sb, sa * cb + ca * sb

    def ahead(self, pos: Array, offsets: Sequence[int]) -> tuple[Array, Array]:
        """Return cos and sin f32[..., D/2] averaged over the rotations to pos + offset, for any offsets.

        >>> cos, sin = Rope(inv_freq=(0.001,), longest=512).ahead(jnp.array([500]), [4000])
        >>> bool(jnp.allclose(cos, jnp.cos(4.5))), bool(jnp.allclose(sin, jnp.sin(4.5)))
        (True, True)
        """
        angle = np.asarray(offsets, np.float64)[:, None] * np.asarray(self.inv_freq, np.float64)
        cos, sin = self.tables(pos)
        a, b = (jnp.broadcast_to(jnp.asarray(f(angle).mean(0), jnp.float32), cos.shape) for f in (np.cos, np.sin))
        return cos * a - sin * b, sin * a + cos * b

    def rotate(self, x: Array, pos: Array, inverse: bool = False) -> Array:
        """Rotate x [..., D] at pos, in float32, keeping its dtype; `inverse` undoes the rotation.

        pos has the shape [...] or broadcasts to it.

        >>> rope, x, at = Rope(inv_freq=(0.5,), longest=512, scale=1.25), jnp.ones((1, 2)), jnp.array([300])
        >>> bool(jnp.allclose(rope.rotate(rope.rotate(x, at), at, inverse=True), x))
        True
        """
        if not self.inv_freq:
            return x
        cos, sin = self.tables(pos)
        if inverse:
            back = 1 / self.scale**2  # the tables and the rotated x both carry the scale
            cos, sin = cos * back, -sin * back
        half = len(self.inv_freq)
        turn, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
        x1, x2 = turn[..., :half], turn[..., half:]
        out = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)
        return jnp.concatenate([out, rest], -1) if rest.shape[-1] else out


def _rows(table: np.ndarray, index: Array) -> Array:
    """Gather f32 rows of a table at non-negative indices; NaN past its end."""
    return jnp.asarray(table, jnp.float32).at[index].get(mode="fill", fill_value=np.nan, wrap_negative_indices=False)
