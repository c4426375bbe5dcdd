"""The GPU kernel's numbers under the interpreter, and what the interpreter cannot run, by its meaning.

The interpreter knows no register layouts and no words: `Ops.interpret` takes the products from jax. What then differs
from the hardware, the unpacking instructions and the naming of registers, is checked here as arithmetic.
"""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_interpreter import parameters

from jkv.arrays.bitpacking import pack
from jkv.kernels.decode_attention import selftest
from jkv.protocols import KernelCodes

pytest.importorskip("jax.experimental.mosaic.gpu", reason="before jax 0.11 it imports absl: pip install absl-py")

from jax.experimental.mosaic import gpu as mgpu  # noqa: E402

from jkv.kernels.decode_attention import gpu, gpu_layout, gpu_operands, gpu_tile  # noqa: E402
from jkv.kernels.paged_attention import gpu as paged  # noqa: E402

pytestmark = pytest.mark.hardware

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiling takes longest


@pytest.fixture
def seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def interpreted(**arguments):
    kernel = paged if "pages" in arguments else gpu
    return kernel.attention(**arguments, interpret=parameters())


def refusal(case) -> str | None:
    p = selftest.problem(case, "gpu")
    module, unit = (paged, [case.page]) if case.page else (gpu, [])
    return module.supports(p["k"], p["v"], case.dim, case.group * case.new, *unit)


def fewer():
    """Of the cases with a head dim of 64, those that lie otherwise than with 128; none that is refused."""
    other = {"int4/4", "int2/2", "int2/32 slots", "table2"}
    return [x for x in selftest.cases(512) if (x.dim > 64 or str(x.k) in other) and refusal(x) is None]


@pytest.mark.parametrize("case", fewer(), ids=str)
def test_kernel_equals_float64(case, seed, monkeypatch):
    if case.new == 1:  # on a small device programs have several tiles, else several programs share a head
        monkeypatch.setattr(gpu, "processors", lambda: 1)
    good, text = selftest.run(case, "gpu", interpreted, seed, QUICK)
    assert good, f"seed {seed}: {text}"


def test_selftest_rejects_wrong_kernel(seed):
    case = replace(next(selftest.cases(256)), lengths=(0, 256))
    problem = selftest.problem(case, "gpu", seed)
    right = interpreted(**problem)
    wrong = [
        replace(right, acc=right.acc * 1.05),
        replace(right, m=right.m + 0.01),
        replace(right, m=jnp.maximum(right.m, -1e30)),  # of a query that sees nothing
    ]
    assert selftest.verdict(case, problem, right, "gpu")[0]
    assert not any(selftest.verdict(case, problem, part, "gpu")[0] for part in wrong)


