"""Weights as they are kept in memory, floats or codes of fewer bits, and the one product that all go through."""

from functools import partial, singledispatch
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.matmul import FEW, turned
from jkv.arrays.pytree import static, value

from .tiled_matmul import LARGE, TILE, never, pieces, tiled

ROWS = 256  # rows of a product that an accelerator computes as fast as it reads the weights, at most
AT_ONCE = 1 << 22  # weights whose codes a CPU adds up at a time for one row
TERMS = 64  # stretches of inputs that one fused loop of a CPU adds up
STRETCH, LEAST = 32, 8  # inputs of such a stretch, at most; of fewer the loops are slow


@value
class Steps:
    """A number for each group of inputs, f[*out, n]: values, or values * units, where several groups share a unit."""

    values: Array
    units: Array | None = None

    def wide(self) -> Array:
        """f32[*out, n]."""
        x = self.values.astype(jnp.float32)
        if self.units is None:
            return x
        shared = x.reshape(*self.units.shape, -1) * self.units.astype(jnp.float32)[..., None]
        return shared.reshape(x.shape)


class Kept:
    """A matrix [*out, in] in another form than floats: `kind` is the type it stands for, `form` the form's name."""

    kind: Any
    form: str

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.kind


@value
class Coded(Kept):
    """A matrix [*out, in] of codes: w = step * (code - zero) + low, where a group of inputs shares step and low.

    codes: int8 [*out, in]; or uint8 [*out, in / 2], where inputs j and j + span / 2 of each `span` share a byte, the
    first in its low bits. high: uint8 [*out, in / 4], two more bits of each code, inputs 32 apart in a byte; or None.
    low None: 0. kind: the float type that the matrix stands for; form: what such codes are called.
    """

    codes: Array
    step: Steps
    low: Steps | None = None
    high: Array | None = None
    span: int = static(default=0)
    zero: int = static(default=0)
    kind: Any = static(default=jnp.dtype("float32"))
    form: str = static(default="int8")

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.codes.shape[:-1], self.codes.shape[-1] * (2 if self.span else 1)

    @property
    def sharding(self) -> Any:
        return self.codes.sharding

    @property
    def group(self) -> int:
        """Inputs that share a step."""
        return self.shape[-1] // self.step.values.shape[-1]

    @property
    def finite(self) -> bool:
        """Whether all numbers are, of a matrix on the host."""
        return all(bool(np.isfinite(np.asarray(x)).all()) for x in jax.tree.leaves((self.step, self.low)))

    def integers(self) -> Array:
        """The codes less their zero, [*out, in]: int8, or int32 where they are packed."""
        if not self.span:
            return self.codes
        code = _fields(self.codes, 2, self.span // 2)
        if self.high is not None:
            code = code | (_fields(self.high, 4, 32) << 4)
        return code.astype(jnp.int32) - self.zero

    def floats(self, dtype: Any = jnp.float32) -> Array:
        """The matrix [*out, in].

        >>> w = Coded(codes=jnp.array([[1, -2]], jnp.int8), step=Steps(values=jnp.array([[0.5]])))
        >>> w.floats().tolist()
        [[0.5, -1.0]]
        """
        x, grouped = self.integers().astype(jnp.float32), (*self.step.values.shape, self.group)
        x = x.reshape(grouped) * self.step.wide()[..., None]
        if self.low is not None:
            x = x + self.low.wide()[..., None]
        return x.reshape(self.shape).astype(dtype)


@value
class Joined:
    """A stack [n, parts, size, in] of matrices that are coded differently, one after the other in their parts."""

    parts: tuple[Coded, ...]


@value
class Rounded:
    """A matrix that is multiplied in another float type, `inner`: it is rounded where it meets what it multiplies."""

    matrix: Array
    inner: Any = static()


@singledispatch
def rounded(w: Any, inner: Any) -> Any:
    """The matrix w [*out, in] as one that is multiplied in the float type `inner`; codes are as they were."""
    return Rounded(matrix=w, inner=inner)


@rounded.register(Coded)
@rounded.register(Joined)
def _(w: Any, inner: Any) -> Any:
    return w


def forms(tree: Any) -> str:
    """What the matrices of a model are kept as.

    >>> forms((jnp.ones((2, 2)), jnp.ones(3)))
    'float32'
    """
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Kept))
    return ", ".join(sorted({x.form if isinstance(x, Kept) else str(x.dtype) for x in found if x.ndim > 1}))


