"""Tile operations of the GPU kernel in registers: on the hardware, or as plain jax under the interpreter.

Shapes: n slots per tile, r query rows, w bytes per slot. Matrices have the layout of wgmma's results (four warps with
16 rows each); a row vector has one number per row of a matrix, a column vector one per column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jkv.arrays.bitpacking import select
from jkv.kernels.decode_attention.gpu_layout import (
    UNIT,
    UNIT8,
    Bytes,
    contracted,
    entries_of,
    key_bytes,
    matrix_layout,
    mgpu,
    plane,
    plgpu,
    registers,
    row_layout,
    value_bytes,
)

f16, f32, i32 = jnp.float16, jnp.float32, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
Ref = Any
PLAIN = 2.0**14  # factor that makes a subnormal code a normal number


def rows(x: Array, like: tuple[int, ...]) -> Array:
    """Broadcast a row vector to a matrix."""
    return jax.lax.broadcast_in_dim(x, like, (0,))


def columns(x: Array, like: tuple[int, ...]) -> Array:
    return jax.lax.broadcast_in_dim(x, like, (1,))


def operand(width: int, dtype: Any) -> tuple[Any, ...]:
    """Return the shared-memory transforms with which tensor cores read a matrix in slices of `width` columns."""
    bits = jnp.dtype(dtype).itemsize * 8
    if width * bits < 256:  # the narrowest swizzle is 32 bytes; codes are read by loads, which need none
        return ()
    swizzle = plgpu.find_swizzle(width * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


@dataclass(frozen=True)
class Ops:
    """The operations of a tile.

    Attributes:
        interpret: Use plain jax, because the interpreter has no register layouts, transposed refs or wgmma on
            registers.
        plain: Keep subnormal codes away from the tensor cores.
    """

    interpret: bool = False
    plain: bool = False

    def place(self, x: Array, layout: Any) -> Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        return self.place(jnp.full(shape, value, f32), WGMMA if len(shape) == 2 else COLUMN)

    def unit(self, bits: int, table: bool = False) -> float:
        """Return the value of code 1 in `key_codes` and `value_codes`; table entries are not scaled."""
        return 1.0 if table else (UNIT if bits else UNIT8) * (PLAIN if self.plain else 1)

    def row(self, ref: Ref) -> Array:
        return ref[...] if self.interpret else load(ref, ROW)

    def read(self, ref: Ref, piece: int) -> Array:
        """Read ref [n] from any memory, `contracted` by `piece`; `as_row` turns the result into a row vector."""
        if self.interpret:
            return contracted(ref[...], piece)
        return load(ref, row_layout(ref.shape[0], piece) if piece else ROW)

    def as_row(self, x: Array, piece: int) -> Array:
        return x if self.interpret or not piece else ordered_row(x, row_layout(x.shape[0], piece))

    def column(self, ref: Ref) -> Array:
        return ref[...] if self.interpret else load(ref, COLUMN)

    def matrix(self, ref: Ref) -> Array:
        return self.place(ref[...], WGMMA)

    def loose(self, ref: Ref) -> Array:
        """Read a matrix from a row-major ref, despite bank conflicts between its rows."""
        return ref[...] if self.interpret else load(ref, WGMMA)

    def ordered_matrix(self, ref: Ref, piece: int) -> Array:
        """Read floats [n,k] of ref, the rows `contracted` by `piece`."""
        if self.interpret:
            return contracted(ref[...], piece)
        return renamed(ref, matrix_layout(ref.shape, piece))

    def index(self, shape: tuple[int, ...], axis: int) -> Array:
        if self.interpret:
            return jax.lax.broadcasted_iota(i32, shape, axis)
        return plgpu.broadcasted_iota(i32, shape, axis, layout=WGMMA)

    def matmul(self, *products: tuple[list[Any], list[Ref]], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """Compute, for each (a, b), the sum of a_i @ b_i.T as f32[n,r].

        Args:
            products: Pairs of operands: a [n,k] in registers or refs, b refs [r,k].
            meanwhile: Called while the last products are running.
        """
        if self.interpret:
            meanwhile()
            return [
                sum(x[...].astype(f32) @ y[...].astype(f32).T for x, y in zip(*two, strict=True)) for two in products
            ]

        if len(products) > 2:  # wait after every two, because registers do not suffice for more
            *before, last = (products[i : i + 2] for i in range(0, len(products), 2))
            return [x for two in before for x in self.matmul(*two)] + self.matmul(*last, meanwhile=meanwhile)

        def run(*sums: Any) -> list[Array]:
            for acc, two in zip(sums, products, strict=True):
                for x, y in zip(*two, strict=True):
                    plgpu.wgmma(acc, x, y.T)
            meanwhile()
            return [acc[...] for acc in sums]

        return pl.run_scoped(
            run, *[plgpu.WGMMAAccumulatorRef((a[0].shape[0], b[0].shape[0]), f32) for a, b in products]
        )

    def add(self, acc: Array, a: Array, b: Ref) -> Array:
        """Return acc f32[n,r] + a @ b, computed in the registers of acc; a [n,k] in registers, b a ref [k,r]."""
        if self.interpret:
            return acc + a.astype(f32) @ b[...].astype(f32)
        product: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
        return product(plgpu.WGMMAAccumulatorRef.init(acc))

    def stack(self, parts: list[Array]) -> Array:
        """Stack k matrices [64,r] to [64 * k, r]; only renames registers."""
        if self.interpret:
            return jnp.concatenate(parts)
        shape = (64 * len(parts), parts[0].shape[1])

        @inline([WGMMA] * len(parts), plgpu.ShapeDtypeStruct(shape, parts[0].dtype, WGMMA))
        def name(_: Any, *parts: Any) -> Any:
            registers = stacked([x.registers for x in parts])
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        return name(*parts)

    def put_transposed(self, ref: Ref, x: Array) -> None:
        """Store x [n,r] transposed into ref [r,n]."""
        if self.interpret:
            ref[...] = x.T
        else:
            ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def key_codes(
        self, refs: list[Ref], bits: int, piece: int, span: int, shift: bool, table: list[Array]
    ) -> list[Array]:
        """Unpack key bytes [n,w] into one f16[n,w] per field.

        Code c of field j becomes c * 2**(b j) * unit, where b is `plane(bits)`; with `shift` it becomes c * unit.

        Args:
            refs: The bytes; with 3 bits also the third bits, [n,w/2].
            bits: Bits per code; 0 for floats of 8 bits.
            piece: Channels are `contracted` within this many; 0: stored order.
            span: Slots are `contracted` within this many; 0: stored order.
            shift: Whether to shift all fields to the same bits.
            table: Words of the table whose entries the codes select; empty for plain codes.
        """
        if self.interpret:
            planes = [contracted(contracted(x, span), piece, 1) for x in plain_planes(refs, 1)]
            return self.numbers(planes, bits, shift, table)
        return self.registers(refs, key_bytes(refs[0].shape, piece, span), bits, shift, table)

    def value_codes(self, refs: list[Ref], bits: int, fold: int, span: int, table: list[Array]) -> list[Array]:
        """Unpack value bytes [w,n] into one f16[w * fold, n / fold] per field, as `key_codes` does without `shift`.

        Slots are `contracted` by `span`. The parts of a folded tile are stacked as rows.
        """
        if self.interpret:
            planes = [contracted(x, span, 1) for x in plain_planes(refs, 0)]
            return self.numbers([jnp.concatenate(jnp.split(x, fold, 1)) for x in planes], bits, False, table)
        return self.registers(refs, value_bytes(refs[0].shape, fold, span), bits, False, table)

    def numbers(self, planes: list[Array], bits: int, shift: bool, table: list[Array]) -> list[Array]:
        if not table:
            return plain_fields(planes, bits, shift, self.unit(bits))
        entries = entries_of(jnp.stack(table))
        return [select(code, entries) for code in plain_fields(planes, bits, True, 1.0)]

    def registers(self, refs: list[Ref], how: Bytes, bits: int, shift: bool, table: list[Array]) -> list[Array]:
        out = unpacked(refs, how, bits, shift, table)
        return [y * jnp.full_like(y, PLAIN) for y in out] if self.plain and not table else out


def load(ref: Ref, layout: Any) -> Array:
    """Load a ref in a layout, and allow bank conflicts between rows, which the default load rejects."""
    read: Any = plgpu.load
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return read(ref, *index, layout=layout, optimized=False)


def stacked(registers: list[np.ndarray]) -> np.ndarray:
    """Stack a thread's registers of several matrices along the first axis, which advances by 64 rows."""
    return np.concatenate(registers)


