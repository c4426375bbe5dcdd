"""What the GPU kernel does with a tile in registers: on the hardware, or as plain jax under the interpreter.

Shapes: n slots of a tile, r query rows, w bytes of a slot. A matrix lies as wgmma leaves it (four warps, 16 rows each);
a row vector has a number for each of its rows, a column vector one for each of its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

try:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ModuleNotFoundError as error:
    if error.name != "absl":
        raise
    raise ModuleNotFoundError("jax's Mosaic GPU imports absl: pip install absl-py", name="absl") from error

f16, f32, i32 = jnp.float16, jnp.float32, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
Ref = Any


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

    `plain`: unpack in jax.numpy, not in PTX.
    """

    interpret: bool = False
    plain: bool = False

    def place(self, x: Array, layout: Any) -> Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        return self.place(jnp.full(shape, value, f32), WGMMA if len(shape) == 2 else COLUMN)

    def row(self, ref: Ref) -> Array:
        return self.place(ref[...], ROW)

    def column(self, ref: Ref) -> Array:
        return self.place(ref[...], COLUMN)

    def matrix(self, ref: Ref) -> Array:
        return self.place(ref[...], WGMMA)

    def row_index(self, shape: tuple[int, ...]) -> Array:
        if self.interpret:
            return jax.lax.broadcasted_iota(i32, shape, 0)
        return plgpu.broadcasted_iota(i32, shape, 0, layout=WGMMA)

    def matmul(self, *products: tuple[list[Any], list[Ref]]) -> list[Any]:
        """For each (a, b) f32[n,r], the sum of a_i @ b_i.T; a [n,k] in registers or refs, b refs [r,k]."""
        if self.interpret:
            return [
                sum(x[...].astype(f32) @ y[...].astype(f32).T for x, y in zip(*two, strict=True)) for two in products
            ]

        if len(products) > 2:  # a wait for every two: for more at once there are no registers
            return [x for i in range(0, len(products), 2) for x in self.matmul(*products[i : i + 2])]

        def run(*sums: Any) -> list[Array]:
            for acc, two in zip(sums, products, strict=True):
                for x, y in zip(*two, strict=True):
                    plgpu.wgmma(acc, x, y.T)
            return [acc[...] for acc in sums]

        return pl.run_scoped(
            run, *[plgpu.WGMMAAccumulatorRef((a[0].shape[0], b[0].shape[0]), f32) for a, b in products]
        )

    def add(self, acc: Array, a: Array, b: Ref) -> Array:
        """acc f32[n,r] + a @ b.T, in the registers of acc; a [n,k] in registers, b a ref [r,k]."""
        if self.interpret:
            return acc + a.astype(f32) @ b[...].astype(f32).T
        product: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b.T))
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

    def codes(self, ref: Ref, bits: int, fold: int = 1) -> list[Array]:
        """Fields f16[w * fold, n / fold] of bytes [w,n]; folded, the tile's parts lie below each other."""
        w, n = ref.shape
        if self.interpret:
            return plain_fields(jnp.concatenate([ref[:, i : i + n // fold] for i in range(0, n, n // fold)]), bits)
        x = plgpu.layout_cast(ref[...], WGMMA) if fold == 1 else folded(ref, fold)
        return plain_fields(x, bits) if self.plain else fast_fields(x, bits)


def stacked(registers: list[np.ndarray]) -> np.ndarray:
    """A thread's registers of matrices below each other: 64 rows are one step of the first axis."""
    return np.concatenate(registers)


def inline(layouts: list[Any], result: Any) -> Any:
    """A function on the registers of arrays in these layouts, which a thread runs."""
    return plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=result)


def folded_layout(w: int, n: int) -> Any:
    """Of bytes [w,n] in registers: each warp holds 16 rows of one part, in the order of wgmma's rows."""
    tiling = plgpu.Tiling(((w, n), (16, n * w // 64), (16, 8), (8, 8), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-8, -9) if w == 32 else (-8,), lane_dims=(-3, -2), vector_dim=-1)


def folded(ref: Ref, fold: int) -> Array:
    """uint8[64, n / fold] of bytes [64 / fold, n]: each warp loads its own part of the tile, and no byte moves."""
    layout, shape = folded_layout(*ref.shape), (64, ref.shape[1] // fold)

    @inline([layout], plgpu.ShapeDtypeStruct(shape, jnp.uint8, WGMMA))
    def rename(_: Any, x: Any) -> Any:
        registers = x.registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=False)

    return rename(plgpu.layout_cast(ref[...], layout))


def plain_fields(x: Array, bits: int) -> list[Array]:
    wide, mask = x.astype(jnp.int16), jnp.int16((1 << bits) - 1)  # bytes cannot be shifted here
    return [((wide >> jnp.int16(bits * j)) & mask).astype(f16) for j in range(8 // bits)]


def fast_fields(x: Array, bits: int) -> list[Array]:
    """Two instructions for two codes: 0x6400 | field << k is the float 1024 + field * 2**k, and a multiply-add makes
    it the field."""
    count = 8 // bits
    out_type = tuple(plgpu.ShapeDtypeStruct(x.shape, f16, WGMMA) for _ in range(count))

    @inline([WGMMA], out_type)
    def unpack(_: Any, x: Any) -> Any:
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F16Type.get())
        several = llvm.StructType.get_literal([word] * count) if count > 1 else word
        out = [np.empty_like(x.registers) for _ in range(count)]
        for index, register in np.ndenumerate(x.registers):
            two = arith.extui(word, mgpu.utils.bitcast(register, ir.IntegerType.get_signless(16)))
            words: Any = llvm.inline_asm(several, [two], ptx(bits), ",".join(["=r"] * count + ["r"]))
            for j in range(count):
                one = llvm.extractvalue(word, words, [j]) if count > 1 else words
                out[j][index] = mgpu.utils.bitcast(one, pair)
        return tuple(mgpu.FragmentedArray(_registers=o, _layout=x.layout, _is_signed=None) for o in out)

    return list(unpack(x))


def ptx(bits: int) -> str:
    """Two bytes in the last operand -> pairs of float16 codes in the 8 // bits first ones."""

    def both(value: float) -> int:
        return int(np.float16(value).view(np.uint16)) * 0x10001

    count = 8 // bits
    text = [".reg .b32 w, f, s, o, m;", "mov.b32 m, 0x64006400;"]
    text += [f"prmt.b32 w, ${count}, {0x64 if bits == 8 else 0}, 0x4140;"]
    for j in range(count):
        low = 2.0 ** -(bits * j)
        mask = (((1 << bits) - 1) << bits * j) * 0x10001
        field = "mov.b32 f, w;" if bits == 8 else f"lop3.b32 f, w, {mask}, m, 0xea;"
        text += [f"mov.b32 s, {both(low)};", f"mov.b32 o, {both(-1024 * low)};", field]
        text += [f"fma.rn.f16x2 ${j}, f, s, o;"]
    return "{ " + " ".join(text) + " }"