def planes(codes: np.ndarray, bits: int) -> list[np.ndarray]:
    """The bytes of codes [n,D] as the codecs pack them; beside those of two bits, of 3 bits the others."""
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    return np.split(packed, [packed.shape[1] // 3 * 2], 1) if bits == 3 else [packed]


def table_of(bits: int) -> np.ndarray:
    """Entries as bfloat16 has them."""
    return np.sort(np.random.default_rng().normal(size=2**bits)).astype(ml_dtypes.bfloat16).astype(np.float64)


def words_of(table: np.ndarray) -> list:
    return list(gpu_layout.table_words(jnp.asarray(table, jnp.bfloat16)[None])[0])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shift", [False, True])
def test_fields_equal_codec_channels(bits: int, shift: bool):
    codes = np.random.default_rng().integers(0, 2**bits, (64, 32), np.uint8)
    fields = gpu_tile.plain_fields(gpu_tile.plain_planes(planes(codes, bits), 1), bits, shift, 0.5)
    each = {3: 2}.get(bits, bits)  # bits that lie together
    scale = 1 if shift else 2.0 ** (each * np.arange(8 // each))
    want = codes * 0.5 * np.repeat(scale * np.ones(8 // each), 32 * each // 8)
    np.testing.assert_array_equal(np.concatenate(fields, 1), want)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fields_equal_table_entries(bits: int):
    codes, table = np.random.default_rng().integers(0, 2**bits, (64, 32), np.uint8), table_of(bits)
    bytes_ = gpu_tile.plain_planes(planes(codes, bits), 1)
    fields = gpu_tile.Ops(interpret=True).numbers(bytes_, bits, False, words_of(table))
    np.testing.assert_array_equal(np.concatenate(fields, 1), table[codes])


def test_exponent_steps_are_powers_of_two():
    """0, of what is smaller than all that counts; dead slots have 255."""
    steps = gpu_operands.power(jnp.arange(256, dtype=jnp.uint8))
    np.testing.assert_array_equal(steps, [0, *(2.0 ** (np.arange(1, 255) - 127)), np.inf])


def as_floats(words: np.ndarray, how: gpu_layout.Take) -> np.ndarray:
    """Two float16 of each uint32, by what a thread does with it."""
    moved = [((words >> move if move > 0 else words << -move) & mask).astype(np.uint32) for move, mask in how]
    return np.bitwise_or.reduce(moved)[..., None].view(np.float16)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shift", [False, True])
def test_bit_masks_extract_codes(bits: int, shift: bool):
    some = np.arange(256, dtype=np.uint8)
    bytes_ = np.stack([some, some[::-1], np.roll(some, 77), np.roll(some, 5)], 1)
    for j, field in enumerate(gpu_layout.takes(bits, shift)):
        codes = (bytes_ >> (bits * j) & (2**bits - 1)) * (gpu_layout.UNIT * 2.0 ** (0 if shift else bits * j))
        for h, how in enumerate(field):
            np.testing.assert_array_equal(as_floats(bytes_.view(np.uint32)[:, 0], how), codes[:, [h, h + 2]])


def in_threads(layout, x: np.ndarray) -> np.ndarray:
    """[4 warps, 32 lanes, values] of an array in a tiled layout, values in the order of its registers."""
    for tile in layout.tiling.tiles:
        lead = x.shape[: x.ndim - len(tile)]
        split = [y for n, t in zip(x.shape[len(lead) :], tile, strict=True) for y in (n // t, t)]
        x = x.reshape(*lead, *split)
        order = [len(lead) + 2 * i for i in range(len(tile))] + [len(lead) + 2 * i + 1 for i in range(len(tile))]
        x = x.transpose(*range(len(lead)), *order)
    dims = [*layout.warp_dims, *layout.lane_dims]
    named = [d % x.ndim for d in dims if isinstance(d, int)]
    x = x.transpose(*named, *(d for d in range(x.ndim) if d not in named))
    for i, d in enumerate(dims):
        if not isinstance(d, int):  # these hold the same
            x = np.repeat(np.expand_dims(x, i), d.times, i)
    return x.reshape(4, 32, -1)


def test_bit_masks_decode_float8():
    some = np.array([x for x in range(256) if x % 128 != 127], np.uint8)  # but for NaN, which is some number
    bytes_ = np.stack([some, some[::-1], np.roll(some, 77), np.roll(some, 5)], 1)
    values = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * gpu_layout.UNIT8
    [field] = gpu_layout.takes(0, False)
    for h, how in enumerate(field):
        np.testing.assert_array_equal(as_floats(bytes_.view(np.uint32)[:, 0], how), values[:, [h, h + 2]])
    bad = np.full(4, 127, np.uint8).view(np.uint32)
    assert all(np.isfinite(as_floats(bad, how)).all() for how in field)


def by_digits(x: np.ndarray, piece: int, axis: int) -> np.ndarray:
    """Column 16 s + 8 h + 2 t + e of the result is entry (t, s, e, h) of each piece, in words of the definition."""
    index, steps = np.arange(x.shape[axis]), piece // 16
    s, h, t, e = index % piece // 16, index // 8 % 2, index // 2 % 4, index % 2
    return np.take(x, index // piece * piece + ((t * steps + s) * 2 + e) * 2 + h, axis)


class Words:
    """What 128 threads do with a word each, as `gpu_tile.Words`: `chosen` is PTX's prmt.b32."""

    constant = np.uint32

    @staticmethod
    def moved(x, right: int):
        return (x >> right if right > 0 else x << -right).astype(np.uint32)

    @staticmethod
    def masked(x, mask: int):
        return x & np.uint32(mask)

    @staticmethod
    def joined(x, y):
        return x | y

    @staticmethod
    def chosen(x, y, which):
        x, y, which = (z.astype(np.int64) for z in np.broadcast_arrays(x, y, which))
        eight, out = y << 32 | x, 0
        for i in range(4):
            nibble = which >> 4 * i & 15
            byte = eight >> 8 * (nibble & 7) & 255
            out = out | np.where(nibble & 8, np.where(byte & 128, 255, 0), byte) << 8 * i
        return out.astype(np.uint32)

    @staticmethod
    def turned(x, bit: int):
        return (x >> (np.arange(128) >> bit & 1)).astype(np.uint32)


def operand(
    tiles: list[np.ndarray], how: gpu_layout.Bytes, bits: int, shift: bool = False, table: list[np.uint32] = ()
) -> list[np.ndarray]:
    """The fields [threads, registers, 2] that threads make of the bytes that they load."""
    loaded = [
        np.ascontiguousarray(in_threads(layout.to_mgpu(), tile)).view(np.uint32).reshape(128, -1).T
        for layout, tile in zip((how.layout, how.thirds), tiles, strict=False)
    ]
    fields = gpu_layout.registers(Words, [list(x) for x in loaded], how, bits, shift, table)
    return [np.stack(x, 1)[..., None].view(np.float16) for x in fields]


def wanted(codes: np.ndarray, bits: int, j: int) -> np.ndarray:
    values = (codes >> (bits * j) & (2**bits - 1)) * (gpu_layout.UNIT * 2.0 ** (bits * j))
    return in_threads(mgpu.WGMMA_LAYOUT, values).reshape(128, -1, 2)


@pytest.mark.parametrize(
    ("n", "w", "piece", "span"),
    [
        (128, 64, 64, 128),
        (128, 64, 32, 64),
        (128, 128, 128, 128),
        (128, 32, 16, 0),
        (64, 256, 64, 64),
        (256, 16, 16, 64),
    ],
)
def test_keys_load_in_operand_layout(n: int, w: int, piece: int, span: int):
    tile = np.random.default_rng(n + w).integers(0, 256, (n, w), np.uint8)
    fields = operand([tile], gpu_layout.key_bytes((n, w), piece, span), 4)
    want = by_digits(by_digits(tile, span, 0) if span else tile, piece, 1)
    for j, field in enumerate(fields):
        np.testing.assert_array_equal(field, wanted(want, 4, j))
    mine = gpu_layout.contracted(gpu_layout.contracted(jnp.asarray(tile), span), piece, 1)
    np.testing.assert_array_equal(mine, want)


@pytest.mark.parametrize(
    ("w", "n", "fold", "span"),
    [(64, 128, 1, 128), (128, 128, 1, 64), (256, 64, 1, 64), (32, 128, 2, 128), (32, 128, 2, 64), (16, 256, 4, 64)],
)
def test_values_load_in_operand_layout(w: int, n: int, fold: int, span: int):
    tile = np.random.default_rng(n + w).integers(0, 256, (w, n), np.uint8)
    fields = operand([tile], gpu_layout.value_bytes((w, n), fold, span), 4)
    want = by_digits(tile, span, 1)
    below = np.concatenate([want[:, i : i + n // fold] for i in range(0, n, n // fold)])
    for j, field in enumerate(fields):
        np.testing.assert_array_equal(field, wanted(below, 4, j))


def test_byte_permutation_follows_ptx():
    x, y = np.uint32(0x83828180), np.uint32(0x07060504)
    assert hex(Words.chosen(x, y, np.uint32(0xFFFF7420))) == "0x7048280"
    assert hex(Words.chosen(x, y, np.uint32(0x0F8A))) == "0x8000ffff"  # a fourth bit: of the byte's sign


def drawn(bits: int, dim: int, n: int, table: bool) -> tuple[np.ndarray, list, list, np.ndarray]:
    """Codes [n,D], the bytes of each plane, the words of a table, and for each field the numbers [n,w]."""
    codes = np.random.default_rng().integers(0, 2**bits, (n, dim), np.uint8)
    bytes_ = planes(codes, bits)
    fields = dim // bytes_[0].shape[1]
    if table:
        entries = table_of(bits)
        words = [np.uint32(int(x) & 0xFFFFFFFF) for x in words_of(entries)]
        return bytes_, words, np.split(entries[codes], fields, 1)
    rise = 8 // fields
    return bytes_, [], [x * (gpu_layout.UNIT * 2.0 ** (rise * j)) for j, x in enumerate(np.split(codes, fields, 1))]


OTHERS = [(3, False), (2, True), (3, True), (4, True)]  # bits, and whether they are of a table


@pytest.mark.parametrize(("bits", "table"), OTHERS)
@pytest.mark.parametrize(
    ("dim", "n", "groups", "span"), [(128, 128, 1, 128), (128, 128, 4, 64), (256, 64, 1, 64), (128, 128, 1, 0)]
)
def test_key_codes_decode_in_operand_layout(bits: int, table: bool, dim: int, n: int, groups: int, span: int):
    bytes_, words, want = drawn(bits, dim, n, table)
    piece = min(bytes_[0].shape[1], dim // groups)
    how = gpu_layout.key_bytes(bytes_[0].shape, piece, span)
    fields = operand(bytes_, how, bits, False, words)
    for j, (field, x) in enumerate(zip(fields, want, strict=True)):
        x = by_digits(by_digits(x, span, 0) if span else x, piece, 1)
        np.testing.assert_array_equal(field, in_threads(mgpu.WGMMA_LAYOUT, x).reshape(128, -1, 2))
        if not table:  # as the queries of keys with steps for each channel want them
            moved = operand(bytes_, how, bits, True)[j]
            np.testing.assert_array_equal(moved * 2.0 ** (8 // len(want) * j), field)


SHAPES = [(128, 128, 128), (128, 128, 64), (256, 64, 64)]  # channels, slots of a tile, and of what is contracted


@pytest.mark.parametrize(
    ("bits", "table", "dim", "n", "span"),
    [*[(*x, *shape) for x in OTHERS for shape in SHAPES], (2, True, 64, 256, 64), (4, True, 64, 128, 64)],
)
def test_value_codes_decode_in_operand_layout(bits: int, table: bool, dim: int, n: int, span: int):
    bytes_, words, want = drawn(bits, dim, n, table)
    fold = max(1, 64 // bytes_[0].shape[1])
    how = gpu_layout.value_bytes(bytes_[0].T.shape, fold, span)
    for field, x in zip(operand([x.T for x in bytes_], how, bits, False, words), want, strict=True):
        x = by_digits(x.T, span, 1)
        below = np.concatenate(np.split(x, fold, 1))
        np.testing.assert_array_equal(field, in_threads(mgpu.WGMMA_LAYOUT, below).reshape(128, -1, 2))


@pytest.mark.parametrize(
    ("n", "piece"), [(128, 128), (128, 64), (64, 64), (256, 64), (128, 32), (64, 16), (128, 16), (256, 256)]
)
def test_rows_load_in_operand_order(n: int, piece: int):
    x = np.arange(n)
    lanes = in_threads(gpu_layout.row_layout(n, piece).to_mgpu(), x)
    np.testing.assert_array_equal(lanes, in_threads(gpu_tile.ROW.to_mgpu(), by_digits(x, piece, 0)))


def test_floats_load_in_operand_order():
    x = np.arange(128 * 64).reshape(128, 64)
    lanes = in_threads(gpu_layout.matrix_layout((128, 64), 128).to_mgpu(), x)
    np.testing.assert_array_equal(lanes, in_threads(mgpu.WGMMA_LAYOUT, by_digits(x, 128, 0)))


def test_stacked_matrices_are_stacked_registers():
    def registers(x: np.ndarray) -> np.ndarray:
        shape = mgpu.WGMMA_LAYOUT.registers_shape(x.shape)
        return in_threads(mgpu.WGMMA_LAYOUT, x).reshape(128, *shape, 2)

    x = np.arange(128 * 16).reshape(128, 16)
    whole, parts = registers(x), [registers(x[:64]), registers(x[64:])]
    for thread in range(128):
        np.testing.assert_array_equal(gpu_tile.stacked([part[thread] for part in parts]), whole[thread])


def test_float16_scales_equal_float64(seed, monkeypatch):
    monkeypatch.setitem(selftest.SCALES, "gpu", np.float16)
    case = selftest.Case(
        k=selftest.Side(bits=2, grain=32), v=selftest.Side(bits=4, groups=4), slots=512, lengths=(512, 300)
    )
    good, text = selftest.run(case, "gpu", interpreted, seed, QUICK)
    assert good, f"seed {seed}: {text}"


def test_large_steps_and_queries_stay_accurate(seed):
    case = selftest.Case(
        k=selftest.Side(bits=2, grain=32, size=(15, 15)), v=selftest.Side(bits=4), slots=256, lengths=(256, 128)
    )
    p = selftest.problem(case, "gpu", seed) | {"scale": 16.0}
    right, part = selftest.truth(p, selftest.rounding(case, "gpu")), interpreted(**p)
    assert np.isfinite(part.acc).all()
    assert (np.abs(part.lse - right["lse"]) <= right["lse_bound"])[right["seen"]].all(), f"seed {seed}"


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**20])
def test_float16_represents_queries_of_any_size(size: float):
    x = replace(form(2), groups=2)
    q = np.random.default_rng().normal(size=(3, 2, 8, 128)).astype(ml_dtypes.bfloat16).astype(np.float32) * size
    places, rest = gpu_operands.queries(x, jnp.asarray(q), 0.5, gpu_layout.UNIT)
    scale = 0.5 * gpu_operands.LOG2E
    sizes = np.asarray(rest)[:, :, -1, :, None] / scale * gpu_layout.UNIT
    fields = 2.0 ** (2 * (np.arange(128) // 32))
    places = np.asarray(places, np.float32)
    np.testing.assert_allclose(places * fields * sizes, by_digits(q, 32, 3), atol=size * 2.0**-16)
    sums = q.reshape(3, 2, 8, 2, 64).sum(-1).swapaxes(2, 3) * scale
    np.testing.assert_allclose(rest[:, :, :-1], sums, rtol=1e-4, atol=size * 1e-5)


@pytest.mark.parametrize("exponent", [-gpu_operands.SPAN, 0, gpu_operands.SPAN, gpu_operands.SPAN + 1])
def test_largest_weight_fits_float16(exponent):
    form = gpu_operands.Form(8, 64, 2, 1, np.dtype(np.float16))
    steps = jnp.ldexp(jnp.linspace(1, 1.99, 100), exponent)
    scales = [(steps / 1000, steps), (-steps, steps)]
    top = gpu_operands.weighty(form, jnp.zeros((100, 8)), scales)[:, 0]
    largest = np.float16(np.exp2(-np.asarray(top)) * steps * gpu_operands.RAISE)
    assert (largest >= gpu_operands.RAISE / 2).all() and np.isfinite(largest).all()


def linear(bits=4, dim=128, slots=256, steps=None, groups=1, scales=jnp.bfloat16) -> KernelCodes:
    shape = (1, 1, slots if steps is None else steps, groups)
    step = np.ones(shape, scales)
    return KernelCodes(codes=np.zeros((1, 1, slots, dim * bits // 8), np.uint8), step=step, low=step, bits=bits)


def powers(*args, **kw) -> KernelCodes:
    return replace(linear(*args, **kw, scales=np.uint8), low=None)


def entries(bits=4, *args, **kw) -> KernelCodes:
    return replace(linear(bits, *args, **kw), low=None, table=np.ones((1, 1, 2**bits), jnp.bfloat16))


def floats(dtype, dim=128, slots=256) -> KernelCodes:
    return KernelCodes(codes=np.zeros((1, 1, slots, dim), dtype))


def some(count: int, slots=256) -> KernelCodes:
    return KernelCodes(codes=np.zeros((1, 1, slots, count), jnp.bfloat16), kept=np.zeros((1, 1, slots, 16), np.uint8))


@pytest.mark.parametrize(
    ("k", "v", "dim", "reason"),
    [
        (linear(dim=96), linear(dim=96), 96, "head_dim=96"),
        (linear(slots=200), linear(slots=200), 128, "capacity of 200"),
        (linear(2, 64, 128), linear(2, 64, 128), 64, "multiples of 256"),
        (floats(np.float32), linear(), 128, "keys with float32"),
        (linear(), floats(np.float32), 128, "values with float32"),
        (linear(scales=np.float32), linear(), 128, "keys with float32 steps"),
        (linear(), linear(groups=8), 128, "values with 8 channel groups"),
        (linear(4, 256, groups=8), linear(4, 256), 256, "keys with 8 channel groups; powers of 2 up to 4"),
        (linear(groups=3), linear(), 128, "keys with 3 channel groups"),
        (linear(steps=16, groups=128), linear(), 128, "keys with groups of 16 slots"),
        (linear(2, 64, 768, 2, 64), linear(2, 64, 768), 64, "keys with groups of 384 slots"),
        (linear(steps=8, groups=4), linear(), 128, "shared by 32 slots and 32 channels"),
        (linear(), linear(steps=8, groups=128), 128, "values with steps shared by slots"),
        (linear(bits=1), linear(), 128, "keys with 1 bits"),
        (linear(), linear(bits=5), 128, "values with 5 bits"),
        (linear(3, 64), linear(4, 64), 64, "keys with 3 bits of 64 channels"),
        (entries(1), linear(), 128, "keys with 1 bits"),
        (linear(), entries(8), 128, "values with a table of 256 entries"),
        (entries(scales=np.float32), linear(), 128, "keys with float32 steps"),
        (entries(groups=8), linear(), 128, "keys with 8 channel groups"),
        (entries(steps=8, groups=128), linear(), 128, "keys with steps of a table shared by 32 slots"),
        (powers(steps=8, groups=128), linear(), 128, "keys with exponents shared by 32 slots"),
        (linear(), powers(groups=8), 128, "values with 8 channel groups"),
        (some(39), linear(), 128, "keys with 39 of 128 channels"),
        (replace(linear(), low=None), linear(), 128, "keys with steps that have not just one of lows"),
        (linear(), replace(powers(), table=entries().table), 128, "values with steps that have not just one of lows"),
    ],
)
def test_unsupported_codes_are_refused(k, v, dim, reason):
    slots = k.codes.shape[2]
    assert reason in (gpu.supports(k, v, dim, 4) or "")
    q = np.zeros((1, 1, 4, 1, dim), np.float32)
    bounds = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="does not take"):
        gpu.attention(q, k, v, np.zeros((1, 1, slots), np.int32), bounds, bounds, 1.0)


def test_pages_crossing_tiles_are_refused():
    assert "pages of 48 slots; divisors and multiples of 64" in str(paged.supports(linear(), linear(), 128, 4, 48))
    assert "pages of 192 slots; divisors and multiples of 128" in str(paged.supports(linear(), linear(), 128, 4, 192))
    assert "multiples of 256" in str(paged.supports(linear(2, 64), linear(2, 64), 64, 4, 96))
    assert paged.supports(linear(2, 64), linear(2, 64), 64, 4, 128) is None
    bounds = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="paged_attention does not take keys with 1 bits"):
        pos = np.zeros((1, 1, 256), np.int32)
        q = np.zeros((1, 1, 4, 1, 128), np.float32)
        paged.attention(q, linear(bits=1), linear(), pos, bounds, bounds, 1.0, bounds[None], 16)


def test_selftest_cases_are_supported_with_known_exceptions():
    """And but for single bits, and for 3 of 64 channels, whose slots have 24 bytes."""
    for case in selftest.cases():
        other = any(x.bits == 1 or (x.bits, case.dim) == (3, 64) for x in (case.k, case.v))
        assert (refusal(case) is not None) == (case.k.kept > 0 or other), case


@pytest.mark.parametrize(
    ("v", "unit", "tile"),
    [
        (linear(), 0, 128),
        (linear(), 16, 64),
        (linear(), 128, 128),
        (linear(), 256, 128),
        (linear(2), 16, 128),  # two parts of 64 slots
        (linear(2, 64), 16, 256),
        (linear(4, 256), 128, 64),
        (floats(jnp.bfloat16), 64, 64),
    ],
)
def test_tile_size_follows_page_size(v: KernelCodes, unit: int, tile: int):
    assert gpu.tile_of(v, unit) == tile


def waves(programs: int, at_once: int, tiles: int, n: int) -> tuple[float, int]:
    """How much of what runs at once works on tiles, if each program becomes n; and the tiles' times until all end."""
    turns, each = -(-programs * n // at_once), -(-tiles // n)
    return programs * tiles / (turns * at_once * each), turns * (each + gpu.FILLING)


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_parts_fill_waves_of_programs(resident: int):
    """Never later than with as many parts as would be three programs a multiprocessor, which overshoots."""
    at_once = 132 * resident
    for rows in (1, 2, 3, 4, 8, 16, 64):
        for tiles in (4, 64, 1024):
            n, before = gpu.parts(8 * rows, at_once, tiles), max(1, min(-(-396 // (8 * rows)), tiles // 4))
            share, end = waves(8 * rows, at_once, tiles, n)
            assert end <= waves(8 * rows, at_once, tiles, before)[1] and 1 <= n <= tiles
            assert share > 0.94 or tiles < 1024


def form(bits: int, dim: int = 128, coded: bool = True) -> gpu.Form:
    return gpu.Form(bits, dim, 1, 1, jnp.dtype(jnp.float16), 128, 128 if coded else 0, coded)


FORMS = {"bf16": form(0, coded=False), "fp8": form(0), "int8": form(8), "int4": form(4), "int2": form(2)}
FORMS |= {"int3": form(3), "table of 4": replace(form(2), table=True), "table of 8": replace(form(3), table=True)}


def test_resident_programs_are_bounded_by_shared_memory():
    assert [gpu.resident(x, x, 8) for x in FORMS.values()] == [1, 3, 3, 3, 3, 2, 2, 2]
    assert (
        gpu.resident(form(0, 64, False), form(0, 64, False), 8) == 3 and gpu.resident(FORMS["int4"], form(4), 16) == 2
    )


@pytest.mark.parametrize("name", FORMS)
def test_bytes_in_flight_hide_memory_latency(name: str):
    """Memory of 4.8 TB/s that answers after a microsecond has 36 kB under way for each multiprocessor."""
    x = FORMS[name]
    assert (gpu.stages(x, x) - 1) * gpu.resident(x, x, 8) * gpu.tile_bytes(x, x, 8) > 36e3


@pytest.mark.parametrize(
    ("name", "rows", "heads", "slots", "parts", "turns", "share"),
    [  # H100 and H200: 132 multiprocessors
        ("bf16", 1, 8, 512, 4, 1, 0.24),
        ("bf16", 1, 8, 131072, 16, 1, 0.97),
        ("bf16", 8, 8, 131072, 2, 1, 0.97),
        ("bf16", 64, 8, 32768, 1, 4, 0.97),
        ("int8", 1, 8, 131072, 49, 1, 0.99),
        ("int4", 1, 8, 512, 4, 1, 0.08),
        ("int4", 1, 3, 2048, 16, 1, 0.12),
        ("int4", 1, 8, 8192, 32, 1, 0.65),
        ("int4", 1, 8, 131072, 49, 1, 0.99),
        ("int4", 8, 8, 131072, 6, 1, 0.97),
        ("int4", 64, 8, 32768, 3, 4, 0.96),
    ],
)
def test_parts_give_expected_waves(name: str, rows: int, heads: int, slots: int, parts: int, turns: int, share: float):
    """A few tiles a head are one program each, whatever share of the device they are: less time there is none."""
    at_once, tiles = 132 * gpu.resident(FORMS[name], FORMS[name], 8), slots // 128
    assert gpu.parts(rows * heads, at_once, tiles) == parts and -(-rows * heads * parts // at_once) == turns
    assert waves(rows * heads, at_once, tiles, parts)[0] == pytest.approx(share, abs=0.006)
