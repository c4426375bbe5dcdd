"""Register layouts of the GPU kernel: the order in which bytes are contracted, and which bytes each thread loads.

Tensor cores take two codes per 32-bit register. A code in the lowest ten bits of a half is a subnormal float16, so a
mask is enough to unpack it, and the factor 2**-24 goes into the step. Bytes 0 and 2 of a four-byte word are one pair of
codes, bytes 1 and 3 another one after a shift. A thread therefore loads 16 bytes of a row at once, and column
16 s + 8 h + 2 t + e of wgmma's operand (t is the thread among four) is byte (t, s, e, h) of the row, slowest digit
first. Sums may run over channels or slots in any order, as long as queries and weights use the same order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.arrays.bitpacking import PLANES

try:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu.fragmented_array import Replicated
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ModuleNotFoundError as error:
    if error.name != "absl":
        raise
    raise ModuleNotFoundError("jax's Mosaic GPU imports absl: pip install absl-py", name="absl") from error

UNIT = 2.0**-24  # value of code 1 as a subnormal float16
UNIT8 = 2.0**-8  # value of e4m3's 1 read as float16, whose exponent has one bit more


def plane(bits: int) -> int:
    """Return how many bits of a code are packed together; third bits have a plane of their own."""
    return PLANES[bits][0] if bits in PLANES else bits


def contracted(x: Array, piece: int, axis: int = 0) -> Array:
    """Permute an axis of bytes into contraction order, within pieces of `piece` entries; 0 keeps the order.

    >>> contracted(jnp.arange(32), 32).tolist()[:16]
    [0, 2, 8, 10, 16, 18, 24, 26, 1, 3, 9, 11, 17, 19, 25, 27]
    """
    if not piece:
        return x
    shape = x.shape
    x = jnp.moveaxis(x, axis, 0)
    rest = x.shape[1:]
    x = x.reshape(-1, 4, piece // 16, 2, 2, *rest).swapaxes(1, 2).transpose(0, 1, 4, 2, 3, *range(5, 5 + len(rest)))
    return jnp.moveaxis(x.reshape(shape[axis], *rest), 0, axis)


Digits = list[tuple[int, str]]  # digits of an index, slowest first: (size, warp or lane digit, or "")


def tiled(*axes: Digits, alike: str = "") -> Any:
    """Build the layout that distributes index digits over warps (W), lanes (L) and the entries of a register (V).

    Warp and lane digits are ordered by name; registers follow the order of the digits, all axes side by side.

    Args:
        axes: The digits of each axis.
        alike: Name of a warp or lane digit of size 2 over which data is replicated; "" for none.
    """
    depth, many = len(axes[0]), len(axes)
    tiles = tuple(tuple(math.prod(n for n, _ in axis[i:]) for axis in axes) for i in range(depth))
    places = {name: (i - depth) * many + j for j, axis in enumerate(axes) for i, (_, name) in enumerate(axis) if name}
    sizes = {name: n for axis in axes for n, name in axis if name}
    same = {alike: Replicated(2)} if alike else {}
    warps, lanes = ([name for name in sorted({*places, *same}) if name[0] == kind] for kind in "WL")
    missing = 32 // math.prod(sizes.get(x, 2) for x in lanes)  # lanes with replicated data
    dims = places | same
    layout = mgpu.TiledLayout(
        plgpu.Tiling(tiles),
        warp_dims=tuple(dims[x] for x in warps),
        lane_dims=(*(dims[x] for x in lanes), *[Replicated(missing)] * (missing > 1)),
        vector_dim=places["V"],
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, warp_dims=layout.warp_dims, lane_dims=layout.lane_dims, vector_dim=layout.vector_dim
    )


def row_digits(n: int, piece: int) -> Digits:
    """Return the digits of wgmma's rows for n entries in `contracted` order."""
    steps = piece // 16
    inner, outer = min(steps, 4), max(1, 4 // steps)
    return [
        (n // piece // outer, ""),
        (outer, "W0"),
        (4, "L0"),
        (steps // inner, ""),
        (inner, "W1"),
        (2, "L1"),
        (2, ""),
    ]


def row_layout(n: int, piece: int) -> Any:
    *digits, (last, _) = row_digits(n, piece)
    return tiled([*digits, (last, "V")])


def matrix_layout(shape: tuple[int, int], piece: int) -> Any:
    (n, k), one = shape, (1, "")
    return tiled(row_digits(n, piece), [one, one, one, (k // 8, ""), one, (4, "L2"), (2, "V")])


@dataclass(frozen=True)
class Bytes:
    """How threads load a matrix of bytes, and what they load.

    Attributes:
        layout: Layout of the load.
        words: Index [rows / 64, s, 2] of the thread's four-byte word with columns 16 s and on of a wgmma row, and of
            the row 8 below.
        thirds: Layout of the load of the matching third bits, word by word.
        turn: Bit of the thread number; threads with this bit set need the odd bits of the third-bit bytes.
    """

    layout: Any
    words: np.ndarray
    thirds: Any
    turn: int


def key_bytes(shape: tuple[int, int], piece: int, span: int) -> Bytes:
    """Describe the load of keys [n,w], channels `contracted` by `piece` and slots by `span` (0 keeps the order)."""
    n, w = shape
    words = numbered(n // 64, w // piece, max(1, piece // 64), 2, min(piece, 64) // 16).swapaxes(3, 4)
    return Bytes(
        key_layout(n, w, piece, span), words.reshape(n // 64, -1, 2), thirds=key_layout(n, w, piece, span, 2), turn=1
    )


def value_bytes(shape: tuple[int, int], fold: int, span: int) -> Bytes:
    """Describe the load of values [w,n], slots `contracted` by `span`; parts of a folded tile are stacked as rows."""
    w, n = shape
    parts = (n // span, 2, span // 64) if fold == 1 else (1, 2, 1)
    words = np.moveaxis(numbered(w * fold // 64, *parts, 4), 2, -1)
    return Bytes(
        value_layout(w, n, fold, span),
        words.reshape(w * fold // 64, -1, 2),
        thirds=value_layout(w, n, fold, span, 2) if w > 16 else None,
        turn=5 if fold > 1 else 6,
    )


def numbered(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def key_layout(n: int, w: int, piece: int, span: int, times: int = 1) -> Any:
    """Return the layout of keys. times=2 is for third bits, whose w / 2 columns are read by two threads each."""
    one, wide, alike = (1, ""), min(piece // 4, 16), "L2" * (times > 1)
    pieces, parts, four = (w // piece, ""), (piece // 4 // wide, ""), (4 // times, "L3")
    if span:
        return tiled(row_digits(n, span), [one, one, one, pieces, four, parts, (wide, "V")], alike=alike)
    rows: Digits = [(n // 64, ""), (4, "W0"), one, (2, ""), (8, "L0")]
    return tiled(rows, [pieces, four, parts, one, (wide, "V")], alike=alike)


def value_layout(w: int, n: int, fold: int, span: int, times: int = 1) -> Any:
    """Return the layout of values; folded, each warp has 16 rows of one part, in wgmma order. times=2: third bits."""
    part, half = ("W0", "W1") if fold > 1 else ("", "")
    warps = min(w // 16, 4) // times
    rows: Digits = [(max(1, w // 64), ""), (warps, "W3" * (warps > 1)), (2, ""), (8, "L0")]
    columns: Digits = [(n // span, part), (4, "L1"), (span // 64, half), (16, "V")]
    return tiled(rows, columns, alike="W2" * (times > 1))


Take = list[tuple[int, int]]  # terms of a register: (right shift of a word in bits, mask)


def takes(bits: int, shift: bool) -> list[list[Take]]:
    """Return, for each field, the shifts and masks that unpack bytes 0 and 2 of a word, and bytes 1 and 3."""
    if not bits:
        return [[[(8 * h - 8, 0x80008000), (8 * h - 7, 0x3F803F80)] for h in range(2)]]
    mask, fields = ((1 << plane(bits)) - 1) * 0x10001, range(0, 8, plane(bits))
    return [[[(8 * h + shift * j, mask << (0 if shift else j))] for h in range(2)] for j in fields]


def thirds(shift: bool) -> list[list[Take]]:
    """Return the shifts and masks of a word of third bits, where field j has bit 2 j of each byte; see `takes`."""
    return [[[(8 * h + shift * j - 2, 0x40004 << (0 if shift else j))] for h in range(2)] for j in range(0, 8, 2)]


def registers(on: Any, planes: list[Any], how: Bytes, bits: int, shift: bool, table: list[Any]) -> list[list[Any]]:
    """Unpack a thread's words into wgmma's registers, one list per field.

    Args:
        on: Operations on words: of a GPU thread, or of numpy in tests.
        planes: The thread's words, for each plane of bytes.
        how: How the words were loaded.
        bits: Bits per code.
        shift: Whether all fields are shifted to the same bits.
        table: Words of the table whose entries the codes select; empty for plain codes.
    """
    halves = [(int(i), h) for step in how.words.reshape(-1, 2) for h in range(2) for i in step]
    planes = [planes[0], *[[on.turned(x, how.turn) for x in third] for third in planes[1:]]]
    if table:
        found = [looked_up(on, list(x), table, bits) for x in zip(*planes, strict=True)]
        return [[found[i][j][h] for i, h in halves] for j in range(len(found[0]))]

    def taken(i: int, takes: Any) -> Any:
        parts = [(x[i], *some) for x, take in zip(planes, takes, strict=True) for some in take]
        return functools.reduce(on.joined, [on.masked(on.moved(x, move), mask) for x, move, mask in parts])

    every = [takes(bits, shift), thirds(shift)][: len(planes)]
    return [[taken(i, [take[h] for take in field]) for i, h in halves] for field in zip(*every, strict=True)]


# Table lookup. A byte permutation (PRMT) picks four of eight bytes by the nibbles of a word's lower half: once among
# the lower bytes of eight entries for four codes, and once among their higher bytes.


def table_words(table: Array) -> Array:
    """Pack entries [N,2**bits] as float16 into i32[N,words]: first all lower bytes, then all higher bytes.

    >>> [hex(x) for x in table_words(jnp.array([[1.0, -2.0, 0.5, 0.0]], jnp.bfloat16))[0].tolist()]
    ['0x0', '0x38c03c']
    """
    halves = jax.lax.bitcast_convert_type(table.astype(jnp.float16), jnp.uint8)
    return jax.lax.bitcast_convert_type(jnp.swapaxes(halves, 1, 2).reshape(table.shape[0], -1, 4), jnp.int32)


def entries_of(words: Array) -> Array:
    """Unpack one table's words into f32[2**bits], the inverse of `table_words`."""
    low, high = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(2, -1).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(low | high << 8, jnp.float16).astype(jnp.float32)


def looked_up(on: Any, planes: list[Any], table: list[Any], bits: int) -> list[list[Any]]:
    """Look up table entries: for each field, the registers for bytes 0 and 2 of a word, and for bytes 1 and 3.

    planes: the word and, with 3 bits, the word of its third bits.
    """
    low, *third = (on.chosen(x, x, on.constant(0x3120)) for x in planes)  # order bytes as 0, 2, 1, 3
    each, fields = plane(bits), 4 // plane(bits)
    out: list[Any] = [None] * (2 * fields)
    for j in range(fields):  # nibbles are the codes of fields j and j + fields, of one byte and of the other
        codes = on.masked(on.moved(low, each * j), ((1 << each) - 1) * 0x11111111)
        for x in third:
            codes = on.joined(codes, on.masked(on.moved(x, each * j - 2), 0x44444444))
        halves = [entry_bytes(on, codes, 16 * h, table) for h in range(2)]
        out[j] = [on.chosen(*x, on.constant(0x6240)) for x in halves]  # both bytes of the first and third code
        out[j + fields] = [on.chosen(*x, on.constant(0x7351)) for x in halves]
    return out


def entry_bytes(on: Any, codes: Any, right: int, table: list[Any]) -> list[Any]:
    """Look up the lower and higher bytes of the entries of four 4-bit codes, which start at bit `right`."""
    count = len(table) // 2
    both = table[:count], table[count:]
    if count < 4:
        return [on.chosen(x[0], x[-1], on.moved(codes, right)) for x in both]
    among = on.moved(on.masked(codes, 0x77777777), right)  # index among eight entries; bit 3 says which eight
    upper = on.joined(on.masked(on.moved(codes, 1), 0x44444444), on.constant(0x32103210))
    upper = on.moved(upper, right)
    return [on.chosen(on.chosen(*x[:2], among), on.chosen(*x[2:], among), upper) for x in both]
