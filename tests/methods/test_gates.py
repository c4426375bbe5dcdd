"""Retention gates: the numbers of the paper's score, the tokens it keeps, and the folders that gates live in."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jkv
from jkv import models
from jkv.core import sharding
from jkv.eval import quality
from jkv.io import trained_weights as io
from jkv.io.errors import FormatError
from jkv.methods.budgets.layers import Won
from jkv.methods.budgets.sizes import Tokens
from jkv.methods.eviction import trained_gates
from jkv.nn.gates import LOG_BETA_MAX, RetentionGate
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Born
from support import rig, tiny
from support.losses import f64, log_beta
from support.rig import BUDGET, LENGTHS, MODEL, PARAMS, PROMPT, H, L
from support.scenes import evidence

TEXT = f"trimkv(budget={BUDGET}, gate={rig.GATE!r})"


def ranks(log_beta) -> np.ndarray:
    """Of tokens 0, 1, ... that were just read."""
    column = jnp.asarray(log_beta, jnp.float32)[None, None]
    ev = dataclasses.replace(evidence(np.eye(column.shape[2])), columns={"log_beta": column})
    return np.asarray(trained_gates.Retention().rank(ev))[0, 0]


def test_retention_ranks_match_paper_example():
    got = ranks(np.log([0.9, 0.5, 0.8, 0.99]))
    np.testing.assert_allclose(got, [-0.527, -2.773, -0.669, -0.020], atol=1e-3)
    assert got.argmin() == 1 and sorted(np.argsort(-got)[:2]) == [0, 3]


def test_retrieval_heads_forget_more_slowly():
    config = jkv.parse(f"retrieval(budget=24, window=2, sinks=1, gate={rig.GATE!r}, heads={rig.FINDERS!r})").bound(
        PARAMS
    )
    table = io.read(rig.FINDERS, "compresskv")[0]["heads"]
    column = np.log([[0.9, 0.5, 0.8, 0.99, 0.7, 0.6]] * H).astype(np.float32)[None]
    ev = dataclasses.replace(evidence(np.eye(6)), columns={"log_beta": jnp.asarray(column)})
    for layer in range(L):
        own = dataclasses.replace(config.score.score, heads=jnp.asarray(table[layer], jnp.float32))
        want = np.arange(7, 1, -1) * column[0] * (1 - table[layer].max(-1))[:, None]
        np.testing.assert_allclose(own.rank(ev)[0], want, rtol=1e-4, atol=1e-6)
        kept = dataclasses.replace(config.score, score=own).rank(ev)[0]
        assert np.isinf(kept[:, [0, 4, 5]]).all() and np.isfinite(kept[:, 1:4]).all()


def test_utility_rank_adds_lasting_and_fading_worth():
    """rank = log(exp(r) + exp(level) beta^age): of the newest beta says most, and of the oldest r does."""
    config = jkv.parse(f"utility(budget=24, window=2, sinks=1, gate={rig.WORTH!r})").bound(PARAMS)
    rng, arrays = np.random.default_rng(0), io.read(rig.WORTH, "utility")[0]
    x, own = rng.standard_normal((1, 6, MODEL.width)).astype(np.float32), config.score.for_layer(MODEL, 0)
    own = jax.tree.map(lambda a: a[0], own)
    k, pos = jnp.zeros((1, H, 6, 4)), jnp.arange(6, dtype=jnp.int32)[None]
    columns = own.birth(Born(x=jnp.asarray(x), k=k, v=k, pos=pos, ids=pos, out=jnp.eye(4)))
    one = {name: a[0].astype(np.float64) for name, a in arrays.items()}
    hidden = x[0] @ one["foreseen.hidden.0.kernel"] + one["foreseen.hidden.0.bias"]
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    r = (hidden @ one["foreseen.out.kernel"] + one["foreseen.out.bias"]).T
    fading = {name.removeprefix("fading."): a for name, a in arrays.items() if name.startswith("fading.")}
    fade = np.exp(log_beta(fading, 0, x[0].astype(np.float64)))
    want = np.log(np.exp(r) + np.exp(one["level"])[:, None] * fade ** np.arange(7, 1, -1))
    rank = np.asarray(own.rank(dataclasses.replace(evidence(np.eye(6)), columns=columns))[0])
    assert np.isinf(rank[:, [0, 4, 5]]).all()
    np.testing.assert_allclose(rank[:, 1:4], want[:, 1:4], rtol=1e-3, atol=1e-3)


def test_missing_heads_error_names_calibrate_command():
    with pytest.raises(ValueError, match="`jkv calibrate compresskv --model"):
        jkv.parse(f"retrieval(budget=24, gate={rig.GATE!r})").bound(PARAMS)
    with pytest.raises(ValueError, match="its first and newest tokens of 5"):
        jkv.parse("retrieval(budget=5)")


def test_locret_stabilizers_match_paper_example():
    """Scores 5, 1, 4, 2, 3, 0 in chunks of two, three places: {0, 1}, {0, 2, 3}, and without stabilizers {0, 2, 4}."""

    def kept(tokens: list[int], stabilizers: float, foreseen: tuple[float, ...] = (5.0, 1, 4, 2, 3, 0)) -> list[int]:
        n = max(tokens) + 1
        ev = evidence(np.eye(n))
        column = jnp.asarray(foreseen[:n], jnp.float32)[None, None]
        ev = dataclasses.replace(ev, columns={"foreseen": column}, limit=jnp.array([3]), seen=jnp.array([n]))
        score = jkv.parse(f"locret(budget=103, stabilizers={stabilizers})").score
        rank = np.asarray(score.rank(ev))[0, 0]
        return sorted(sorted(tokens, key=lambda i: -rank[i])[:3])

    assert kept([0, 1], 0.67) == [0, 1]
    assert kept([0, 1, 2, 3], 0.67) == [0, 2, 3]
    assert kept([0, 2, 3, 4, 5], 0.0) == [0, 2, 4]
    assert kept([0, 1, 2, 3], 0.67, (5.0, 4, 1, 2)) == [0, 2, 3] != kept([0, 1, 2, 3], 0.0, (5.0, 4, 1, 2))


@pytest.mark.parametrize("offset", [1.0, 17.0, 200.0])  # beta 0.7, almost 1, and 1 in float32
def test_equal_gates_give_sliding_window(offset: float):
    gate = jax.tree.map(jnp.zeros_like, RetentionGate.start(MODEL, 4, jax.random.key(0)).part(0))
    gate = gate.update(lambda x: jnp.full_like(x, offset), "out.bias")
    got = ranks(gate(jnp.ones((1, 300, MODEL.width)))[0, 0])
    assert (np.diff(got) > 0).all()  # the oldest goes first, also where every beta is 1


@jax.jit
def normed(ids: jax.Array) -> list[jax.Array]:
    """The normed input f[T,E] of every layer for one prompt i32[1,T]."""
    seen = []

    def attend(i, a):
        seen.append(a.x[0])
        p = jnp.einsum("bhgtd,bhsd->bhgts", rope.rotate(a.q, pos[:, None, None]), rope.rotate(a.k, pos[:, None]))
        p = jnp.where(jnp.tril(jnp.ones(p.shape[-2:], bool))[None, None, None], p * MODEL.scale, -jnp.inf)
        return jnp.einsum("bhgts,bhsd->bhgtd", jax.nn.softmax(p, -1), a.v), None

    pos, rope, net = jnp.arange(ids.shape[1])[None], MODEL.ropes[0], models.family(MODEL)
    x = net.embed(PARAMS, ids)
    for i in range(L):
        x, _ = net.layer(PARAMS, i, x, pos, attend)
    return seen


@pytest.mark.parametrize("row", [0, 1])
def test_slowest_fading_tokens_are_kept(row: int):
    cache, n = rig.prompted(TEXT), LENGTHS[row]
    arrays = f64(io.trained(rig.GATE, trained_gates.Retention()).weights.arrays)
    for layer, x in enumerate(normed(PROMPT[row : row + 1, -n:])):
        want = log_beta(arrays, layer, np.float64(x))
        recent = np.asarray(cache.layers[layer].tiers[0].columns["log_beta"])[row]
        pos = np.asarray(cache.layers[layer].tiers[0].pos)[row]
        np.testing.assert_allclose(recent, np.take_along_axis(want, pos, 1), rtol=2e-4)
        best = np.argsort((np.arange(n) - n - 1) * want, 1, kind="stable")[:, :BUDGET]
        np.testing.assert_array_equal(np.sort(pos, 1), np.sort(best, 1))
        assert len({tuple(p) for p in np.sort(pos, 1)}) == H  # the test's gate tells heads apart


# -------------------------------------------------------------------------------------------------------- makeeach


def test_outlook_sums_retention_over_future_queries():
    beta = np.array([0.9, 0.5, 0.999, 1e-3])
    ev = dataclasses.replace(evidence(np.eye(4)), columns={"log_beta": jnp.log(jnp.asarray(beta))[None, None]})
    for n in (1, 4, 1000):
        got = np.asarray(trained_gates.Outlook(ahead=n).rank(ev), np.float64)[0, 0]
        want = [np.log(sum(b ** (4 + 1 - i + m) for m in range(n))) for i, b in enumerate(beta)]
        np.testing.assert_allclose(got, want, rtol=2e-4)
    np.testing.assert_array_equal(trained_gates.Outlook().rank(ev), trained_gates.Retention().rank(ev))
    np.testing.assert_allclose(sum(0.9 ** (3 + m) for m in range(4)), 2.507031, rtol=1e-6)  # of the paper's code
    slow = dataclasses.replace(ev, columns={"log_beta": jnp.full((1, 1, 4), LOG_BETA_MAX)})
    np.testing.assert_allclose(trained_gates.Outlook(ahead=8).rank(slow), np.log(8), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_layers_get_slots_won_across_layers(seed: int, tokens: int):
    rng, (layers, heads) = np.random.default_rng(seed), (3, 2)
    ranks = rng.integers(0, 9, (layers, 2, heads, 20)).astype(float)  # with ties
    ranks[rng.random(ranks.shape) < 0.3] = -np.inf
    got = Won(size=Tokens(tokens=tokens), window=0).shares(ranks, [20, 20])
    assert got.sum(0).tolist() == [tokens * layers] * 2
    for row in range(2):
        every = [(-x, i) for i, of in enumerate(ranks[:, row]) for x in of.flat if np.isfinite(x)]
        won = sorted(every)[: tokens * layers * heads]
        spare = (tokens * layers * heads - len(won)) / layers
        count = np.array([sum(i == layer for _, i in won) for layer in range(layers)])
        assert (np.abs(got[:, row] - (count + spare) / heads) < 1).all()


@pytest.mark.parametrize("row", [0, 1])
def test_tokens_compete_across_layers_and_heads(row: int):
    cache, n = rig.prompted(rig.CASES["makeeach"][0].tight), LENGTHS[row]
    arrays = f64(io.trained(rig.DEEP, trained_gates.Outlook()).weights.arrays)
    fades = [log_beta(arrays, i, np.float64(x)) for i, x in enumerate(normed(PROMPT[row : row + 1, -n:]))]
    ranks = (n + 1 - np.arange(n)) * np.stack(fades)  # L,H,n
    best = np.zeros(ranks.size, bool)
    best[np.argsort(-ranks, axis=None, kind="stable")[: BUDGET * L * H]] = True
    best = best.reshape(ranks.shape)
    counts = []
    for layer in range(L):
        held = rig.held(cache, layer)[0][row, :, :n]
        counts += [held.sum()]
        assert abs(int(counts[-1]) - int(best[layer].sum())) < H  # whole places for each head
        for mine, rank in zip(held, ranks[layer], strict=True):  # each head holds its best
            assert set(np.flatnonzero(mine)) == set(np.argsort(-rank, kind="stable")[: mine.sum()])
    assert sum(counts) == BUDGET * L * H and len({int(x) for x in counts}) == L


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("makeeach(budget=0)", "budget=0: .* 1 or more"),
        ("makeeach(budget=8, ahead=0)", "ahead=0.* each 1 or more"),
        ("makeeach(budget=8, floor=2)", "floor=2.0: the share of an equal part"),
        ("makeeach(budget=8, chunk=4)", "stays whole until then, and chunk=4"),
    ],
)
def test_invalid_arguments_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        jkv.prefill(PARAMS, text.replace(")", f", gate={rig.DEEP!r})"), [[1, 2, 3]])


def test_makeeach_accepts_trimkv_gates():
    text = f"makeeach(budget=8, gate={rig.GATE!r})"
    assert jax.tree.leaves(jkv.parse(text).score)[0].shape == jax.tree.leaves(jkv.parse(TEXT).score)[0].shape
    with pytest.raises(FormatError, match="describes 'locret', not makeeach or trimkv"):
        jkv.parse(f"makeeach(budget=8, gate={rig.ESTIMATES!r})")


def test_saved_cache_loads_only_with_its_gate(tmp_path):
    cache, _ = jkv.prefill(PARAMS, TEXT, PROMPT[:1].tolist())
    jkv.save_cache(cache, tmp_path / "c", PARAMS)
    again = jkv.load_cache(tmp_path / "c", PARAMS)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(cache), strict=True))
    config = jkv.parse(TEXT)
    other = dataclasses.replace(config, score=jax.tree.map(lambda x: x + 1, config.score))
    with pytest.raises(FormatError, match="not those of this config"):
        jkv.load_cache(tmp_path / "c", PARAMS, other)


def test_config_with_weights_is_reusable():
    config = jkv.parse(TEXT)  # a program that takes a cache over must not take these along
    for _ in range(2):
        jkv.prefill(PARAMS, config, PROMPT[:1].tolist())
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(config))


def test_gate_of_another_model_is_refused():
    other = dataclasses.replace(PARAMS, norm=PARAMS.norm + 1)
    with pytest.raises(ValueError, match=f"trained for the model {io.identities(PARAMS)[0]}, and this one is .*train"):
        jkv.prefill(other, TEXT, [[1, 2, 3]])
    with pytest.raises(ValueError, match="`jkv train trimkv --model"):
        jkv.prefill(PARAMS, "trimkv(budget=48)", [[1, 2, 3]])
    with pytest.raises(ValueError, match="has no weights yet"):
        CacheShape(jkv.parse("trimkv(budget=48)"), MODEL, 1, 64, 0, jnp.float32).layout()


def test_gate_fits_model_in_every_dtype():
    config = jkv.parse(TEXT)
    for dtype in (jnp.bfloat16, jnp.float16):
        assert config.bound(jax.tree.map(lambda x, d=dtype: x.astype(d), PARAMS)) is not None


def test_bundled_gate_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "SHIPPED", tmp_path)
    tiny.gate(str(tmp_path / "tiny"))
    found = jkv.parse("trimkv(budget=48)").bound(PARAMS)
    want = jax.tree.leaves(jkv.parse(TEXT).score)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found.score), want, strict=True))
    cache = rig.prompted(TEXT)
    (tmp_path / "tiny" / io.WEIGHTS).unlink()  # it is read once
    costs = [quality.measure_usage(PARAMS, jkv.parse(text), cache) for text in ("trimkv(budget=48)", TEXT)]
    assert costs[0] == costs[1] and costs[0][0].bytes > 0


def card(folder, **changes):
    path = folder / io.CARD
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda f: (f / io.CARD).unlink(), "no card.json"),
        (lambda f: (f / io.CARD).write_text("{"), "cannot be read as JSON"),
        (lambda f: card(f, method="dms"), "describes 'dms', not trimkv"),
        (lambda f: card(f, model=["0"]), "was not written with"),
        (lambda f: (f / io.WEIGHTS).write_bytes((f / io.WEIGHTS).read_bytes()[:400]), "truncated"),
        (lambda f: io.write(f, {"into": np.ones(3)}, {"method": "trimkv", "model": []}), "not those of trimkv"),
    ],
)
def test_broken_folder_is_refused(tmp_path, harm, says):
    tiny.gate(str(tmp_path))
    harm(tmp_path)
    with pytest.raises(FormatError, match=says):
        jkv.parse(f"trimkv(budget=48, gate={str(tmp_path)!r})")


def test_weights_beyond_float16_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="beyond float16; nothing was written"):
        io.write(tmp_path, {"into": np.full(3, 1e6)}, {"method": "trimkv", "model": []})
    assert not list(tmp_path.iterdir())


def test_gate_is_replicated_over_mesh():
    mesh = sharding.mesh(jax.devices()[:1], MODEL, 2)
    where = sharding.of_rows(rig.empty(TEXT), mesh, H)
    assert {tuple(s.spec) for s in jax.tree.leaves(where.plan)} == {()}
    assert tuple(where.layers[0].recent.k.spec) == (sharding.ROWS, sharding.HEADS)
