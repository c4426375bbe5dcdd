"""Weights in memory, as floats or quantized codes, and the matmul that all of them use."""

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

ROWS = 256  # maximum rows that an accelerator multiplies as fast as it reads the weights
AT_ONCE = 1 << 22  # weights per tile of a CPU's product with one row
TERMS = 64  # stretches of inputs summed in one fused CPU loop
STRETCH, LEAST = 32, 8  # maximum inputs of a stretch; minimum, because loops over fewer are slow


@value
class Steps:
    """A number per group of inputs, f[*out, n].

    Attributes:
        values: The numbers, or integers to multiply by `units`.
        units: A factor that several consecutive groups share, or None.
    """

    values: Array
    units: Array | None = None

    def wide(self) -> Array:
        """Return the numbers as f32[*out, n]."""
        x = self.values.astype(jnp.float32)
        if self.units is None:
            return x
        shared = x.reshape(*self.units.shape, -1) * self.units.astype(jnp.float32)[..., None]
        return shared.reshape(x.shape)


class Kept:
    """Base of matrices [*out, in] that are not kept as floats.

    Attributes:
        kind: Float type that the matrix stands for.
        form: Name of the format.
    """

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
    """A quantized matrix [*out, in]: w = step * (code - zero) + low, with step and low per group of inputs.

    Attributes:
        codes: int8 [*out, in]; or uint8 [*out, in / 2], where inputs j and j + span / 2 of each `span` share a byte,
            the first in the low bits.
        step: Step per group.
        low: Low per group; None: 0.
        high: uint8 [*out, in / 4], two more bits per code, with inputs that are 32 apart in one byte; or None.
        span: Inputs whose codes are packed together; 0: not packed.
        zero: Code that stands for 0.
        kind: Float type that the matrix stands for.
        form: Name of the format.
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
        """Whether all steps and lows of a host matrix are finite."""
        return all(bool(np.isfinite(np.asarray(x)).all()) for x in jax.tree.leaves((self.step, self.low)))

    def integers(self) -> Array:
        """Return the codes minus their zero, [*out, in]: int8, or int32 if they are packed."""
        if not self.span:
            return self.codes
        code = _fields(self.codes, 2, self.span // 2)
        if self.high is not None:
            code = code | (_fields(self.high, 4, 32) << 4)
        return code.astype(jnp.int32) - self.zero

    def floats(self, dtype: Any = jnp.float32) -> Array:
        """Dequantize the matrix [*out, in].

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
    """A stack [n, parts, size, in] of matrices that are coded differently, concatenated along their parts."""

    parts: tuple[Coded, ...]


@value
class Rounded:
    """A matrix that is multiplied in the float type `inner`, rounded at the product."""

    matrix: Array
    inner: Any = static()


@singledispatch
def rounded(w: Any, inner: Any) -> Any:
    """Return the matrix w [*out, in] to be multiplied in the float type `inner`; quantized matrices are unchanged."""
    return Rounded(matrix=w, inner=inner)


@rounded.register(Coded)
@rounded.register(Joined)
def _(w: Any, inner: Any) -> Any:
    return w


def forms(tree: Any) -> str:
    """List the formats of a model's matrices.

    >>> forms((jnp.ones((2, 2)), jnp.ones(3)))
    'float32'
    """
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Kept))
    return ", ".join(sorted({x.form if isinstance(x, Kept) else str(x.dtype) for x in found if x.ndim > 1}))


