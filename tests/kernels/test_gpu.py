"""The GPU kernel's numbers under the interpreter, and what the interpreter cannot run, by its meaning.

The interpreter knows neither PTX nor register layouts: `Ops.interpret` takes the products from jax. What then differs
from the hardware, the unpacking instructions and the naming of registers, is checked here as arithmetic.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import parameters

from jkv.arrays.bits import pack
from jkv.kernels.decode_attention import check
from jkv.protocols import KernelCodes

pytest.importorskip("jax.experimental.mosaic.gpu", reason="before jax 0.11 it imports absl: pip install absl-py")

from jax.experimental.mosaic import gpu as mgpu  # noqa: E402

from jkv.kernels.decode_attention import gpu, gpu_sides, gpu_tile  # noqa: E402
from jkv.kernels.paged_attention import gpu as paged  # noqa: E402

pytestmark = pytest.mark.hardware

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiling takes longest


@pytest.fixture
def seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


def interpreted(**arguments):
    kernel = paged if "pages" in arguments else gpu
    return kernel.attention(**arguments, interpret=parameters())


def fewer():
    """Of the cases with a head dim of 64, those that lie otherwise than with 128; none that is refused."""
    other = {"int4/4", "int2/2", "int2/32 slots"}
    return [x for x in check.cases(512) if not x.k.kept and (x.dim > 64 or str(x.k) in other)]


@pytest.mark.parametrize("case", fewer(), ids=str)
def test_kernel_equals_float64(case, seed, monkeypatch):
    good, text = check.run(case, "gpu", interpreted, seed, QUICK)
    assert good, f"seed {seed}: {text}"


def test_the_check_sees_a_wrong_kernel(seed):
    case = replace(next(check.cases(256)), lengths=(0, 256))
    problem = check.problem(case, "gpu", seed)
    right = interpreted(**problem)
    wrong = [
        replace(right, acc=right.acc * 1.05),
        replace(right, m=right.m + 0.01),
        replace(right, m=jnp.maximum(right.m, -1e30)),  # of a query that sees nothing
    ]
    assert check.verdict(case, problem, right, "gpu")[0]
    assert not any(check.verdict(case, problem, part, "gpu")[0] for part in wrong)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fields_are_the_channels_of_the_codec(bits):
    codes = np.random.default_rng().integers(0, 2**bits, (64, 32), np.uint8)
    fields = gpu_tile.plain_fields(pack(jnp.asarray(codes), bits), bits)
    np.testing.assert_array_equal(np.concatenate(fields, 1), codes)


def run_ptx(text: str, word: np.ndarray, outputs: int) -> list[np.ndarray]:
    """What the few instructions of `gpu_tile.ptx` do to uint32 words, after NVIDIA's description of them."""
    registers = {f"${outputs}": word.astype(np.uint64)}

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full_like(registers[f"${outputs}"], int(name, 0) & 0xFFFFFFFF)

    def halves(x: np.ndarray) -> np.ndarray:
        return x.astype(np.uint32).view(np.float16).astype(np.float64)

    for line in text.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        args = [x.strip() for x in rest.split(",")]
        match name:
            case "" | ".reg":
                continue
            case "mov.b32":
                out = value(args[1])
            case "prmt.b32":
                both = value(args[1]) | (value(args[2]) << np.uint64(32))
                picks = [int(args[3], 0) >> (4 * i) & 15 for i in range(4)]
                bytes_ = [
                    ((both >> np.uint64(8 * pick)) & np.uint64(255)) << np.uint64(8 * i) for i, pick in enumerate(picks)
                ]
                out = bytes_[0] | bytes_[1] | bytes_[2] | bytes_[3]
            case "lop3.b32":
                assert int(args[4], 0) == 0xEA  # (a & b) | c
                out = (value(args[1]) & value(args[2])) | value(args[3])
            case "fma.rn.f16x2":
                a, b, c = (halves(value(x)) for x in args[1:])
                out = (a * b + c).astype(np.float16).view(np.uint32).astype(np.uint64)
            case _:
                raise AssertionError(line)
        registers[args[0]] = out
    return [registers[f"${j}"].astype(np.uint32).view(np.float16).reshape(-1, 2) for j in range(outputs)]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ptx_unpacks_every_pair_of_bytes(bits):
    pairs = np.arange(65536, dtype=np.uint32)
    fields = run_ptx(gpu_tile.ptx(bits), pairs, 8 // bits)
    both = np.stack([pairs & 255, pairs >> 8], 1)
    for j, field in enumerate(fields):
        np.testing.assert_array_equal(field, (both >> (bits * j)) & (2**bits - 1))


def in_threads(layout, x: np.ndarray) -> np.ndarray:
    """[4 warps, 32 lanes, values] of a matrix in a tiled layout, values in the order of its registers."""
    for tile in layout.tiling.tiles:
        lead = x.shape[: x.ndim - len(tile)]
        split = [y for n, t in zip(x.shape[len(lead) :], tile, strict=True) for y in (n // t, t)]
        x = x.reshape(*lead, *split)
        order = [len(lead) + 2 * i for i in range(len(tile))] + [len(lead) + 2 * i + 1 for i in range(len(tile))]
        x = x.transpose(*range(len(lead)), *order)
    named = [d % x.ndim for d in (*layout.warp_dims, *layout.lane_dims)]
    return x.transpose(*named, *(d for d in range(x.ndim) if d not in named)).reshape(4, 32, -1)


@pytest.mark.parametrize("rows", [16, 32])
def test_a_folded_tile_has_its_parts_below_each_other(rows):
    fold, n = 64 // rows, {16: 256, 32: 128}[rows]
    part = n // fold
    tile = np.arange(rows * n).reshape(rows, n)
    below = np.concatenate([tile[:, i : i + part] for i in range(0, n, part)])
    loaded = in_threads(gpu_tile.folded_layout(rows, n).to_mgpu(), tile)
    np.testing.assert_array_equal(loaded, in_threads(mgpu.WGMMA_LAYOUT, below))


def test_stacked_matrices_are_stacked_registers():
    def registers(x: np.ndarray) -> np.ndarray:
        shape = mgpu.WGMMA_LAYOUT.registers_shape(x.shape)
        return in_threads(mgpu.WGMMA_LAYOUT, x).reshape(128, *shape, 2)

    x = np.arange(128 * 16).reshape(128, 16)
    whole, parts = registers(x), [registers(x[:64]), registers(x[64:])]
    for thread in range(128):
        np.testing.assert_array_equal(gpu_tile.stacked([part[thread] for part in parts]), whole[thread])


def test_float16_scales(seed, monkeypatch):
    monkeypatch.setitem(check.SCALES, "gpu", np.float16)
    case = check.Case(k=check.Side(bits=2, grain=32), v=check.Side(bits=4, groups=4), slots=512, lengths=(512, 300))
    good, text = check.run(case, "gpu", interpreted, seed, QUICK)
    assert good, f"seed {seed}: {text}"


def test_large_steps_meet_large_queries(seed):
    case = check.Case(
        k=check.Side(bits=2, grain=32, size=(15, 15)), v=check.Side(bits=4), slots=256, lengths=(256, 128)
    )
    p = check.problem(case, "gpu", seed) | {"scale": 16.0}
    right, part = check.truth(p, check.rounding(case, "gpu")), interpreted(**p)
    assert np.isfinite(part.acc).all()
    assert (np.abs(part.lse - right["lse"]) <= right["lse_bound"])[right["seen"]].all(), f"seed {seed}"


@pytest.mark.parametrize("exponent", [-gpu_sides.SPAN, 0, gpu_sides.SPAN, gpu_sides.SPAN + 1])
def test_the_largest_weight_fits_float16(exponent):
    form = gpu_sides.Form(8, 64, 2, 1, np.dtype(np.float16))
    steps = jnp.ldexp(jnp.linspace(1, 1.99, 100), exponent)
    refs = [None, SimpleNamespace(at=[steps / 1000, -steps])]
    top = gpu_sides.weighty(gpu_tile.Ops(interpret=True), form, jnp.zeros((100, 8)), refs)[:, 0]
    largest = np.float16(np.exp2(-np.asarray(top)) * steps * gpu_sides.RAISE)
    assert (largest >= gpu_sides.RAISE / 2).all() and np.isfinite(largest).all()


def linear(bits=4, dim=128, slots=256, steps=None, groups=1, scales=jnp.bfloat16) -> KernelCodes:
    shape = (1, 1, slots if steps is None else steps, groups)
    step = np.ones(shape, scales)
    return KernelCodes(codes=np.zeros((1, 1, slots, dim * bits // 8), np.uint8), step=step, low=step, bits=bits)


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
        (some(39), linear(), 128, "keys with 39 of 128 channels"),
    ],
)
def test_what_is_not_taken_is_refused(k, v, dim, reason):
    slots = k.codes.shape[2]
    assert reason in (gpu.supports(k, v, dim, 4) or "")
    q = np.zeros((1, 1, 4, 1, dim), np.float32)
    bounds = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="does not take"):
        gpu.attention(q, k, v, np.zeros((1, 1, slots), np.int32), bounds, bounds, 1.0)


def test_pages_that_lie_across_tiles_are_refused():
    assert "pages of 48 slots; divisors and multiples of 128" in str(paged.supports(linear(), linear(), 128, 4, 48))
    assert "multiples of 256" in str(paged.supports(linear(2, 64), linear(2, 64), 64, 4, 96))
    assert paged.supports(linear(2, 64), linear(2, 64), 64, 4, 128) is None
    bounds = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="paged_attention does not take keys with 1 bits"):
        pos = np.zeros((1, 1, 256), np.int32)
        q = np.zeros((1, 1, 4, 1, 128), np.float32)
        paged.attention(q, linear(bits=1), linear(), pos, bounds, bounds, 1.0, bounds[None], 16)


def test_what_the_check_runs_is_supported_but_for_some_of_the_channels():
    for case in check.cases():
        p = check.problem(case, "gpu")
        module, unit = (paged, [case.page]) if case.page else (gpu, [])
        reason = module.supports(p["k"], p["v"], case.dim, case.group * case.new, *unit)
        assert (reason is not None) == (case.k.kept > 0), case


def waves(programs: int, at_once: int, tiles: int, n: int) -> tuple[float, int]:
    """How much of what runs at once works on tiles, if each program becomes n; and the tiles' times until all end."""
    turns, each = -(-programs * n // at_once), -(-tiles // n)
    return programs * tiles / (turns * at_once * each), turns * (each + gpu.FILLING)


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_parts_fill_the_waves_of_programs(resident: int):
    """Never later than with as many parts as would be three programs a multiprocessor, which overshoots."""
    at_once = 132 * resident
    for rows in (1, 2, 3, 4, 8, 16, 64):
        for tiles in (4, 64, 1024):
            n, before = gpu.parts(8 * rows, at_once, tiles), max(1, min(-(-396 // (8 * rows)), tiles // 4))
            share, end = waves(8 * rows, at_once, tiles, n)
            assert end <= waves(8 * rows, at_once, tiles, before)[1] and 1 <= n <= tiles
            assert share > 0.94 or tiles < 1024


def test_what_a_multiprocessor_runs_at_once_is_what_its_memory_holds():
    def of(bits: int, dim: int = 128) -> int:
        form = gpu.Form(bits, dim, 1, 1, jnp.dtype(jnp.float16), 128)
        return gpu.resident(form, form, 8)

    assert [of(bits) for bits in (0, 8, 4, 2)] == [1, 2, 3, 2] and of(0, 64) == 2
