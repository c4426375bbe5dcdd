"""The TPU kernels under the interpreter, against float64: every form, poisoned dead slots, ragged lengths, windows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv import methods, models
from jkv.arrays.gather import put
from jkv.cache import codec_map
from jkv.core import decode_loop, sampling
from jkv.kernels.decode_attention import lengths, reference
from jkv.kernels.decode_attention import tpu as kernel
from jkv.kernels.decode_attention import tpu_operands as sides
from jkv.kernels.decode_attention.tpu_pipeline import Walk
from jkv.kernels.scatter_slots import tpu as placing
from jkv.methods.base import Dense
from jkv.methods.quantization.float8 import Float
from jkv.methods.quantization.integer import Affine
from jkv.methods.quantization.ksort import Bfp
from jkv.methods.quantization.lookup import Levels
from jkv.methods.quantization.sparse import Sparse
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Codec, KernelCodes

pytestmark = pytest.mark.hardware

B, H = 2, 4
INT8, INT4, GROUPS = Affine(bits=8), Affine(bits=4), Affine(bits=4, group=16)
KIVI = Affine(bits=2, axis="channel", group=32)
FORMS = {
    "float32": (Dense(), Dense(), 64),
    "bfloat16": (Dense(), Dense(), 64),
    "fp8": (Float(), Float(), 64),
    "int8": (INT8, INT8, 64),
    "int4": (INT4, INT4, 64),
    "int4 in groups": (GROUPS, GROUPS, 64),
    "int2": (Affine(bits=2), Affine(bits=2), 128),
    "kivi": (KIVI, Affine(bits=2, group=32), 128),
    "int8 keys, int4 values": (INT8, INT4, 64),
    "int3": (Affine(bits=3), Affine(bits=3), 64),
    "int3 in groups": (Affine(bits=3, group=32), Affine(bits=3, group=64), 128),
    "kivi of 3 bits": (replace(KIVI, bits=3), Affine(bits=3, group=32), 128),
    "tables of 2 and 4 bits": (Levels(bits=2), Levels(bits=4), 128),
    "tables of 4 and 2 bits, in groups": (Levels(bits=4, group=16), Levels(bits=2, group=32), 64),
    "tables of 3 bits": (Levels(bits=3, unbiased=True), Levels(bits=3, group=64), 128),
    "table of 1 bit, int3 values": (Levels(bits=1), Affine(bits=3), 128),
    "bfp of 4 bits": (Bfp(), Bfp(), 64),
    "bfp of 8 and 3 bits": (Bfp(mantissa=8), Bfp(mantissa=3), 128),
    "bfp of 2 and 8 bits": (Bfp(mantissa=2, block=128), Bfp(mantissa=8, block=16), 128),
    "64 and 39 of 128 channels": (Sparse(sparsity=0.5), Sparse(sparsity=0.7), 128),
    "20 and 32 of 64 channels": (Sparse(sparsity=0.7), Sparse(sparsity=0.5), 64),
    "69 and 20 of 96 channels": (Sparse(sparsity=0.29), Sparse(sparsity=0.8), 96),
    "1 and all of 64 channels": (Sparse(sparsity=0.99), Sparse(sparsity=0.0), 64),
    "int8 keys, 63 of 64 channels": (INT8, Sparse(sparsity=0.02), 64),
}


@pytest.fixture(autouse=True)
def floats_as_they_are(monkeypatch):
    """The interpreter does not know a reference read as another dtype; the compiler's tests do."""
    monkeypatch.setattr(sides, "_bits", lambda x: x)


def wide(x: KernelCodes) -> np.ndarray:
    """f64[B,H,C,D]."""
    if x.kept is not None:
        out = np.unpackbits(np.asarray(x.kept), axis=-1, bitorder="little").astype(np.float64)
        out[out > 0] = np.asarray(x.codes, np.float64).ravel()  # one after the other
        return out
    return np.asarray(jax.jit(reference.dense)(x), np.float64)