def _fields(x: Array, n: int, stretch: int) -> Array:
    """Unpack the n numbers in each byte, u8[*out, m] -> u8[*out, m n], in runs of `stretch` bytes."""
    shift = jnp.arange(n, dtype=jnp.uint8) * jnp.uint8(8 // n)
    bits = x.reshape(*x.shape[:-1], -1, 1, stretch)
    bits = bits >> shift.reshape(*[1] * x.ndim, n, 1)
    return (bits & jnp.uint8(255 >> (8 - 8 // n))).reshape(*x.shape[:-1], -1)


def rows(w: Any, ids: Array) -> Array:
    """Gather rows of a table [V, E] at ids i32[...], [..., E]; of a quantized table only these rows are decoded."""
    return decoded(jax.tree.map(lambda x: jnp.take(x, ids, axis=0), w))


@singledispatch
def decoded(x: Any) -> Array:
    """Return a matrix in floats, whatever its format."""
    return x


@decoded.register
def _(x: Coded) -> Array:
    return x.floats(x.kind)


def linear(w: Any, x: Array, dtype: Any = None) -> Array:
    """Multiply x [..., in] with w [*out, in] -> [..., *out]; all weights go through this function.

    Codes are decoded where they are multiplied, in tiles or inside a fused product, so no whole matrix is ever in
    floats. Matrices are stored [out, in]: the products of a decode step of SmolLM2-135M (538 MB of float32, XLA CPU, 2
    cores, three runs) then take 18.3 to 19.5 ms (28 GB/s), against 19.2 to 19.9 ms for [in, out]; at T = 512 its layers
    take 565 and 639 ms against 553 and 560 ms (two runs). With times this close the checkpoints' own order is used:
    loading transposes nothing and a tied head needs no second copy.

    Args:
        w: Weights in any format.
        x: [..., in].
        dtype: Type of the result and of the sums (default: x's). Logits need float32.

    >>> linear(jnp.ones((3, 2)), jnp.ones((1, 2))).tolist()
    [[2.0, 2.0, 2.0]]
    """
    return product(w, x, dtype or x.dtype)


@singledispatch
def product(w: Any, x: Array, dtype: Any) -> Array:
    """Multiply x [..., in] with w [*out, in]; formats register their own implementation."""
    flat = w.reshape(-1, w.shape[-1])  # XLA's CPU matmul copies arrays with more axes
    times = _of_one_row if single(x) else _of_few if prod(x.shape[:-1]) <= FEW else _product
    return times(flat, x, dtype).reshape(*x.shape[:-1], *w.shape[:-1])


def single(x: Array) -> bool:
    """Return whether x [..., in] is one row."""
    return x.ndim > 1 and x.size == x.shape[-1]


def _product(w: Array, x: Array, dtype: Any) -> Array:
    return jnp.einsum("...e,oe->...o", x, w, preferred_element_type=dtype)


@partial(jax.jit, static_argnames="dtype")
def _of_one_row(w: Array, x: Array, dtype: Any) -> Array:
    """Multiply one row; on a TPU it is padded to two rows, because XLA sums a one-row product on vector units.

    That is slower than reading the weights: for bfloat16 [10576, 2560] the schedule has 237,000 cycles for one row on
    v6e and 70,000 for two; v5e 388,000 and 146,000. float16 on a GPU is padded too, because a GPU before Ampere would
    convert all weights to float32 for one row.
    """

    def two(w: Array, x: Array) -> Array:
        return _product(w, jnp.concatenate([x, jnp.zeros_like(x)]), dtype)[:1]

    one = partial(_product, dtype=dtype)
    on_gpu = two if x.dtype == jnp.float16 else one
    return jax.lax.platform_dependent(w, x, tpu=two, cuda=on_gpu, rocm=on_gpu, default=one)


@partial(jax.jit, static_argnames="dtype")
def _of_few(w: Array, x: Array, dtype: Any) -> Array:
    """Multiply a few rows, transposed on a CPU.

    With matrices of SmolLM2-135M, 2 to 5 rows take 6% to 38% less time, 6 to 16 rows take as long either way.
    """

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
    """Multiply x [n, in] with quantized w [out, in] -> [n, out]."""
    # one row on a CPU is memory-bound, several are compute-bound
    summed = len(x) == 1 and _stretch(w) >= LEAST and pieces(len(w.codes)) == 1
    # at least two tiles: XLA would hoist a loop-invariant decode out of the decode loop, for all matrices
    tile = AT_ONCE if summed else min(TILE, -(-w.shape[0] // 2) * w.shape[1])
    cpu = partial(tiled, tile=tile, times=_summed if summed else _of_floats)
    return jax.lax.platform_dependent(w, x, cpu=partial(cpu, dtype=dtype), default=partial(_fused, dtype=dtype))


def _fused(w: Coded, x: Array, dtype: Any) -> Array:
    """Multiply with codes on accelerators: codes become floats inside the product, steps are applied afterwards.

    Spreading group steps over their inputs costs a TPU 50 times the product. So with few rows, the sum of each group is
    a separate output, and x is spread instead; with many rows, one tile is decoded at a time, its steps spread by a
    product with zeros and ones. v5e, [14336, 4096] in 4 bits, two rows: 2.3 million cycles with spread steps and a copy
    in memory, 160,000 by groups, 406,000 by tiles, both without a copy.
    """
    if w.step.values.shape[-1] == 1:
        rows = jnp.concatenate([x, jnp.zeros_like(x)]) if len(x) == 1 else x  # padded as in `_of_one_row`
        y = _product(w.integers().astype(x.dtype), rows, jnp.float32) * w.step.wide()[None, :, 0]
        return y[: len(x)].astype(dtype)
    parts = _split(w, x)
    if len(x) * parts[0][2].shape[1] > ROWS:
        return tiled(w, x, dtype, tile=LARGE, times=_of_spread)
    # Few rows: a separate sum per group, then steps.
    y = _lows(w, x)
    for code, own, step in parts:
        n, k = len(own), step.shape[1]
        each = jnp.where(_members(k, own.shape[1], bool)[None], own[:, None], jnp.zeros((), own.dtype))
        sums = _product(code.astype(x.dtype), each.reshape(n * k, -1), jnp.float32).reshape(n, k, -1)
        y = y + (sums * step.T[None]).sum(1)
    return y.astype(dtype)


def _split(w: Coded, x: Array) -> list[tuple[Array, Array, Array]]:
    """Split into the inputs in the low bits of bytes and those in the high bits, so that only x is reordered.

    Returns:
        For each part, codes [out, m], rows [n, m] and steps f32[out, k].
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
    """Return [groups, inputs], 1 where the input is in the group."""
    return (jnp.arange(groups)[:, None] == jnp.arange(inputs)[None] // (inputs // groups)).astype(dtype)


def _lows(w: Coded, x: Array) -> Array:
    """Return f32[n, out], the contribution of the lows, which multiply the sum of their group's inputs."""
    if w.low is None:
        return jnp.zeros((len(x), w.shape[0]), jnp.float32)
    low = w.low.wide()
    sums = x.astype(jnp.float32).reshape(len(x), low.shape[1], -1).sum(-1)
    return jnp.einsum("ng,og->no", sums, low, precision=jax.lax.Precision.HIGHEST)


def _of_spread(w: Coded, x: Array) -> Array:
    """Multiply with a tile, f32[n, out], spreading steps by a product with zeros and ones."""
    y, exact = _lows(w, x), jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    for code, own, step in _split(w, x):
        spread = jnp.dot(step.astype(x.dtype), _members(step.shape[1], own.shape[1], x.dtype), precision=exact)
        y = y + _product(spread * code.astype(x.dtype), own, jnp.float32)
    return y


def _of_floats(w: Coded, x: Array) -> Array:
    return _product(w.floats(), x.astype(jnp.float32), jnp.float32)


def _summed(w: Coded, x: Array) -> Array:
    """Multiply one row: y = sum over stretches of inputs of step * code * x, as n partial sums per output.

    CPU loops are fast along an axis in which every element is a result, but XLA sums along the last axis sequentially,
    and writes floats to memory for a product. So n sums per output are computed from slices of the codes, which are
    read once, and summed at the end.
    """
    out, width = w.shape
    first = never(x).astype(jnp.int32)  # 0
    each, step, x = w.step.values.shape[-1] > 1, w.step.wide(), x[0].astype(jnp.float32)
    # Cut the inputs into pieces that whole groups and packed spans fit into.
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
    # Sum the partial sums, then apply a common step, the zero and the lows.
    y = y @ jnp.ones(n, jnp.float32)
    if not each:
        y = y * step[:, 0]
    if w.low is not None or w.zero:
        low = -w.zero * step if w.low is None else w.low.wide()
        y = y + low @ x.reshape(low.shape[1], -1).sum(1)
    return y[None]


def _stretch(w: Coded) -> int:
    """Return how many inputs are summed at once: those that are contiguous in memory and share a step, at most 32."""
    return gcd(w.group, w.span // 2 or w.shape[1], STRETCH)


def _stretches(w: Coded, i: Array, x: Array, step: Array | None, n: int) -> Array:
    """Sum code * x * step over stretches of n inputs, without the zero: f32[out, n].

    Args:
        w: The matrix.
        i: Index of the piece of inputs.
        x: f32[m], the inputs of this piece.
        step: Their steps, or None: without steps.
        n: Inputs of a stretch.
    """
    sums, half = [jnp.float32(0), jnp.float32(0)], w.span // 2  # two accumulators, to shorten the dependency chain

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
