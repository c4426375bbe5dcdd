"""Beginnings that rows share, held once, against rows that each hold their own: every composition that divides."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import methods
from jkv.cache.cache import Cache, Common, tree_bytes
from jkv.cache.padding import pad
from jkv.core import decode_loop
from jkv.core.compilation import compiled
from jkv.engine.scheduler import Bucket, Grain
from jkv.engine.shared_prefixes import Group
from jkv.engine.spec import Shapes
from jkv.prompts.allocation import CacheShape
from support import rig

BOTH, OWN, STEPS = (
    64,
    (26, 9, 17),
    40,
)  # common tokens of rows 0 and 2; those of each row after them; tokens that follow
NEW = 64


def plan(config: methods.CacheConfig, case: rig.Case):
    longest = BOTH + max(OWN) + NEW
    return CacheShape(config, case.params.config, 1, longest, NEW, jnp.float32).layout()[0]


def divides(case: rig.Case) -> bool:
    try:
        config = methods.parse(case.tight).bound(case.params)
    except ValueError:  # weights of another model
        return False
    return config.splits and all(x.divides for x in plan(config, case))


CASES = [case for case in rig.ALL if divides(case)]


def texts(vocab: int) -> list[list[int]]:
    """Rows 0 and 2 begin alike, row 1 otherwise."""
    rng = np.random.default_rng(4)
    begins = rng.integers(0, vocab, (2, BOTH))
    return [[*begins[i % 2].tolist(), *rng.integers(0, vocab, n).tolist()] for i, n in enumerate(OWN)]


def followed(case: rig.Case, cache: Cache, logits: jax.Array) -> tuple[Cache, list[np.ndarray]]:
    """The cache after STEPS tokens, one of which row 1 leaves out, and the logits before each and at the end."""
    tokens = np.random.default_rng(4).integers(0, case.params.config.vocab, (STEPS, 3))
    tokens[5, 1] = -1
    out = [np.asarray(logits)]
    for token in tokens:
        cache, logits = decode_loop.step(case.params, cache, jnp.asarray(token, jnp.int32))
        out.append(np.asarray(logits))
    return cache, out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_prefix_logits_equal_unshared_logits(case: rig.Case):
    params, config = case.params, methods.parse(case.tight).bound(case.params)
    model, rows = params.config, texts(params.config.vocab)
    cut = Grain(unit=config.unit, recent=config.recent, sinks=config.num_sinks).cut(BOTH, min(map(len, rows)))
    assert cut >= BOTH // 2
    firsts = CacheShape(config.uncompressed(BOTH), model, 2, BOTH, 0, jnp.float32).empty()
    firsts, _ = decode_loop.prefill_own(params, firsts, pad([row[:cut] for row in rows[:2]], BOTH), fresh=True)
    held = []
    for i in range(2):
        room = CacheShape(replace(config, recent=0), model, 1, BOTH, 0, jnp.float32).empty()
        held.append(decode_loop.begin(room, firsts.pick(jnp.array([i]))))
    index, tails = jnp.array([0, 1, 0]), pad([row[cut:] for row in rows], BOTH)
    whole = CacheShape(config, model, 3, BOTH + max(OWN) + NEW, NEW, jnp.float32).empty()
    whole, logits = decode_loop.prefill_after(params, whole, firsts, index, tails)
    own = CacheShape(config, model, 3, max(map(len, rows)) - cut + NEW, NEW, jnp.float32).empty()
    own = replace(own, common=Common(held=(), of=index))
    own, after = decode_loop.prefill_after(params, own, firsts, index, tails)
    np.testing.assert_array_equal(after, logits)
    own = replace(own, common=Common(held=tuple(held), of=index))
    assert (own.kept() == whole.kept()).all() and (own.seen == whole.seen).all()

    plain, first = followed(case, whole, logits)
    shared, second = followed(case, own, after)
    before = (
        int(whole.recent_size - whole.fill) + 1
    )  # the flush: from there on a last place of a float may be another code
    np.testing.assert_allclose(second[:before], first[:before], atol=1e-5, rtol=0)
    lossy = case.slot.lossy or case.later is not None
    np.testing.assert_allclose(second, first, atol=0.03 if lossy else 1e-4, rtol=0)
    assert (shared.kept() == plain.kept()).all() and len(second) > before


def test_row_attends_only_to_own_prefix():
    """The same codes under another number, and none: other logits."""
    case = CASES[0]
    cache = CacheShape(methods.parse("full"), case.params.config, 2, 64, 32, jnp.float32).empty()
    firsts = CacheShape(methods.parse("full").uncompressed(32), case.params.config, 2, 32, 0, jnp.float32).empty()
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, (2, 32)).tolist()
    firsts, _ = decode_loop.prefill_own(case.params, firsts, pad(ids, 32), fresh=True)
    room = replace(methods.parse("full"), recent=0)
    held = tuple(
        decode_loop.begin(
            CacheShape(room, case.params.config, 1, 32, 0, jnp.float32).empty(), firsts.pick(jnp.array([i]))
        )
        for i in range(2)
    )
    cache = replace(cache, counts=firsts.counts)
    said = {}
    for of in ((0, 1), (1, 0), (-1, 1), (0, 0)):
        begun = replace(cache, common=Common(held=held, of=jnp.array(of)))
        _, logits = decode_loop.step(case.params, begun, jnp.array([7, 7]))
        said[of] = np.asarray(logits)
    assert np.abs(said[0, 1][0] - said[1, 0][1]).max() < 1e-5 and np.abs(said[0, 1][1] - said[1, 0][0]).max() < 1e-5
    assert np.abs(said[0, 0][0] - said[0, 1][0]).max() < 1e-5 < np.abs(said[0, 0][1] - said[0, 1][1]).max()
    assert np.abs(said[-1, 1][0] - said[0, 1][0]).max() > 1e-3


def test_pick_put_and_fork_keep_prefix_index():
    config, model = methods.parse("full"), rig.PARAMS.config
    tiers = tuple(x.tiers for x in CacheShape(replace(config, recent=0), model, 1, 32, 0, jnp.float32).empty().layers)
    cache = CacheShape(config, model, 3, 64, 32, jnp.float32).empty()
    cache = replace(cache, common=Common(held=(tiers, tiers), of=jnp.array([0, 1, -1])))
    assert cache.pick(jnp.array([2, 1, 1])).common.of.tolist() == [-1, 1, 1]
    assert cache.fork(2).common.of.tolist() == [0, 0, 1, 1, -1, -1]
    rows = replace(cache.pick(jnp.array([0, 1])), common=Common(held=(), of=jnp.array([1, 1])))
    assert cache.put(jnp.array([2, 3]), rows).common.of.tolist() == [0, 1, 1]
    assert cache.rollback(0).common.of.tolist() == [0, 1, -1]
    assert cache.nbytes == tree_bytes((cache.layers, cache.common)) > 2 * tree_bytes(tiers)


def test_step_makes_no_copy_of_shared_prefix():
    """4,096 tokens that 4 rows share, of which the step's program has no temporary as large as a layer's."""
    config, model = methods.parse("int8"), rig.PARAMS.config
    cache = CacheShape(config, model, 4, 64, 32, jnp.float32).empty()
    held = CacheShape(replace(config, recent=0), model, 1, 4096, 0, jnp.float32).empty().layers
    cache = replace(cache, common=Common(held=(tuple(x.tiers for x in held),) * 2, of=jnp.zeros(4, jnp.int32)))
    program, _ = compiled(decode_loop.step, rig.PARAMS, cache, jnp.zeros(4, jnp.int32))
    plain, _ = compiled(decode_loop.step, rig.PARAMS, replace(cache, common=None), jnp.zeros(4, jnp.int32))
    assert 0 < program.temporary - plain.temporary < tree_bytes(held[0].tiers) / 2


def test_shapes_of_bucket_with_shared_prefixes():
    bucket = Bucket(lengths=(160,), new=64, rows=(), first=128, tails=(16, 32), common=True)
    bucket = replace(bucket, shared=tuple(Group(128, tuple(range(x, x + 16))) for x in (0, 16, 32)))
    whole = replace(bucket, common=False)
    about = dict(config=methods.parse("int4"), model=rig.MODEL, rows=8, several=2, dtype=jnp.float32)
    made, plain = (
        jax.eval_shape(Shapes(bucket=x, greedy=True, penalised=False, **about).state) for x in (bucket, whole)
    )
    one = jax.eval_shape(Shapes(bucket=bucket, greedy=True, penalised=False, **about).held)
    slots = [x.layers[0].tiers[0].pos.shape[2] for x in (made.cache, plain.cache)]
    assert slots == [32 + 64 - 17, 160 + 64 - 17] and made.cache.nbytes < plain.cache.nbytes
    assert len(made.cache.common.held) == 2  # of three: 8 rows are those of one, and the next is read meanwhile
    assert [x.pos.shape for x in made.cache.common.held[0][0]] == [x.pos.shape for x in one.layers[0].tiers]
    assert made.cache.common.held[0][0][0].pos.shape[2] == 127