def _fields(x: Array, n: int, stretch: int) -> Array:
    """u8[*out, m n]: the n numbers in each byte of u8[*out, m], those of `stretch` bytes one after the other."""
    shift = jnp.arange(n, dtype=jnp.uint8) * jnp.uint8(8 // n)
    bits = x.reshape(*x.shape[:-1], -1, 1, stretch)
    bits = bits >> shift.reshape(*[1] * x.ndim, n, 1)
    return (bits & jnp.uint8(255 >> (8 - 8 // n))).reshape(*x.shape[:-1], -1)


def rows(w: Any, ids: Array) -> Array:
    """The rows of a table [V, E] that ids i32[...] name, [..., E]: of one that is coded, these alone are decoded."""
    return decoded(jax.tree.map(lambda x: jnp.take(x, ids, axis=0), w))


@singledispatch
def decoded(x: Any) -> Array:
    """A matrix in floats, whatever it is kept as."""
    return x


@decoded.register
def _(x: Coded) -> Array:
    return x.floats(x.kind)


def linear(w: Any, x: Array, dtype: Any = None) -> Array:
    """x [..., in] with w [*out, in] -> [..., *out]: the one product that all weights go through.

    `dtype` is the type of the result (default: x's). It is the type of the sums too: logits need float32. Codes are
    decoded where they are multiplied, in tiles or inside of a fused product, so no matrix is ever whole in floats.
    Stored [out, in]: the products of a decode step of SmolLM2-135M (538 MB of float32, XLA CPU, 2 cores, three runs)
    then take 18.3 to 19.5 ms (28 GB/s), against 19.2 to 19.9 ms for [in, out]; at T = 512 its layers take 565 and
    639 ms against 553 and 560 ms (two runs). That close, the checkpoints' own order wins: loading transposes nothing
    and a tied head needs no second copy.

    >>> linear(jnp.ones((3, 2)), jnp.ones((1, 2))).tolist()
    [[2.0, 2.0, 2.0]]
    """
    return product(w, x, dtype or x.dtype)


@singledispatch
def product(w: Any, x: Array, dtype: Any) -> Array:
    flat = w.reshape(-1, w.shape[-1])  # XLA's product on a CPU copies an array of more axes
    times = _of_one_row if single(x) else _of_few if prod(x.shape[:-1]) <= FEW else _product
    return times(flat, x, dtype).reshape(*x.shape[:-1], *w.shape[:-1])


def single(x: Array) -> bool:
    """Whether x [..., in] is one row."""
    return x.ndim > 1 and x.size == x.shape[-1]


def _product(w: Array, x: Array, dtype: Any) -> Array:
    return jnp.einsum("...e,oe->...o", x, w, preferred_element_type=dtype)


@partial(jax.jit, static_argnames="dtype")
def _of_one_row(w: Array, x: Array, dtype: Any) -> Array:
    """On a TPU as the first of two rows: XLA sums the product of one on vector units, slower than memory gives weights.

    For bfloat16 [10576, 2560] its schedule has 237,000 cycles for one row on v6e and 70,000 for two; v5e 388,000 and
    146,000. So it is for float16 on a GPU: one before Ampere would convert all weights to float32 for one row.
    """

    def two(w: Array, x: Array) -> Array:
        return _product(w, jnp.concatenate([x, jnp.zeros_like(x)]), dtype)[:1]

    one = partial(_product, dtype=dtype)
    on_gpu = two if x.dtype == jnp.float16 else one
    return jax.lax.platform_dependent(w, x, tpu=two, cuda=on_gpu, rocm=on_gpu, default=one)


@partial(jax.jit, static_argnames="dtype")
def _of_few(w: Array, x: Array, dtype: Any) -> Array:
    """On a CPU turned around: 2 to 5 rows, with matrices of SmolLM2-135M, take 6% to 38% less, 6 to 16 as long."""

    def cpu(w: Array, x: Array) -> Array:
        return turned(x.reshape(-1, x.shape[-1]), w, dtype).reshape(*x.shape[:-1], len(w))

    return jax.lax.platform_dependent(w, x, cpu=cpu, default=partial(_product, dtype=dtype))


@product.register
def _(w: Rounded, x: Array, dtype: Any) -> Array:
    matrix = jnp.where(never(x), jnp.zeros((), w.matrix.dtype), w.matrix)
    return product(matrix.astype(w.inner), x.astype(w.inner), dtype)


@product.register
def _(w: Joined, x: Array, dtype: Any) -> Array:
    return jnp.concatenate([product(part, x, dtype) for part in w.parts], x.ndim)


@product.register
def _(w: Coded, x: Array, dtype: Any) -> Array:
    flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), w)
    return _coded(flat, x.reshape(-1, x.shape[-1]), dtype).reshape(*x.shape[:-1], *w.shape[:-1])


@partial(jax.jit, static_argnames="dtype")
def _coded(w: Coded, x: Array, dtype: Any) -> Array:
    """x [n, in] with w [out, in] -> [n, out]."""
    # one row on a CPU is bound by memory, several by the product
    summed = len(x) == 1 and _stretch(w) >= LEAST and pieces(len(w.codes)) == 1
    # in two tiles or more: what does not depend on a loop's turn XLA takes out of the decode loop, for all matrices
    tile = AT_ONCE if summed else min(TILE, -(-w.shape[0] // 2) * w.shape[1])
    cpu = partial(tiled, tile=tile, times=_summed if summed else _of_floats)
    return jax.lax.platform_dependent(w, x, cpu=partial(cpu, dtype=dtype), default=partial(_fused, dtype=dtype))


def _fused(w: Coded, x: Array, dtype: Any) -> Array:
    """For accelerators: codes are turned into floats where the product reads them, and multiplied by steps afterwards.

    Steps of groups would have to be spread over their inputs, which costs a TPU 50 times the product. So the sum of
    each group is an output of its own where rows are few, x being spread instead; and where they are many, a tile is
    decoded at a time, its steps spread by a product with zeros and ones. v5e, [14336, 4096] in 4 bits, two rows: 2.3
    million cycles with spread steps and a copy in memory, 160,000 by groups, 406,000 by tiles, both without one.
    """
    if w.step.values.shape[-1] == 1:
        rows = jnp.concatenate([x, jnp.zeros_like(x)]) if len(x) == 1 else x  # as in `_of_one_row`
        y = _product(w.integers().astype(x.dtype), rows, jnp.float32) * w.step.wide()[None, :, 0]
        return y[: len(x)].astype(dtype)
    parts = _split(w, x)
    if len(x) * parts[0][2].shape[1] > ROWS:
        return tiled(w, x, dtype, tile=LARGE, times=_of_spread)
    y = _lows(w, x)
    for code, own, step in parts:
        n, k = len(own), step.shape[1]
        each = jnp.where(_members(k, own.shape[1], bool)[None], own[:, None], jnp.zeros((), own.dtype))
        sums = _product(code.astype(x.dtype), each.reshape(n * k, -1), jnp.float32).reshape(n, k, -1)
        y = y + (sums * step.T[None]).sum(1)
    return y.astype(dtype)


def _split(w: Coded, x: Array) -> list[tuple[Array, Array, Array]]:
    """Codes [out, m], rows [n, m] and steps f32[out, k]: of the inputs in the low bits of bytes, and in the high ones.

    So nothing is put back in order but x.
    """
    step = w.step.wide()
    if not w.span or w.high is not None:
        return [(w.integers(), x, step)]
    own = x.reshape(len(x), -1, 2, w.span // 2)
    out = []
    for f in (0, 1):
        code = ((w.codes >> jnp.uint8(4 * f)) & jnp.uint8(15)).astype(jnp.int32) - w.zero
        steps = step if w.group >= w.span else step.reshape(len(step), -1, 2)[..., f]
        out.append((code, own[:, :, f].reshape(len(x), -1), steps))
    return out


def _members(groups: int, inputs: int, dtype: Any) -> Array:
    """[groups, inputs]: 1 where the input is in the group."""
    return (jnp.arange(groups)[:, None] == jnp.arange(inputs)[None] // (inputs // groups)).astype(dtype)


def _lows(w: Coded, x: Array) -> Array:
    """f32[n, out]: what the lows add, which multiply the sum of their group's inputs."""
    if w.low is None:
        return jnp.zeros((len(x), w.shape[0]), jnp.float32)
    low = w.low.wide()
    sums = x.astype(jnp.float32).reshape(len(x), low.shape[1], -1).sum(-1)
    return jnp.einsum("ng,og->no", sums, low, precision=jax.lax.Precision.HIGHEST)


def _of_spread(w: Coded, x: Array) -> Array:
    """The product f32[n, out] of a tile, steps spread by a product of zeros and ones."""
    y, exact = _lows(w, x), jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    for code, own, step in _split(w, x):
        spread = jnp.dot(step.astype(x.dtype), _members(step.shape[1], own.shape[1], x.dtype), precision=exact)
        y = y + _product(spread * code.astype(x.dtype), own, jnp.float32)
    return y


def _of_floats(w: Coded, x: Array) -> Array:
    return _product(w.floats(), x.astype(jnp.float32), jnp.float32)


def _summed(w: Coded, x: Array) -> Array:
    """One row: y = sum over stretches of inputs of step * code * x, each n numbers an output, and then their sum.

    A CPU's loops are fast along an array of which every element is a result; XLA sums along the last axis one by one,
    and writes floats for a product. So n sums an output are made of slices of the codes, which are read once.
    """
    out, width = w.shape
    first = never(x).astype(jnp.int32)  # 0
    each, step, x = w.step.values.shape[-1] > 1, w.step.wide(), x[0].astype(jnp.float32)
    n = _stretch(w)
    unit = max(n, w.span, 128 if w.high is not None else 0, w.group if each else 0)
    units = width // unit
    pieces = next(p for p in range(1, units + 1) if units % p == 0 and (width // p <= TERMS * n or p == units))
    length = width // pieces

    def piece(i: Array, y: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(x, i * length, length)
        groups = length // w.group
        steps = jax.lax.dynamic_slice_in_dim(step, i * groups, groups, 1) if each else None
        return y + _stretches(w, i, own, steps, n)

    y = jnp.zeros((out, n), jnp.float32)
    y = piece(first, y) if pieces == 1 else jax.lax.fori_loop(0, pieces, piece, y)
    y = y @ jnp.ones(n, jnp.float32)
    if not each:
        y = y * step[:, 0]
    if w.low is not None or w.zero:
        low = -w.zero * step if w.low is None else w.low.wide()
        y = y + low @ x.reshape(low.shape[1], -1).sum(1)
    return y[None]


def _stretch(w: Coded) -> int:
    """Inputs that lie beside each other in memory and share a step, as many as are added up at once."""
    return gcd(w.group, w.span // 2 or w.shape[1], STRETCH)


def _stretches(w: Coded, i: Array, x: Array, step: Array | None, n: int) -> Array:
    """f32[out, n]: the sum over stretches of n inputs of code * x, times the step of each, without the zero; of the
    i-th inputs x [m] and their steps."""
    sums, half = [jnp.float32(0), jnp.float32(0)], w.span // 2  # two, as one sum waits for itself

    def bits(codes: Array, at: int, shift: int, most: int) -> Array:
        own = codes.shape[1] * len(x) // w.shape[1]
        part = jax.lax.dynamic_slice_in_dim(codes, i * own + at, n, 1)
        return (part >> jnp.uint8(shift)) & jnp.uint8(most)

    for a in range(0, len(x), n):
        if half:
            code = bits(w.codes, a // w.span * half + a % half, a % w.span // half * 4, 15)
        else:
            code = jax.lax.dynamic_slice_in_dim(w.codes, i * len(x) + a, n, 1)
        if w.high is not None:
            code = code | (bits(w.high, a // 128 * 32 + a % 32, a % 128 // 32 * 2, 3) << jnp.uint8(4))
        term = code.astype(jnp.float32) * x[None, a : a + n]
        g = a * (0 if step is None else step.shape[1]) // len(x)
        sums[a // n % 2] += term if step is None else term * step[:, g : g + 1]
    return sums[0] + sums[1]