def truth(q, k, v, pos, first, last, scale):
    """Output and log-sum-exp in float64; a query that sees nothing: 0 and -inf."""
    s = np.einsum("bhgtd,bhsd->bhgts", q.astype(np.float64), k) * scale
    pos = pos[:, :, None]
    see = (pos >= 0) & (pos >= first[:, None, :, None]) & (pos <= last[:, None, :, None])
    s = np.where(see[:, :, None], s, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True), -1e300)
    p = np.exp(s - top)
    total = p.sum(-1)
    out = np.einsum("bhgts,bhsd->bhgtd", p, v) / np.maximum(total, 1e-300)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.where(total > 0, top[..., 0] + np.log(total), -np.inf)


def allowed(q, k: KernelCodes, v: KernelCodes, keys, values, scale) -> tuple[float, float]:
    """Of output and log-sum-exp: what rounding q and p to 15 bits (or as floats of more than 8 bits are) can do."""
    of_k, of_v = (float(jnp.finfo(jnp.float32 if x.codes.dtype == jnp.float32 else jnp.bfloat16).eps) for x in (k, v))
    if not k.bits:
        logit = of_k * np.abs(q).max() * np.abs(keys).sum(-1).max() * scale
    else:
        logit = np.abs(q).max() / 16256 / 2 * np.abs(keys - keys.mean()).sum(-1).max() * 2 * scale
    # of p: one rounding each, uniform and independent, so six deviations of their sum; a value is at most 2 * big codes
    share = of_v if not v.bits else 12 * (keys.shape[2] / 12) ** 0.5 / 16256
    big = np.abs(values).max()
    return 2 * np.expm1(2 * logit) * big + share * big + 1e-5, logit + 1e-5


@partial(jax.jit, static_argnums=0)
def coded(codec: Codec, x: jax.Array) -> KernelCodes:
    return codec_map.kernel_codes(codec, codec_map.encode(codec, x))


def poisoned(x: KernelCodes, dead: np.ndarray) -> KernelCodes:
    """NaN wherever a dead slot's float lies, all bits of its exponents, and of its channels."""

    def bad(y: jax.Array | None) -> jax.Array | None:
        worst = 255 if y is not None and y.dtype == jnp.uint8 else jnp.nan
        return y if y is None or y.shape[2] != dead.shape[2] else jnp.where(dead[..., None], worst, y)

    if x.kept is not None:
        return replace(x, codes=bad(x.codes), kept=jnp.where(dead[..., None], 255, x.kept))
    if not x.bits:
        return replace(x, codes=bad(x.codes))
    return replace(x, step=bad(x.step), low=bad(x.low))


