"""BitStack matrices (2410.23918): sums of blocks, each with one sign per weight and a low-rank product."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.linalg import eigh

from jkv.arrays.pytree import static, value

from .linear import Kept, decoded, product, rounded
from .loading import Stack
from .quantize import EACH, FORMATS, MATRICES
from .tiled_matmul import LARGE, TILE, tiled

RANK = 16  # default rank of a block
TABLES = ("embed", "head")  # kept in int8, because they are lookup tables or the last product

Blocks = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # signs u8[*out, n, in / 8], left f16[*out, n, k], right f16[n, k, in]


@value
class Signed(Kept):
    """A matrix [*out, in] of n blocks: w = sum_i sign_i * (left_i right_i).

    Attributes:
        signs: uint8 [*out, n, in / 8], rounded up; bit 1 means +, and the first input has the highest bit of its byte.
        left: float16 [*out, n, k].
        right: float16 [n, k, in].
        kind: Float type that the matrix stands for.
        form: Name of the format.
    """

    signs: Array
    left: Array
    right: Array
    kind: Any = static(default=jnp.dtype("float32"))
    form: str = static(default="bitstack")

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.signs.shape[:-2], self.right.shape[-1]

    @property
    def flat(self) -> "Signed":
        """The matrix with one axis of outputs."""
        signs, left = (a.reshape(-1, *a.shape[-2:]) for a in (self.signs, self.left))
        return replace(self, signs=signs, left=left)

    def floats(self) -> Array:
        """Decode the matrix to f32[*out, in].

        >>> w = Signed(signs=jnp.array([[[0b10000000]]], jnp.uint8), left=jnp.full((1, 1, 1), 2, jnp.float16),
        ...     right=jnp.ones((1, 1, 2), jnp.float16))
        >>> w.floats().tolist()
        [[2.0, -2.0]]
        """
        w = self.flat
        return _sums(w.signs, w.left, w.right).reshape(self.shape)


def _sums(signs: Array, left: Array, right: Array) -> Array:
    """Sum all blocks to f32[out, in], one low-rank product at a time."""
    width = right.shape[-1]

    def one(i: Array, total: Array) -> Array:
        bits, a = (jax.lax.dynamic_index_in_dim(x, i, 1, False) for x in (signs, left))
        b = jax.lax.dynamic_index_in_dim(right, i, 0, False)
        size = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        positive = (bits[..., None] >> jnp.arange(7, -1, -1, dtype=jnp.uint8)[None, None]) & jnp.uint8(1)
        return total + jnp.where(positive.reshape(len(bits), -1)[:, :width] > 0, size, -size)

    return jax.lax.fori_loop(0, len(right), one, jnp.zeros((len(signs), width), jnp.float32))


@decoded.register
def _(x: Signed) -> Array:
    return x.floats().astype(x.kind)


@rounded.register
def _(w: Signed, inner: Any) -> Signed:
    return w


@product.register
def _(w: Signed, x: Array, dtype: Any) -> Array:
    y = _signed(w.flat, x.reshape(-1, x.shape[-1]), dtype)
    return y.reshape(*x.shape[:-1], *w.shape[:-1])


@partial(jax.jit, static_argnames="dtype")
def _signed(w: Signed, x: Array, dtype: Any) -> Array:
    """Multiply x [n, in] with w [out, in] -> [n, out], decoding tile by tile.

    Decoding takes k multiply-adds per weight and block.
    """
    out, width = w.shape
    half = -(-out // 2) * width  # at least two tiles, as in `linear._coded`

    def product(tile: int, w: Signed, x: Array) -> Array:
        def times(own: tuple[Array, Array], x: Array) -> Array:
            floats = _sums(*own, w.right)
            return jnp.einsum("ni,oi->no", x.astype(jnp.float32), floats)

        return tiled((w.signs, w.left), x, dtype, min(tile, half), times)

    return jax.lax.platform_dependent(w, x, cpu=partial(product, TILE), default=partial(product, LARGE))


def block_bytes(shape: tuple[int, ...], k: int) -> int:
    """Return the bytes of one block of a matrix [*out, in]; ValueError for a k above the matrix's rank.

    >>> block_bytes((4, 16), 2)
    88
    """
    out, width = prod(shape[:-1]), shape[-1]
    if not 0 < k <= min(out, width):
        raise ValueError(f"k={k}: a matrix [{out}, {width}] has a rank of 1 to {min(out, width)}")
    return out * -(-width // 8) + 2 * k * (out + width)


def decompose(w: np.ndarray, k: int, n: int, scale: np.ndarray | None = None) -> Blocks:
    """Decompose w f32[*out, in] into n blocks: signs and best rank-k product of the absolute residual.

    R_0 = w * scale; sign_i = R_i >= 0; left_i right_i = SVD_k(|R_i|), with the square roots of the singular values on
    both sides, in float16; R_i+1 = R_i - sign_i * (left_i right_i), so |R_i| never grows.

    Args:
        w: f32[*out, in].
        k: Rank of a block.
        n: Number of blocks.
        scale: f32[in], importance of each input up to a factor; it is divided out of `right`.

    Raises:
        ValueError: w has NaN or infinity, k is above its rank, or a block exceeds float16.
    """
    rest = np.array(w, np.float32).reshape(-1, w.shape[-1])
    if not np.isfinite(rest).all():
        raise ValueError("NaN or infinity in it")
    block_bytes(rest.shape, k)
    weigh = np.ones(rest.shape[1], np.float32) if scale is None else (scale / scale.mean()).astype(np.float32)
    rest *= weigh
    found = []
    for _ in range(n):
        positive = rest >= 0
        a, b = _low_rank(abs(rest), k)
        with np.errstate(over="ignore"):
            left, right = a.astype(np.float16), (b / weigh).astype(np.float16)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            raise ValueError("its blocks have numbers beyond float16: use weights='int8'")
        size = left.astype(np.float32) @ (right.astype(np.float32) * weigh)
        rest -= np.where(positive, size, -size)
        found.append((np.packbits(positive, axis=-1), left, right))
    signs, left, right = (np.stack(x, axis) for x, axis in zip(zip(*found, strict=True), (1, 1, 0), strict=True))
    lead = w.shape[:-1]
    return signs.reshape(*lead, *signs.shape[1:]), left.reshape(*lead, *left.shape[1:]), right


def _low_rank(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return f64 [out, k] and [k, in], the best rank-k approximation, from eigenvectors of the smaller Gram matrix."""
    wide = x.astype(np.float64)
    tall = len(wide) >= wide.shape[1]
    m = wide if tall else wide.T
    size = m.shape[1]
    values, vectors = eigh(m.T @ m, subset_by_index=(size - k, size - 1))
    root = np.maximum(values, 0) ** 0.25
    a = m @ vectors / np.where(root > 0, root, 1)
    b = (vectors * root).T
    return (a, b) if tall else (b.T, a.T)


