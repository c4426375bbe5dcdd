"""Operands of the GPU kernel for every format of keys and values: arrays, blocks, and the products of a tile.

Letters, per program: n slots per tile, r query rows, w entries per slot (bytes or floats), m channel groups.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jkv.kernels.decode_attention.gpu_layout import contracted, plane
from jkv.kernels.decode_attention.gpu_tile import Ops, Ref, columns, f16, f32, i32, operand, plgpu, rows
from jkv.protocols import KernelCodes

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Form:
    """The static description of keys or values."""

    bits: int  # bits per code; 0: floats, of eight bits if `coded`
    dim: int
    groups: int  # m; the dim / m channels of a group share a step
    grain: int  # slots that share a step; above 1, steps are per channel
    dtype: Any  # dtype of the products
    tile: int = 128  # n
    span: int = 0  # slots are `contracted` within this many; 0: stored order
    coded: bool = True  # whether entries are unpacked in registers
    table: bool = False  # whether codes index a table
    exponents: bool = False  # whether steps are powers of two and the middle code is 0

    @classmethod
    def of(cls, x: KernelCodes, dim: int, tile: int) -> Form:
        if x.codes.dtype == jnp.float8_e4m3fn:
            return cls(0, dim, 1, 1, jnp.dtype(f16), tile)
        if x.step is None:
            return cls(0, dim, 1, 1, x.codes.dtype, tile, coded=False)
        grain = x.codes.shape[2] // x.step.shape[2]
        groups, exponents = 1 if grain > 1 else x.step.shape[3], x.step.dtype == jnp.uint8
        return cls(x.bits, dim, groups, grain, jnp.dtype(f16), tile, table=x.table is not None, exponents=exponents)

    @classmethod
    def both(cls, k: KernelCodes, v: KernelCodes, dim: int, tile: int) -> tuple[Form, Form]:
        """Return the forms of keys and values, with slots in the order in which values are loaded."""
        forms = cls.of(k, dim, tile), cls.of(v, dim, tile)
        span = 0 if not forms[1].coded else 128 if tile == 128 and forms[0].grain == 1 else 64
        return replace(forms[0], span=span), replace(forms[1], span=span)

    @property
    def width(self) -> int:
        return self.dim * plane(self.bits) // 8 if self.bits else self.dim

    @property
    def planes(self) -> list[int]:
        """Entries per slot of each separately packed plane: w and, for third bits, w / 2."""
        return [self.width, self.width // 2] if self.bits == 3 else [self.width]

    @property
    def places(self) -> list[tuple[int, int]]:
        """(block index in units of the plane's width, width) of each plane within a slot."""
        return [(2 * i, width) for i, width in enumerate(self.planes)]

    @property
    def fields(self) -> int:
        return self.dim // self.width

    @property
    def rise(self) -> int:
        """log2 of the scale between the codes of consecutive fields in registers."""
        return 0 if self.table else plane(self.bits)

    @property
    def lows(self) -> int:
        """Number of channel groups that have a low (an offset)."""
        return self.groups if self.bits and not self.table else 0

    @property
    def piece(self) -> int:
        """Channels of one field and one group, which one product contracts."""
        return min(self.width, self.dim // self.groups)

    @property
    def units(self) -> int:
        """Groups of slots per tile."""
        return max(1, self.tile // self.grain)

    @property
    def per_field(self) -> int:
        """Channel groups per field."""
        return max(1, self.groups // self.fields)

    @property
    def fold(self) -> int:
        """Parts of a tile stacked as rows, because tensor cores need 64 rows and a slot may have fewer bytes."""
        return max(1, 64 // self.width)

    @property
    def blocks(self) -> int:
        """Number of accumulators [max(w, 64), r] of the values."""
        return self.fields * self.per_field * self.fold


def slot_minor(x: Array) -> Array:
    """Transpose [N,C,k] to [N,k,C]."""
    return jnp.swapaxes(x, 1, 2)


# Steps and lows of each slot


Scales = list[tuple[Array, Array | None]]  # per channel group: row vectors f32[n] of steps, and of lows if stored


def scale_operands(form: Form, x: KernelCodes) -> list[Array]:
    """Return steps and lows as [N,m,C]; empty for floats and for keys whose slots share steps."""
    return [slot_minor(y) for y in (x.step, x.low) if y is not None and form.grain == 1]


def read_scales(ops: Ops, form: Form, refs: list[Ref], at: Array) -> list[Array]:
    """Read the steps and lows of a tile from refs [m,C]; at: its first slot."""
    return [ops.read(ref.at[g, pl.ds(at, form.tile)], form.span) for g in range(form.groups) for ref in refs]


def scales_of(ops: Ops, form: Form, read: list[Array]) -> Scales:
    found = [ops.as_row(x, form.span) for x in read]
    numbers = [power(x) if form.exponents else x.astype(f32) for x in found]
    if form.table or form.exponents:
        return [(x, None) for x in numbers]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def low_of(form: Form, step: Array, low: Array | None) -> Array | None:
    """Return the low; with exponents it follows from the step, because the middle code is 0."""
    return step * -(2.0 ** (form.bits - 1)) if form.exponents else low


def power(exponents: Array) -> Array:
    """Return f32 2**(e - 127) for uint8 e, built from its bits: 0 for e = 0, infinity for 255 (dead slots)."""
    return lax.bitcast_convert_type(exponents.astype(i32) << 23, f32)


# Keys


def queries(k: Form, q: Array, scale: float, unit: float) -> list[Array]:
    """Prepare q f32[N,chunks,r,D] as the operands that a program reads once; unit: value of code 1 in registers."""
    if not k.coded:
        return [q.astype(k.dtype)]
    places = contracted(q, k.piece, 3)
    if k.grain > 1:
        # Queries times steps become float16. With queries up to 1, steps below 65520 do not overflow (larger ones make
        # logits infinite), and those below 2**-14 lose 2**-25 of a code and of the largest query: nothing in a logit.
        most = jnp.abs(q).max(-1)
        places = places / jnp.where(most > 0, most, 1)[..., None]
        return [jnp.swapaxes(places, 2, 3), most * (scale * LOG2E / unit)]
    # Here too the largest query of a program is below 1; fields in higher bits have larger codes.
    size = jnp.exp2(jnp.frexp(jnp.abs(q).max((2, 3)))[1].astype(f32))[..., None, None]
    field = jnp.exp2(-k.rise * (jnp.arange(k.dim) // k.width).astype(f32))[None, None, None]
    sums = q.reshape(*q.shape[:3], k.groups, -1).sum(-1) * (scale * LOG2E)
    sizes = jnp.broadcast_to(size * (scale * LOG2E / unit), (*q.shape[:3], 1))
    return [(places / size * field).astype(f16), jnp.swapaxes(jnp.concatenate([sums, sizes], -1), 2, 3)]


def query_memory(k: Form, r: int) -> tuple[list[Any], list[Any]]:
    """Return the shared memory for `queries`, and the scratch memory of `logits`."""
    matrix = operand(k.piece, k.dtype)
    if k.grain > 1:
        folded = plgpu.SMEM((k.units * r, k.dim), f16, transforms=matrix)
        return [plgpu.SMEM((k.dim, r), f32), plgpu.SMEM((r,), f32)], [folded]
    sums = [plgpu.SMEM((k.groups + 1, r), f32)] if k.coded else []
    return [plgpu.SMEM((r, k.dim), k.dtype, transforms=matrix), *sums], []


def key_operands(k: Form, x: KernelCodes, q: Array, scale: float) -> list[Array]:
    """Return the key arrays that are read tile by tile, of x [N,C,...] and q f32[N,chunks,r,D]."""
    if x.step is None or x.low is None or k.grain == 1:
        return [x.codes for _ in k.planes]
    lows = jnp.einsum("nurd,nsd->nusr", q, x.low.astype(f32), precision="highest") * (scale * LOG2E)
    return [*[x.codes for _ in k.planes], x.step, lows]


def key_blocks(k: Form, r: int, head: Array, chunk: Array, place: Callable[[Array], Array]) -> list[Any]:
    """Return the block specs of `key_operands`; place(i) is the tile that step i reads."""
    whole = operand(k.width, jnp.uint8 if k.coded else k.dtype)
    # The minor size of a block in shared memory must divide a whole row, of which planes are parts.
    transforms = whole if len(k.planes) == 1 else (plgpu.TilingTransform((8, 16)),)
    codes = [
        plgpu.BlockSpec((None, k.tile, width), lambda i, at=at: (head, place(i), at), transforms=transforms)
        for at, width in k.places
    ]
    if k.grain == 1:
        return codes
    tiles = max(1, k.grain // k.tile)  # tiles that share a step
    return [
        *codes,
        pl.BlockSpec((None, k.units, k.dim), lambda i: (head, lax.div(place(i), tiles), 0)),
        pl.BlockSpec((None, None, k.units, r), lambda i: (head, chunk, lax.div(place(i), tiles), 0)),
    ]


def logits(
    ops: Ops,
    k: Form,
    scale: float,
    refs: list[Ref],
    scales: Scales,
    table: list[Array],
    query: list[Ref],
    scratch: list[Ref],
) -> Array:
    """Compute the logits of a tile, f32[n,r], times log2 e."""
    if not k.coded:
        keys = [ops.ordered_matrix(refs[0], k.span)] if k.span else refs
        return ops.matmul((keys, query))[0] * (scale * LOG2E)
    codes, more = refs[: len(k.planes)], refs[len(k.planes) :]
    fields = ops.key_codes(codes, k.bits, k.piece, k.span, k.grain > 1, table)
    if k.grain > 1:
        return channel_logits(ops, k, fields, more, query, scratch[0])
    q_s, sums_s = query
    size, parts = sums_s[k.groups, 0], []
    for g, x in enumerate(ops.matmul(*(pieces(k, fields, q_s, g) for g in range(k.groups)))):
        if not scales:
            return x * size
        step, low = scales[g]
        part = x * rows(step * size, x.shape)
        if (low := low_of(k, step, low)) is not None:
            part = part + rows(low, x.shape) * columns(ops.column(sums_s.at[g]), x.shape)
        parts.append(part)
    return functools.reduce(operator.add, parts)


def pieces(k: Form, fields: list[Array], q_s: Ref, group: int = 0) -> tuple[list[Array], list[Ref]]:
    """Return the codes of one channel group, field by field, and the matching channels of the query."""
    each = k.dim // k.groups
    at = range(group * each, (group + 1) * each, k.piece)
    codes = [fields[i // k.width][:, i % k.width : i % k.width + k.piece] for i in at]
    return codes, [q_s.at[:, pl.ds(i, k.piece)] for i in at]


def channel_logits(ops: Ops, k: Form, fields: list[Array], refs: list[Ref], query: list[Ref], folded: Ref) -> Array:
    """Compute logits with per-channel steps: scale the query once per group of slots, and take each slot's columns."""
    step_s, low_s = refs
    q = ops.matrix(query[0])
    r = q.shape[1]
    for u in range(k.units):
        step = ops.as_row(ops.read(step_s.at[u], k.width), k.width).astype(f32)
        ops.put_transposed(folded.at[pl.ds(u * r, r)], (q * rows(step, q.shape)).astype(f16))
    plgpu.commit_smem()
    parts, count = [], max(1, 64 // k.grain)  # groups in 64 slots
    cuts = [([x[i : i + 64] for x in fields], i // k.grain) for i in range(0, k.tile, 64)]
    products = [pieces(k, some, folded.at[pl.ds(first * r, count * r)]) for some, first in cuts]
    most = ops.column(query[1])
    for (_, first), wide in zip(cuts, ops.matmul(*products), strict=True):
        part: Any = None
        for u in range(count):
            x = wide[:, u * r : (u + 1) * r]
            x = x * columns(most, x.shape) + columns(ops.column(low_s.at[first + u]), x.shape)
            part = x if part is None else jnp.where(slot_index(ops, x.shape, k.span) < u * k.grain, part, x)
        parts.append(part)
    return ops.stack(parts)


def slot_index(ops: Ops, shape: tuple[int, ...], span: int) -> Array:
    """Return i32[64,r], the slot (of 64) of each row, or the first of the 16 slots it belongs to."""
    row = ops.index(shape, 0)
    return (row >> 1 & 3) * 16 if span else row


# Values


def value_operands(v: Form, x: KernelCodes) -> list[Array]:
    return [slot_minor(x.codes) for _ in v.planes]


def value_blocks(v: Form, head: Array, place: Callable[[Array], Array]) -> list[Any]:
    dtype = jnp.uint8 if v.coded else v.dtype
    transforms = operand(v.tile, dtype)
    return [
        plgpu.BlockSpec((None, width, v.tile), lambda i, at=at: (head, at, place(i)), transforms=transforms)
        for at, width in v.places
    ]


RAISE = 2.0**14  # largest weight times step in float16; the result is subnormal below 2**-28 of it
SPAN = 32  # clamp of log2 of a step


def weighty(v: Form, s: Array, scales: Scales) -> Array:
    """Add log2 of each slot's largest step to its logits f32[n,r], for the running maximum.

    With this maximum, weights times steps are at most 1 for steps of any size. Steps are clamped to the range 2**-SPAN
    to 2**SPAN, because the weights alone are float32 and must stay finite: a step of 2**(SPAN + 2) or more makes
    weights infinite, and slots with steps below 2**-SPAN lose precision as the smallest weights do.
    """
    if not scales:
        return s
    step = functools.reduce(jnp.maximum, (jnp.abs(step) for step, _ in scales))
    log = lax.bitcast_convert_type(step, i32).astype(f32) * 2.0**-23 - 127  # at most 0.09 too low; finite for NaN too
    return s + rows(jnp.minimum(jnp.maximum(log, -SPAN), SPAN), s.shape)


def weigh(ops: Ops, v: Form, p: Array, pos: Array, scales: Scales, p_s: Ref) -> list[Array]:
    """Write the weights f32[n,r] times each group's steps to p_s, and return the sums with each group's low."""
    r, part = p.shape[1], v.tile // v.fold
    lows = []
    for g in range(v.groups):
        w = p * RAISE if v.coded else p
        if scales:
            step, low = scales[g]
            step, low = live(step, pos), None if low is None else live(low, pos)
            w = p * rows(step * RAISE, p.shape)
            if (low := low_of(v, step, low)) is not None:
                lows.append(folded_sum(p * rows(low, p.shape)))
        w = w.astype(v.dtype)
        for i in range(v.fold):
            ops.put_transposed(p_s.at[pl.ds((g * v.fold + i) * r, r)], w[i * part : (i + 1) * part])
    plgpu.commit_smem()
    return lows


def live(x: Array, pos: Array) -> Array:
    """Zero the steps or lows of dead slots, which may be NaN."""
    return jnp.where(pos >= 0, x, 0.0)


def folded_sum(x: Array) -> Array:
    """Sum [n,r] to f32[64,r]; each thread adds its own entries, without communication."""
    return sum((x[i : i + 64] for i in range(64, x.shape[0], 64)), x[:64])


def mix(ops: Ops, v: Form, refs: list[Ref], table: list[Array], p_s: Ref, r: int) -> list[Array]:
    """Multiply values by weights: f32[max(w, 64), r] for each field, group of the field and part of the tile.

    `gather` picks the relevant entries. refs: the codes; for floats also the positions, because dead slots may be NaN.
    """
    if not v.coded:
        x = ops.matrix(refs[0])
        alive = columns(ops.column(refs[1]), x.shape) >= 0
        return ops.matmul(([jnp.where(alive, x, jnp.zeros_like(x))], [p_s]))
    count = v.per_field * v.fold
    firsts = [j * v.groups // v.fields * v.fold for j in range(v.fields)]
    weights = [p_s.at[pl.ds(first * r, count * r)] for first in firsts]
    fields = ops.value_codes(refs, v.bits, v.fold, v.span, table)
    wide = ops.matmul(*(([x], [w]) for x, w in zip(fields, weights, strict=True)))
    return [x[:, i * r : (i + 1) * r] for x in wide for i in range(count)]


def gather(v: Form, acc: Array, low: Array | None, unit: float) -> Array:
    """Assemble f32[...,r,D] from acc f32[...,blocks,max(w, 64),r] and low f32[...,m,r]; unit: value of code 1."""
    if not v.coded:
        return jnp.swapaxes(acc[..., 0, :, :], -1, -2)
    each = v.width // v.per_field  # rows of a block that belong to its group
    parts = []
    for b in range(0, v.blocks, v.fold):
        begin = b // v.fold % v.per_field * each
        part = sum(acc[..., b + i, begin + i * v.width :, :][..., :each, :] for i in range(v.fold))
        parts.append(part * 2.0 ** -(v.rise * (b // v.fold // v.per_field)))
    total = jnp.concatenate(parts, -2) / (RAISE * unit)
    total = total if low is None else total + jnp.repeat(low, v.dim // v.groups, -2)
    return jnp.swapaxes(total, -1, -2)