def check(
    form: str,
    *,
    b: int = B,
    c: int = 256,
    h: int = H,
    hs: int | None = None,
    g: int = 3,
    t: int = 1,
    lengths: tuple[int, ...] = (0, 1, 127, 128, 129),
    cores: int = 1,
) -> None:
    codec_k, codec_v, d = FORMS[form]
    rng, dtype = np.random.default_rng(0), jnp.bfloat16 if form == "bfloat16" else jnp.float32
    q = rng.standard_normal((b, h, g, t, d)).astype(np.float32)
    k, v = (rng.standard_normal((b, h, c, d)) * rng.gamma(1, 1, d) + rng.standard_normal(d) for _ in range(2))
    k, v = (coded(x, jnp.asarray(y, dtype)) for x, y in ((codec_k, k), (codec_v, v)))
    pos = np.stack([[rng.permutation(c) for _ in range(hs or h)] for _ in range(b)]).astype(np.int32)
    pos[rng.random(pos.shape) < 0.2] = -1
    for i, length in enumerate(lengths[: pos.shape[1]]):
        pos[0, i, length:] = -1
    first = np.array([[0] * t, [c // 4] * t] * b, np.int32)[:b]
    last = c // 2 + np.arange(t, dtype=np.int32) * np.array([[9], [7]] * b, np.int32)[:b]
    last[1:2, 0] = -1  # a row that pauses
    scale = d**-0.5
    dead = np.broadcast_to(pos < 0, (b, h, c))
    out, lse = truth(q, wide(k), wide(v), pos, first, last, scale)
    interpret = pltpu.InterpretParams(num_cores_or_threads=cores)
    got = jax.jit(partial(kernel.attention, scale=scale, cores=cores, interpret=interpret))(
        jnp.asarray(q), poisoned(k, dead), poisoned(v, dead), *map(jnp.asarray, (pos, first, last))
    )
    of_out, of_lse = allowed(q, k, v, wide(k), wide(v), scale)
    np.testing.assert_array_equal(np.isfinite(got.m), np.isfinite(lse))
    assert np.isneginf(lse).any() and (np.asarray(got.l)[np.isneginf(lse)] == 0).all()
    np.testing.assert_allclose(got.finish(), out, atol=of_out, rtol=0)
    seen = np.isfinite(lse)
    np.testing.assert_allclose(np.asarray(got.lse)[seen], lse[seen], atol=of_lse, rtol=0)


@pytest.mark.parametrize(("form", "b"), [(x, (1, 2, 8)[i % 3]) for i, x in enumerate(FORMS)])
def test_kernel_equals_float64(form: str, b: int):
    """Of one row, two and eight, in turn."""
    check(form, b=b, h=H if b < 8 else 2)


def test_query_tokens_with_shared_selection_equal_float64():
    check("int8", t=4, hs=1, g=2)


@pytest.mark.parametrize(("form", "h", "g"), [("int4", 8, 1), ("kivi", 3, 1), ("20 and 32 of 64 channels", 8, 8)])
def test_all_heads_per_step_and_partial_tile_equal_float64(form: str, h: int, g: int):
    check(form, h=h, c=320, g=g)


@pytest.mark.parametrize("count", range(1, 65))
def test_kept_numbers_expand_to_their_channels(count: int):
    """Every count of 64 channels, at both ends and anywhere: what a gather reaches depends on it."""
    rng, n = np.random.default_rng(count), 128
    there = rng.random((n, 64)).argsort(1) < count
    there[0], there[1] = np.arange(64) < count, np.arange(64) >= 64 - count
    numbers = rng.standard_normal((n, count)).astype(jnp.bfloat16)
    want = np.zeros((n, 64), np.float32)
    want[there] = numbers.ravel()

    def run(numbers, kept, out):
        out[...] = sides._channels(numbers[...], kept[...].astype(jnp.int32))

    bits = np.packbits(there, axis=1, bitorder="little")
    shape = jax.ShapeDtypeStruct((64, n), jnp.bfloat16)
    got = pl.pallas_call(run, out_shape=shape, interpret=pltpu.InterpretParams())(numbers.T, bits.T)
    np.testing.assert_array_equal(np.asarray(got, np.float32).T, want)
    np.testing.assert_array_equal(
        reference.dense(KernelCodes(codes=jnp.asarray(numbers)[None, None], kept=jnp.asarray(bits)[None, None]))[0, 0],
        want,
    )


@pytest.mark.parametrize(
    ("b", "heads", "selections", "cores"),
    [(2, 4, 1, 2), (1, 3, 3, 2), (8, 1, 1, 1), (1, 16, 16, 1), (2, 12, 12, 2)],
)
def test_many_tiles_equal_float64(monkeypatch, b: int, heads: int, selections: int, cores: int):
    """Some heads end in the first of five tiles, of 16 the first eight have none, which other blocks have; two cores
    take halves of the blocks, or of the slots of the only one."""
    monkeypatch.setattr(kernel, "WORK", 256)
    lengths = {16: (0,) * 8 + (100, 9, 0, 1, 512), 1: (0,)}.get(heads, (512, 0, 300, 129))
    check("int8", b=b, c=640, h=heads, hs=selections, lengths=lengths, cores=cores)


@pytest.mark.parametrize(("form", "c", "heads", "cores"), [("int8", 384, 4, 1), ("kivi", 768, 3, 2)])
def test_overlapping_last_step_equals_float64(monkeypatch, form: str, c: int, heads: int, cores: int):
    """Of 384 slots a second step of 256 begins at the 128th; with two cores, each takes one. Keys with a step per 32
    tokens begin at whole 256."""
    monkeypatch.setattr(kernel, "WORK", c // 3 * 2 * heads)
    check(form, b=1, c=c, h=heads, g=1, lengths=(c, 0, 300, 200), cores=cores)


def test_walk_skips_steps_without_tokens():
    """Of each block up to its longest head; of two cores' pieces the next that has any, and none of the other core."""
    ends = jnp.array([130, 0, 0, 5, 512])
    alone = Walk("", 1, 1, 128, 1, 1, ends)
    assert [[int(x) for x in alone.span(i, ends)] for i in range(5)] == [[0, 2], [0, 0], [0, 0], [0, 1], [0, 4]]
    assert [int(alone.next_piece(i, 5, ends)) for i in range(6)] == [0, 3, 3, 3, 4, 5]
    halves = replace(alone, cores=2)
    assert (halves.shares, halves.pieces) == (2, 5)
    assert [[int(x) for x in halves.span(jnp.int32(i), ends)] for i in (0, 3, 4, 5, 8, 9)] == [
        [0, 1], [0, 0], [0, 2], [1, 2], [0, 1], [2, 4],
    ]  # fmt: skip
    assert [int(halves.next_piece(i, stop, ends)) for i, stop in ((1, 5), (5, 10), (6, 10))] == [4, 5, 8]
    pos = jnp.where(jnp.arange(512)[None] < jnp.array([5, 0, 130, 7])[:, None], 1, -1)[None]
    assert kernel._all(pos, lengths(pos), 4, 1, 8, 1).ends.tolist() == [130]
    assert kernel._all(pos[:, :2], lengths(pos[:, :2]), 2, 1, 8, 1).ends[0] == 5


def test_unsupported_codes_are_refused_by_name():
    half, full = (KernelCodes(codes=jnp.zeros((1, 1, 128, 64), x)) for x in (jnp.float16, jnp.float32))
    assert "in float16; bfloat16, float32 or float8_e4m3fn" in str(kernel.supports(half, full, 64, 8))
    assert kernel.supports(full, full, 64, 8) is None
    some = replace(full, kept=jnp.zeros((1, 1, 128, 8), jnp.uint8))
    assert "keys of some channels in float32; bfloat16" in str(kernel.supports(some, full, 64, 8))
    narrow, whole = (codec_map.kernel_codes(INT4, codec_map.encode(INT4, jnp.zeros((1, 1, 128, d)))) for d in (24, 32))
    assert "24 channels in 4 bits; a token in whole multiples of 8" in str(kernel.supports(narrow, narrow, 24, 8))
    assert "in whole multiples of 8 bytes" in str(kernel.supports(replace(narrow, bits=3), whole, 96, 8))
    assert "values of 5 bits; 4 at most" in str(kernel.supports(full, replace(whole, bits=5), 64, 8))
    table = replace(whole, bits=8, low=None, table=jnp.zeros((1, 1, 256), jnp.bfloat16))
    assert "keys of 8 bits of a table; 4 at most" in str(kernel.supports(table, full, 64, 8))
    for unclear in (replace(whole, low=None), replace(whole, table=jnp.zeros((1, 1, 16), jnp.bfloat16))):
        assert "values with steps that have not just one of lows" in str(kernel.supports(whole, unclear, 32, 8))
    shorts = replace(whole, step=whole.step.astype(jnp.float16))
    assert "values in float16; bfloat16, float32 or uint8" in str(kernel.supports(whole, shorts, 32, 8))
    assert kernel.supports(whole, whole, 32, 8) is None
    shared = Affine(bits=8, axis="channel", group=128)
    keys = jax.eval_shape(
        lambda x: codec_map.kernel_codes(shared, codec_map.encode(shared, x)), jnp.zeros((1, 1, 128, 64))
    )
    assert "65 queries a kv head on keys with a step per 128 tokens; 64" in str(kernel.supports(keys, full, 64, 65))
    assert kernel.supports(keys, full, 64, 64) is None
    with pytest.raises(ValueError, match="129 queries a kv head"):
        kernel.attention(jnp.zeros((1, 1, 129, 1, 64)), full, full, *[jnp.zeros((1, 1), jnp.int32)] * 3, 1.0)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("rows", "heads", "own"), [(64, 4, 4), (4, 8, 1)])
def test_place_writes_newcomers_and_preserves_other_slots(dtype, rows: int, heads: int, own: int):
    rng, m, c = np.random.default_rng(rows), 16, 256
    top = 60000 if dtype == jnp.uint16 else 250
    x, new = (rng.uniform(0, top, (B, heads, n, rows)).astype(np.float32) for n in (c, m))
    if jnp.issubdtype(dtype, jnp.floating):  # of one newcomer, of one that is dropped, and of what nobody reads
        new[0, 0, 3, 0], new[1, -1, -1, 1], x[0, 1, 5] = np.nan, np.inf, np.nan
        new[0, 1, 2], new[0, 1, 4] = -np.inf, -0.0
    x, new = (jnp.asarray(y).astype(dtype) for y in (x, new))
    index = np.sort(np.stack([[rng.choice(c + 40, m, replace=False) for _ in range(own)] for _ in range(B)]), -1)
    got = jax.jit(partial(placing.place, interpret=pltpu.InterpretParams()))(x, jnp.asarray(index, jnp.int32), new)
    want = put(x, jnp.asarray(index, jnp.int32), new)
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    np.testing.assert_array_equal(np.asarray(got).view(bits), np.asarray(want).view(bits))


def test_place_touches_only_tiles_of_newcomers():
    """Of 4,096 slots 15 that lie together and one elsewhere are in three tiles; a row that drops all moves one."""
    index = jnp.stack([jnp.sort(jnp.r_[1016:1031, 5, 4096]), jnp.full(17, 4096)])[:, None].astype(jnp.int32)
    tile = placing.tile_size(True, 17, 4096, 8 * 64)
    tiles, count = placing.touched(index, tile, 4096)
    assert tile == 128 and int(count) == 3 and tiles[:, 0].tolist() == [[0, 7, 8] + [8] * 14, [0] * 17]
    assert placing.tile_size(False, 17, 4096, 8 * 64) == 2048
    x = jnp.zeros((2, 1, 4096, 8), jnp.uint8).at[:, 0, 128:896].set(1)
    new = jnp.full((2, 1, 17, 8), 7, jnp.uint8)
    got = placing.place(x, index, new, interpret=pltpu.InterpretParams())
    np.testing.assert_array_equal(got, put(x, index, new))


@pytest.mark.parametrize(
    ("text", "atol"),
    [
        ("snapkv(budget=48, window=8) | int4", 5e-3),
        ("quest(pages=3, page=16, dense_layers=0)", 5e-3),
        ("mustafar(recent=16)", 2e-2),  # q and p become bfloat16, which moves XLA's own logits by 0.011
    ],
)
def test_decode_loop_with_kernels_equals_xla(text: str, atol: float):
    """Teacher-forced over two flushes, ragged rows; the kernels read and write every tier."""
    params = models.random(dict(models.TINY, hidden_size=256, num_hidden_layers=1))
    rng, new = np.random.default_rng(0), 34
    ids = rng.integers(0, 100, (2, 80)).astype(np.int32)
    ids[1, :30] = -1
    forced = rng.integers(0, 100, (2, new)).astype(np.int32)

    def logits(kind: str) -> np.ndarray:
        config = replace(methods.parse(text), kernels=kind)
        empty = CacheShape(config, params.config, 2, 120, new, jnp.float32).empty()
        cache, first = decode_loop.prefill(params, empty, ids, fresh=True)
        if kind == "tpu":
            assert {tier.capacity % 128 for tier in cache.plan[0].tiers} == {0}
        state = decode_loop.Decoding.start(cache, first, new, forced=jnp.asarray(forced), traced=True)
        settings = sampling.make(2, 100, seeds=(0, 0), stop_ids=())
        return np.asarray(decode_loop.run_blocks(params, state, settings, jnp.int32(new)).trace)

    with pltpu.force_tpu_interpret_mode():
        got = logits("tpu")
    np.testing.assert_allclose(got, logits("xla"), atol=atol, rtol=0)