@dataclass(frozen=True)
class Bitstack:
    """The weight format of `Signed` matrices in the layers, with the embedding and head in int8.

    Attributes:
        counts: Blocks per (layer, field).
        k: Rank of a block.
        blocks: blocks(layer, field, n, array) -> the first n blocks of a field's array, as `decompose` returns them.
        divided: Whether the devices of a mesh can share its arrays.
    """

    counts: Mapping[tuple[int, str], int]
    k: int
    blocks: Callable[[int, str, int, Stack], Blocks]
    divided: bool = False

    def coder(self, layer: int | None, field: str, kind: np.dtype) -> Callable[[Stack], Any] | None:
        if layer is None:
            return FORMATS["int8"].coder(layer, field, kind)
        if not signed(field):
            return None

        def code(x: Stack) -> Signed:
            signs, left, right = self.blocks(layer, field, self.counts[layer, field], x)
            return Signed(signs=signs, left=left, right=right, kind=kind)  # type: ignore[arg-type]  # on the host

        return code

    def like(self, layer: int | None, field: str, shape: tuple[int, ...], kind: np.dtype) -> Any:
        if layer is None:
            return FORMATS["int8"].like(layer, field, shape, kind)
        if not signed(field):
            return jax.ShapeDtypeStruct(shape, kind)
        n, (*out, width), one = self.counts[layer, field], shape, jax.ShapeDtypeStruct
        signs, left = one((*out, n, -(-width // 8)), jnp.uint8), one((*out, n, self.k), jnp.float16)
        right = one((n, self.k, width), jnp.float16)
        return Signed(signs=signs, left=left, right=right, kind=kind)  # type: ignore[arg-type]  # shapes alone


def signed(field: str) -> bool:
    """Return whether a field of a layer is kept in blocks; ValueError for fields of experts."""
    if field.startswith(EACH):
        raise ValueError("bitstack weights: this model has experts, whose matrices have no blocks; use weights='int8'")
    return field in MATRICES and field not in TABLES
