"""Attention over picked pages: which tiles are read, and the numbers against float64, with NaN in all the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels.decode_attention import selftest, tpu_operands
from jkv.kernels.decode_attention import tpu as whole
from jkv.kernels.paged_attention import reference, tpu, visits
from jkv.protocols import KernelCodes

pytestmark = pytest.mark.hardware

SLOTS = 512


@pytest.mark.parametrize(("unit", "tile"), [(4, 16), (16, 16), (32, 16)])
def test_visits_are_exactly_tiles_of_picked_pages(unit: int, tile: int):
    rng, (b, h, c) = np.random.default_rng(unit), (2, 3, 96 + 16 * (unit == 4))
    pages = np.stack([[rng.permutation(c // unit) for _ in range(h)] for _ in range(b)])
    pages[rng.random(pages.shape) < 0.7] = -1
    pages[0, 0] = -1
    pos = np.stack([rng.permutation(c) for _ in range(b)])[:, None]
    tiles, at, ends = (np.asarray(x) for x in visits(jnp.asarray(pages), jnp.asarray(pos), unit, tile))
    for row in range(b):
        for head in range(h):
            slots = np.concatenate([np.arange(p * unit, (p + 1) * unit) for p in pages[row, head] if p >= 0] or [[]])
            used = np.unique(slots.astype(int) // tile)
            np.testing.assert_array_equal(tiles[row, head, : len(used)], used)
            assert (tiles[row, head, len(used) :] == -(-c // tile) - 1).all() and ends[row, head] == len(used) * tile
            want = np.where(np.isin(np.arange(c), slots), pos[row, 0], -1).reshape(-1, tile)[used].ravel()
            np.testing.assert_array_equal(at[row, head, : len(want)], want)
            assert (at[row, head, len(want) :] == -1).all()


def cases() -> list[selftest.Case]:
    """Those of the check, and pages of 3 bits, of tables, of exponents and of short floats."""
    base = selftest.Case(k=selftest.Side(bits=3, grain=32), v=selftest.Side(bits=3, groups=2), slots=SLOTS, page=64)
    table, power = selftest.Side(bits=4, table=True), selftest.Side(bits=4, groups=4, power=True)
    more = [replace(base, lengths=(SLOTS, 300)), replace(base, k=table, v=power, page=16, lengths=(SLOTS, 129))]
    short = selftest.Side(bits=0, floats="float8_e4m3fn")
    return [*(x for x in selftest.cases(SLOTS) if x.page), *more, replace(base, k=short, v=short, lengths=(SLOTS, 300))]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(tpu_operands, "_bits", lambda x: x)  # the interpreter reads no reference as another dtype
    monkeypatch.setattr(whole, "TOGETHER", 384)  # two steps, of three tiles and of one
    return partial(tpu.attention, cores=2, interpret=pltpu.InterpretParams())


@pytest.mark.parametrize("case", cases(), ids=str)
def test_tpu_kernel_equals_float64(case: selftest.Case, kernel):
    good, text = selftest.run(case, "tpu", kernel, seed=3)  # of which a head picks the last page, and it is live
    assert good, text


def test_kernel_keeps_no_state_between_runs(kernel):
    case = cases()[2]
    p = selftest.problem(case, "tpu")
    run = jax.jit(partial(kernel, scale=p.pop("scale"), unit=p.pop("unit")))
    one, other = (jax.tree.map(jnp.asarray, p | {"pages": x}) for x in (p["pages"], p["pages"][:, ::-1]))
    first, _, again = run(**one), run(**other), run(**one)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))


@pytest.mark.parametrize("case", cases()[:2], ids=str)
def test_reference_equals_float64(case: selftest.Case):
    good, text = selftest.run(case, "gpu", lambda q, **rest: reference.attention(q.astype(jnp.float32), **rest))
    assert good, text


def test_unsupported_page_sizes_are_refused():
    floats = KernelCodes(codes=jnp.zeros((1, 1, SLOTS, 128)))
    steps = jnp.ones((1, 1, SLOTS // 64, 128))
    kivi = KernelCodes(codes=jnp.zeros((1, 1, SLOTS, 64), jnp.uint8), bits=4, step=steps, low=steps)
    assert [tpu.supports(floats, floats, 128, 4, unit) for unit in (16, 128, 384)] == [None] * 3
    assert "pages of 48 slots; divisors and multiples of 128" in str(tpu.supports(floats, floats, 128, 4, 48))
    assert "multiples of 512" in str(tpu.supports(kivi, floats, 128, 4, 96))
    none = [jnp.zeros((1, 1), jnp.int32)] * 2
    with pytest.raises(ValueError, match="does not take pages of 48 slots"):
        tpu.attention(floats.codes[:, :, :4, None], floats, floats, none[0][None], *none, 1.0, none[0][None], 48)