def inline(layouts: list[Any], result: Any) -> Any:
    """Wrap a function on a thread's registers as a function on arrays in these layouts."""
    return plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=result)


def renamed(ref: Ref, layout: Any) -> Array:
    """Load a ref by a layout, and reinterpret each thread's registers as a matrix in the WGMMA layout."""

    @inline([layout], plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, WGMMA))
    def name(_: Any, x: Any) -> Any:
        word = ir.IntegerType.get_signless(32)  # a detour, so that jax does not merge the two layouts
        same = [mgpu.utils.bitcast(mgpu.utils.bitcast(y, word), y.type) for y in x.registers.flat]
        return in_layout(WGMMA, x.shape, same)

    return name(load(ref, layout))


def ordered_row(x: Array, layout: Any) -> Array:
    """Convert pairs of entries per thread into a row vector."""

    @inline([layout], plgpu.ShapeDtypeStruct(x.shape, x.dtype, ROW))
    def name(_: Any, x: Any) -> Any:
        one = ir.VectorType.get((1,), x.mlir_dtype)
        singles = [vector.extract_strided_slice(one, y, [i], [1], [1]) for y in x.registers.flat for i in range(2)]
        return in_layout(ROW, x.shape, singles, x.is_signed)

    return name(x)


def in_layout(layout: Any, shape: tuple[int, ...], registers: list[Any], signed: bool | None = None) -> Any:
    target = layout.to_mgpu()
    some = np.empty(len(registers), object)
    some[:] = registers
    return mgpu.FragmentedArray(
        _registers=some.reshape(target.registers_shape(shape)), _layout=target, _is_signed=signed
    )


