"""What the GPU kernel does with a tile in registers: on the hardware, or as plain jax under the interpreter.

Shapes: n slots of a tile, r query rows, w bytes of a slot. A matrix lies as wgmma leaves it (four warps, 16 rows each);
a row vector has a number for each of its rows, a column vector one for each of its columns.
"""

from __future__ import annotations

import functools
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

from jkv.arrays.bits import select
from jkv.kernels.decode_attention.gpu_order import (
    UNIT,
    UNIT8,
    Bytes,
    Take,
    contracted,
    entries_of,
    key_bytes,
    looked_up,
    matrix_layout,
    mgpu,
    operand_order,
    plgpu,
    row_layout,
    takes,
    value_bytes,
)

f16, f32, i32 = jnp.float16, jnp.float32, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
Ref = Any
PLAIN = 2.0**14  # times which a subnormal code is a normal number


def rows(x: Array, like: tuple[int, ...]) -> Array:
    """A row vector as a matrix."""
    return jax.lax.broadcast_in_dim(x, like, (0,))


def columns(x: Array, like: tuple[int, ...]) -> Array:
    return jax.lax.broadcast_in_dim(x, like, (1,))


def operand(width: int, dtype: Any) -> tuple[Any, ...]:
    """How a matrix lies in shared memory so that the tensor cores read it in slices of `width` columns."""
    bits = jnp.dtype(dtype).itemsize * 8
    if width * bits < 256:  # the narrowest swizzle is 32 bytes; codes are read by loads and need none
        return ()
    swizzle = plgpu.find_swizzle(width * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


@dataclass(frozen=True)
class Ops:
    """`interpret`: the interpreter knows no register layouts, no transposed refs, no wgmma on registers.

    `plain`: no code goes to the tensor cores as a subnormal number.
    """

    interpret: bool = False
    plain: bool = False

    def place(self, x: Array, layout: Any) -> Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        return self.place(jnp.full(shape, value, f32), WGMMA if len(shape) == 2 else COLUMN)

    def unit(self, bits: int) -> float:
        """What a code of 1 is in `key_codes` and `value_codes`."""
        return (UNIT if bits else UNIT8) * (PLAIN if self.plain else 1)

    def row(self, ref: Ref) -> Array:
        return ref[...] if self.interpret else load(ref, ROW)

    def read(self, ref: Ref, piece: int) -> Array:
        """Of ref [n] in any memory what `as_row` makes a row vector, by `contracted` with a piece."""
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
        """The same of a ref that lies row by row, whose rows share banks."""
        return ref[...] if self.interpret else load(ref, WGMMA)

    def ordered_matrix(self, ref: Ref, piece: int) -> Array:
        """Floats [n,k] of ref, the rows by `contracted` with a piece."""
        if self.interpret:
            return contracted(ref[...], piece)
        return renamed(ref, matrix_layout(ref.shape, piece))

    def index(self, shape: tuple[int, ...], axis: int) -> Array:
        if self.interpret:
            return jax.lax.broadcasted_iota(i32, shape, axis)
        return plgpu.broadcasted_iota(i32, shape, axis, layout=WGMMA)

    def matmul(self, *products: tuple[list[Any], list[Ref]], meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
        """For each (a, b) f32[n,r], the sum of a_i @ b_i.T; a [n,k] in registers or refs, b refs [r,k].

        meanwhile: what is done once the last products are on their way.
        """
        if self.interpret:
            meanwhile()
            return [
                sum(x[...].astype(f32) @ y[...].astype(f32).T for x, y in zip(*two, strict=True)) for two in products
            ]

        if len(products) > 2:  # a wait for every two: for more at once there are no registers
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
        """acc f32[n,r] + a @ b, in the registers of acc; a [n,k] in registers, b a ref [k,r]."""
        if self.interpret:
            return acc + a.astype(f32) @ b[...].astype(f32)
        product: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
        return product(plgpu.WGMMAAccumulatorRef.init(acc))

    def stack(self, parts: list[Array]) -> Array:
        """[64 * k, r] of k matrices [64,r]: names registers, moves nothing."""
        if self.interpret:
            return jnp.concatenate(parts)
        shape = (64 * len(parts), parts[0].shape[1])

        @inline([WGMMA] * len(parts), plgpu.ShapeDtypeStruct(shape, parts[0].dtype, WGMMA))
        def name(_: Any, *parts: Any) -> Any:
            registers = stacked([x.registers for x in parts])
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        return name(*parts)

    def put_transposed(self, ref: Ref, x: Array) -> None:
        """ref [r,n] <- x [n,r]."""
        if self.interpret:
            ref[...] = x.T
        else:
            ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def key_codes(self, ref: Ref, bits: int, piece: int, span: int, shift: bool, table: list[Array]) -> list[Array]:
        """Fields f16[n,w] of bytes [n,w], `contracted`: channels by `piece`, slots by `span`, 0: as they lie.

        A code c of field j is c * 2**(bits * j) * unit; with `shift` c * unit. bits 0: floats of 8 bits. Of the words
        of a table, an entry of it.
        """
        if self.interpret:
            return self.numbers(contracted(contracted(ref[...], span), piece, 1), bits, shift, table)
        return self.unpacked(ref, key_bytes(ref.shape, piece, span), bits, shift, table)

    def value_codes(self, ref: Ref, bits: int, fold: int, span: int, table: list[Array]) -> list[Array]:
        """Fields f16[w * fold, n / fold] of bytes [w,n], slots `contracted` with the piece `span`; as without `shift`.

        Folded, the parts of the tile lie below each other.
        """
        if self.interpret:
            x = contracted(ref[...], span, 1)
            return self.numbers(jnp.concatenate(jnp.split(x, fold, 1)), bits, False, table)
        return self.unpacked(ref, value_bytes(ref.shape, fold, span), bits, False, table)

    def numbers(self, x: Array, bits: int, shift: bool, table: list[Array]) -> list[Array]:
        if not table:
            return plain_fields(x, bits, shift, self.unit(bits))
        entries = entries_of(jnp.stack(table))
        return [select(code, entries) for code in plain_fields(x, bits, True, 1.0)]

    def unpacked(self, ref: Ref, how: Bytes, bits: int, shift: bool, table: list[Array]) -> list[Array]:
        return entries(ref, how, bits, table) if table else unpacked(ref, how, bits, shift, self.plain)


def load(ref: Ref, layout: Any) -> Array:
    """Two rows may share banks, which a load that is to be free of it would refuse."""
    read: Any = plgpu.load
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return read(ref, *index, layout=layout, optimized=False)


def stacked(registers: list[np.ndarray]) -> np.ndarray:
    """A thread's registers of matrices below each other: 64 rows are one step of the first axis."""
    return np.concatenate(registers)


def inline(layouts: list[Any], result: Any) -> Any:
    """A function on the registers of arrays in these layouts, which a thread runs."""
    return plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=result)


def renamed(ref: Ref, layout: Any) -> Array:
    """The matrix in WGMMA of which a thread has the registers that it loads by a layout."""

    @inline([layout], plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, WGMMA))
    def name(_: Any, x: Any) -> Any:
        word = ir.IntegerType.get_signless(32)  # by way of which jax does not take the two for one
        same = [mgpu.utils.bitcast(mgpu.utils.bitcast(y, word), y.type) for y in x.registers.flat]
        return in_layout(WGMMA, x.shape, same)

    return name(load(ref, layout))


