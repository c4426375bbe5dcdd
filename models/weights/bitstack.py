"""Matrices as sums of blocks of one sign a weight and a product of low rank (BitStack, 2410.23918)."""

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

RANK = 16  # of a block, where nothing else is asked for
TABLES = ("embed", "head")  # in int8: a row of theirs is looked up, or they end the model

Blocks = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # signs u8[*out, n, in / 8], left f16[*out, n, k], right f16[n, k, in]


@value
class Signed(Kept):
    """A matrix [*out, in] of n blocks: w = sum_i sign_i * (left_i right_i).

    signs: uint8 [*out, n, in / 8], rounded up; a bit is 1 where the sign is +, and an input's is the higher the earlier
    it comes. left: float16 [*out, n, k]; right: float16 [n, k, in]. kind: the float type that the matrix stands for.
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
        """The same with one axis of outputs."""
        signs, left = (a.reshape(-1, *a.shape[-2:]) for a in (self.signs, self.left))
        return replace(self, signs=signs, left=left)

    def floats(self) -> Array:
        """The matrix f32[*out, in].

        >>> w = Signed(signs=jnp.array([[[0b10000000]]], jnp.uint8), left=jnp.full((1, 1, 1), 2, jnp.float16),
        ...     right=jnp.ones((1, 1, 2), jnp.float16))
        >>> w.floats().tolist()
        [[2.0, -2.0]]
        """
        w = self.flat
        return _sums(w.signs, w.left, w.right).reshape(self.shape)


def _sums(signs: Array, left: Array, right: Array) -> Array:
    """f32[out, in] of all blocks: one product of low rank at a time."""
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
    """x [n, in] with w [out, in] -> [n, out], a tile of w in floats at a time: k multiply-adds a weight and block."""
    out, width = w.shape
    half = -(-out // 2) * width  # two tiles or more, as in `weights._coded`

    def product(tile: int, w: Signed, x: Array) -> Array:
        def times(own: tuple[Array, Array], x: Array) -> Array:
            floats = _sums(*own, w.right)
            return jnp.einsum("ni,oi->no", x.astype(jnp.float32), floats)

        return tiled((w.signs, w.left), x, dtype, min(tile, half), times)

    return jax.lax.platform_dependent(w, x, cpu=partial(product, TILE), default=partial(product, LARGE))


def block_bytes(shape: tuple[int, ...], k: int) -> int:
    """Bytes of one block of a matrix [*out, in]. ValueError for a k above the rank of any such matrix.

    >>> block_bytes((4, 16), 2)
    88
    """
    out, width = prod(shape[:-1]), shape[-1]
    if not 0 < k <= min(out, width):
        raise ValueError(f"k={k}: a matrix [{out}, {width}] has a rank of 1 to {min(out, width)}")
    return out * -(-width // 8) + 2 * k * (out + width)


def decompose(w: np.ndarray, k: int, n: int, scale: np.ndarray | None = None) -> Blocks:
    """n blocks of w f32[*out, in]: of what the blocks before leave, the signs and the best product of rank k of |.|.

    R_0 = w * scale; sign_i = R_i >= 0; left_i right_i = SVD_k(|R_i|), the roots of the singular values on both sides,
    in float16; R_i+1 = R_i - sign_i * (left_i right_i), so |R_i| never grows. scale f32[in]: how much each input
    weighs, up to a factor; right has it divided out. ValueError for NaN, infinity, and k above the rank of any such w.
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
    """f64 [out, k] and [k, in], whose product is the best of rank k: by the eigenvectors of the smaller Gram matrix."""
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
    """The form of `Signed` matrices in the layers, each of as many blocks as `counts` says, and of tables in int8.

    blocks(layer, field, n, array): the first n blocks of a field's array, as `decompose` gives them.
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
    """Whether a field of a layer is kept in blocks; ValueError for those of experts."""
    if field.startswith(EACH):
        raise ValueError("bitstack weights: this model has experts, whose matrices have no blocks; use weights='int8'")
    return field in MATRICES and field not in TABLES