def unpacked(refs: list[Ref], how: Bytes, bits: int, shift: bool, table: list[Array]) -> list[Array]:
    """Unpack bytes into f16 fields: codes as subnormal numbers, or entries of a table."""
    shape, layouts = (64 * how.words.shape[0], 16 * how.words.shape[1]), [how.layout, how.thirds][: len(refs)]
    results = tuple(plgpu.ShapeDtypeStruct(shape, f16, WGMMA) for _ in range(8 // (plane(bits) or 8)))

    @inline([*layouts, *[ROW for _ in table]], results)
    def unpack(_: Any, *args: Any) -> Any:
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F16Type.get())
        planes = [[y for register in x.registers.flat for y in words_of(register)] for x in args[: len(refs)]]
        entries = [mgpu.utils.bitcast(x.registers.flat[0], word) for x in args[len(refs) :]]
        fields = registers(Words, planes, how, bits, shift, entries)
        return tuple(in_layout(WGMMA, shape, [mgpu.utils.bitcast(x, pair) for x in some]) for some in fields)

    alike = [plgpu.layout_cast(jnp.full((64,), x, i32), ROW) for x in table]
    return list(unpack(*(load(ref, layout) for ref, layout in zip(refs, layouts, strict=True)), *alike))


class Words:
    """A thread's operations on 32-bit words, for `registers`."""

    @staticmethod
    def constant(x: int) -> Any:
        return mgpu.utils.c(x, ir.IntegerType.get_signless(32))

    @staticmethod
    def moved(x: Any, right: int) -> Any:
        shift = arith.shrui if right > 0 else arith.shli
        return shift(x, Words.constant(abs(right))) if right else x

    @staticmethod
    def masked(x: Any, mask: int) -> Any:
        return arith.andi(x, Words.constant(mask))

    @staticmethod
    def joined(x: Any, y: Any) -> Any:
        return arith.ori(x, y)

    @staticmethod
    def chosen(x: Any, y: Any, which: Any) -> Any:
        """Permute bytes (PRMT): pick bytes of x (0 to 3) and y (4 to 7) by the nibbles of a word's lower half."""
        return mgpu.utils.prmt(x, y, which)

    @staticmethod
    def turned(x: Any, bit: int) -> Any:
        """Shift x right by one bit of the thread number."""
        return arith.shrui(x, Words.masked(Words.moved(mgpu.utils.thread_idx(), bit), 1))


def words_of(register: Any) -> list[Any]:
    """Split a register of bytes into 32-bit words."""
    word, count = ir.IntegerType.get_signless(32), ir.VectorType(register.type).shape[0] // 4
    if count == 1:
        return [mgpu.utils.bitcast(register, word)]
    words = mgpu.utils.bitcast(register, ir.VectorType.get((count,), word))
    return [vector.extract(words, [], [i]) for i in range(count)]


def plain_planes(refs: list[Ref], axis: int) -> list[Array]:
    """Return the planes of bytes; third bits of field j move to bit 2 j of the byte they belong to."""
    return [refs[0][...], *[jnp.concatenate([x[...], x[...] >> 1], axis) for x in refs[1:]]]


def plain_fields(planes: list[Array], bits: int, shift: bool, unit: float) -> list[Array]:
    """Unpack planes of bytes into fields of numbers, in plain jax."""
    x, *third = planes
    if not bits:
        wide = x.astype(jnp.uint16)
        halves = (wide & 0x80) << 8 | (wide & 0x7F) << 7
        return [jax.lax.bitcast_convert_type(halves, f16).astype(f32) * (unit / UNIT8)]
    each = plane(bits)
    codes = [(x.astype(i32) >> (each * j)) & ((1 << each) - 1) for j in range(8 // each)]
    for y in third:
        codes = [code | ((y.astype(i32) >> (each * j)) & 1) << each for j, code in enumerate(codes)]
    return [y.astype(f32) * (unit * 2.0 ** (0 if shift else each * j)) for j, y in enumerate(codes)]