def ordered_row(x: Array, layout: Any) -> Array:
    """A row vector whose entries a thread has in pairs."""

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


def unpacked(ref: Ref, how: Bytes, bits: int, shift: bool, plain: bool) -> list[Array]:
    """Fields f16 of bytes."""
    shape, fields = (64 * how.words.shape[0], 16 * how.words.shape[1]), takes(bits, shift)

    @inline([how.layout], tuple(plgpu.ShapeDtypeStruct(shape, f16, WGMMA) for _ in fields))
    def unpack(_: Any, x: Any) -> Any:
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F16Type.get())
        mine = [y for register in x.registers.flat for y in words_of(register)]

        def some(x: Any, move: int, mask: int) -> Any:
            shift = arith.shrui if move > 0 else arith.shli
            x = shift(x, mgpu.utils.c(abs(move), word)) if move else x
            return arith.andi(x, mgpu.utils.c(mask, word))

        def taken(i: int, take: Take) -> Any:
            return mgpu.utils.bitcast(functools.reduce(arith.ori, [some(mine[i], *x) for x in take]), pair)

        return tuple(in_layout(WGMMA, shape, [taken(*x) for x in operand_order(how.words, field)]) for field in fields)

    out = list(unpack(load(ref, how.layout)))
    return [y * jnp.full_like(y, PLAIN) for y in out] if plain else out


class Words:
    """What a thread does with its words of 32 bits: see `looked_up`."""

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
        return mgpu.utils.prmt(x, y, which)


def entries(ref: Ref, how: Bytes, bits: int, table: list[Array]) -> list[Array]:
    """Fields f16 of bytes that are codes of a table, whose words are scalars."""
    shape, fields = (64 * how.words.shape[0], 16 * how.words.shape[1]), range(8 // bits)

    @inline([how.layout, *[ROW for _ in table]], tuple(plgpu.ShapeDtypeStruct(shape, f16, WGMMA) for _ in fields))
    def look_up(_: Any, x: Any, *table: Any) -> Any:
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        mine = [y for register in x.registers.flat for y in words_of(register)]
        found = [
            looked_up(Words, y, [mgpu.utils.bitcast(t.registers.flat[0], y.type) for t in table], bits) for y in mine
        ]

        def ordered(j: int) -> list[Any]:
            steps = how.words.reshape(-1, 2)
            return [mgpu.utils.bitcast(found[i][j][h], pair) for step in steps for h in range(2) for i in step]

        return tuple(in_layout(WGMMA, shape, ordered(j)) for j in fields)

    return list(look_up(load(ref, how.layout), *(plgpu.layout_cast(jnp.full((64,), x, i32), ROW) for x in table)))


def words_of(register: Any) -> list[Any]:
    """The words of a register of bytes."""
    word, count = ir.IntegerType.get_signless(32), ir.VectorType(register.type).shape[0] // 4
    if count == 1:
        return [mgpu.utils.bitcast(register, word)]
    words = mgpu.utils.bitcast(register, ir.VectorType.get((count,), word))
    return [vector.extract(words, [], [i]) for i in range(count)]


def plain_fields(x: Array, bits: int, shift: bool, unit: float) -> list[Array]:
    """Fields of bytes, as numbers."""
    if not bits:
        wide = x.astype(jnp.uint16)
        halves = (wide & 0x80) << 8 | (wide & 0x7F) << 7
        return [jax.lax.bitcast_convert_type(halves, f16).astype(f32) * (unit / UNIT8)]
    codes = [(x.astype(i32) >> (bits * j)) & ((1 << bits) - 1) for j in range(8 // bits)]
    return [y.astype(f32) * (unit * 2.0 ** (0 if shift else bits * j)) for j, y in enumerate(codes)]
