"""A drafter that goes on from what its model predicts: what its folder holds, what it guesses, and whom it is for."""

from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.generation import generate
from jkv.io import trained_weights
from jkv.io.errors import FormatError
from jkv.models import TINY, random
from jkv.speculative.autoregressive import Odds
from jkv.speculative.build import build_batch_drafter, build_drafter
from jkv.speculative.decoding import Drafting
from jkv.speculative.draft_length import NODES, ROW
from jkv.speculative.redrafter import (
    METHOD,
    NEWEST,
    STEP,
    Distilled,
    Net,
    chains,
    ends,
    hidden_of,
    packed,
    unpacked,
    wide,
)
from jkv.training.losses import Batch
from jkv.training.optimizer import create
from jkv.training.recipes.redrafter import Recipe, lesson, start
from support.rig import PARAMS

TEXT = [5, 6, 7, 8, 9] * 8
EVERY = np.arange(100)
WIDTH = PARAMS.config.width


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """A clock that stands: a pass of n tokens is taken to cost 1 + 0.2 (n - 1) steps."""
    monkeypatch.setattr(generate, "Drafting", partial(Drafting, clock=lambda: 0.0))


def written(folder, net, params=PARAMS, words=EVERY, **card):
    about = {"method": METHOD, "model": trained_weights.identities(params)} | card
    trained_weights.write(folder, packed(net, words), about, wide)
    return str(folder)


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    """One that has learned nothing."""
    return written(tmp_path_factory.mktemp("naive"), start(WIDTH, 16, 3))


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """One that knows by heart how the model goes on after TEXT."""
    answer = jkv.generate(PARAMS, "int8", TEXT, max_new_tokens=40, stop_ids=()).tokens
    ids = jnp.asarray([[*TEXT, *answer]], jnp.int32)
    batch = Batch(ids=ids, pos=jnp.arange(ids.shape[1])[None])
    own, recipe = ends(PARAMS, EVERY), Recipe(steps=150, rate=5e-3)
    told = lesson(PARAMS, own, batch, 100)
    state = create(start(WIDTH, 24, 0), recipe.tune())

    @jax.jit
    def step(state):
        grad = jax.grad(recipe.loss, has_aux=True)
        return state.apply_gradients(
            grads={"score": grad(state.score, own.bare, batch, told, state.step, jax.random.key(0))[0]}
        )

    for _ in range(recipe.steps):
        state = step(state)
    return written(tmp_path_factory.mktemp("taught"), state.score)


@pytest.mark.slow
@pytest.mark.parametrize("heat", [{}, {"temperature": 0.8, "seed": 4}])
def test_drafts_change_no_token(naive, taught, heat):
    how = {"max_new_tokens": 40, "stop_ids": (), **heat}
    want = jkv.generate(PARAMS, "int8", [TEXT, [3, 4, 5]], **how)
    for folder in (naive, taught):
        got = jkv.generate(PARAMS, "int8", [TEXT, [3, 4, 5]], drafter=f"drafter(folder={folder!r})", **how)
        assert got.tokens == want.tokens and 0 < got.receipt.passes <= 40
        assert got.receipt.drafted > 0 and got.receipt.draft_failed is None


@pytest.mark.slow
def test_memorized_continuation_is_accepted(taught):
    got = jkv.generate(PARAMS, "int8", TEXT, max_new_tokens=40, stop_ids=(), drafter=Distilled(PARAMS, taught))
    assert got.receipt.passes <= 20 and got.receipt.drafted_taken >= 20


def by_hand(net: Net, params, own, u, newest, known, most, odds):
    """A chain of one row, by the formula, in float64; and where it may end."""
    x = {f.name: np.asarray(getattr(net, f.name), np.float64) for f in fields(net)}
    table = np.asarray(params.embed, np.float64)
    words, head, norm = (np.asarray(y, np.float64) for y in (own.words, own.bare.head, own.bare.norm))
    even = lambda v: v / np.sqrt((v * v).mean() + 1e-6)  # noqa: E731
    h = x["hidden"] @ u + sum(x["newest"][j] @ even(table[t]) for j, t in enumerate(newest[1:]) if t >= 0)
    token, chance, ids, qs = newest[0], 1.0, [], []
    while len(ids) < most and chance > ROW:
        h = h + x["state"] @ even(h) + x["word"] @ even(table[token])
        for gate, up, down in zip(x["gate"], x["up"], x["down"], strict=True):
            y = even(h)
            g = gate @ y
            h = h + down @ (g / (1 + np.exp(-g)) * (up @ y))
        y = even(x["out"] @ even(h))
        y = y / np.sqrt((y * y).mean() + params.config.eps) * norm
        z = head @ y
        p = np.exp(z - z.max())
        p /= p.sum()
        sure = known[len(ids)] if len(ids) < len(known) else -1
        token = sure if sure >= 0 else int(words[p.argmax()])
        chance *= 1 if sure >= 0 else odds.of(p.max())
        ids.append(token)
        qs.append(p.max())
    return ids, qs


@pytest.mark.parametrize("odds", [Odds(), Odds(bias=0.5, slope=3.0)])
@pytest.mark.parametrize("known", [[], [3, 4]])
@pytest.mark.parametrize("newest", [[7, 8, 9, 4], [7, 8, -1, -1]])
def test_chain_matches_formula(odds, known, newest):
    """Sharpened, so that chains are long; of some words, and of one row that stops before the other."""
    rng, words = np.random.default_rng(1), np.arange(20, 100)
    net = start(WIDTH, 12, 5)
    own = ends(PARAMS, words)
    own = replace(own, bare=replace(own.bare, norm=6 * own.bare.norm))
    u = rng.normal(size=(1, WIDTH))
    u /= np.sqrt((u * u).mean())
    logits = np.zeros((1, 100), np.float32)
    logits[:, words] = head(PARAMS, u, words)
    padded = jnp.asarray([[*known, *[-1] * NODES][:NODES]], jnp.int32)
    ids, qs = chains(
        net,
        own,
        jnp.asarray(logits),
        jnp.asarray([newest], jnp.int32),
        padded,
        jnp.int32(6),
        jnp.asarray([odds.bias, odds.slope], jnp.float32),
    )
    want, sure = by_hand(net, PARAMS, own, u[0], newest, known, 6, odds)
    assert 6 >= len(want) > len(known) and ids[0].tolist() == want + [-1] * (NODES - len(want))
    np.testing.assert_allclose(qs[0, : len(want)], sure, rtol=2e-3)


def head(params, u, words):
    """The logits of some words, f64, of hidden numbers of root mean square 1."""
    table = np.asarray(params.embed if params.head is None else params.head, np.float64)
    return (u * np.asarray(params.norm, np.float64)) @ table[words].T


def test_hidden_states_are_recovered_from_logits():
    """Also where fewer words than numbers tell some of them only: as much as tells the logits."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=PARAMS.embed.shape), jnp.float32)
    norm = jnp.asarray(rng.uniform(0.5, 2, WIDTH), jnp.float32)
    for params in (PARAMS, replace(PARAMS, head=table, norm=norm)):
        own, u = ends(params, np.arange(3, 95)), rng.normal(size=(2, WIDTH))
        u /= np.sqrt((u * u).mean(-1, keepdims=True))
        z = head(params, u, np.arange(3, 95)[own.some])
        np.testing.assert_allclose(hidden_of(own.back, jnp.asarray(z, jnp.float32)), u, atol=2e-3)
    few = ends(PARAMS, np.arange(5))
    z = head(PARAMS, rng.normal(size=(1, WIDTH)), np.arange(5))
    np.testing.assert_allclose(head(PARAMS, z @ np.asarray(few.back, np.float64), np.arange(5)), z, rtol=1e-3)


@pytest.mark.slow
def test_known_tokens_are_read_and_ended_rows_get_no_draft(taught):
    one = Distilled(PARAMS, taught)

    class Verifier:
        params, sampling = PARAMS, None

        class state:  # noqa: N801
            logits, alive = jnp.zeros((2, 100)), jnp.asarray([True, False])

    Verifier.known = [[4], []]
    guesses = one.propose([[*TEXT, 5, 4], [1, 2]], 3, Verifier)
    assert 0 < len(guesses[0].ids) <= 2 and [*guesses[1].ids] == []
    assert guesses[0].chance == pytest.approx(one.odds.along(one.newest[0][2]))


def test_folder_stores_eight_bits_per_weight(naive):
    arrays, _ = trained_weights.read(naive, METHOD)
    net, words = unpacked(arrays, PARAMS, naive)
    before = start(WIDTH, 16, 3)
    for f in fields(Net):
        x, y = (np.asarray(getattr(some, f.name), np.float64) for some in (before, net))
        assert arrays[f.name].dtype == np.int8
        assert (np.abs(x - y) <= 0.501 * np.float64(arrays[f.name + STEP])).all()
    assert words.tolist() == EVERY.tolist()
    assert Distilled(PARAMS, naive).nbytes == 4 * (
        sum(x.size for x in jax.tree.leaves(net)) + 100 * WIDTH * 2  # the head of its words, and what finds hidden ones
    )


def test_drafter_is_bound_to_its_model(naive):
    other = replace(PARAMS, norm=PARAMS.norm + 1)
    with pytest.raises(ValueError, match="were trained for the model"):
        build_drafter(f"drafter(folder={naive!r})", other)
    with pytest.raises(ValueError, match="were trained for the model"):
        build_drafter([other, f"drafter(folder={naive!r})"], PARAMS)
    assert build_drafter([PARAMS, f"drafter(folder={naive!r})"], other)  # it drafts for the one before it
    with pytest.raises(ValueError, match="drafter needs weights that were made for this model.*`jkv train drafter"):
        build_drafter("drafter", PARAMS)
    with pytest.raises(ValueError, match="drafter takes folder"):
        build_drafter("drafter(size=3)", PARAMS)
    with pytest.raises(ValueError, match="no model that verifies"):
        build_drafter([f"drafter(folder={naive!r})", "suffix"], PARAMS)
    assert build_batch_drafter(f"drafter(folder={naive!r})", PARAMS).rows_change


def test_foreign_folders_are_refused(naive, tmp_path):
    trained_weights.write(
        tmp_path / "gate", {"a": np.zeros(2)}, {"method": "trimkv", "model": trained_weights.identities(PARAMS)}
    )
    with pytest.raises(FormatError, match="describes 'trimkv', not drafter"):
        Distilled(PARAMS, str(tmp_path / "gate"))
    arrays, card = trained_weights.read(naive, METHOD)
    changes = {
        "missing": {k: x for k, x in arrays.items() if k != "up"},
        "more": arrays | {"more": np.zeros(1)},
        "narrow": arrays | {"out": arrays["out"][:1]},
        "number": arrays | {"state": np.float32(1)},
        "empty": arrays | {"state": arrays["state"][:0]},
        "words": arrays | {"words": arrays["words"][:0]},
        "floats": arrays | {"words": arrays["words"].astype(np.float32)},
        "beyond": arrays | {"words": arrays["words"] + 1},
        "before": arrays | {"words": arrays["words"] - 1},
        "kind": arrays | {"out": arrays["out"].astype(np.float32)},
    }
    for name, some in changes.items():
        trained_weights.write(tmp_path / name, some, {k: card[k] for k in ("method", "model")}, wide)
        with pytest.raises(FormatError, match="its arrays are not those of drafter"):
            Distilled(PARAMS, str(tmp_path / name))


def test_shipped_drafter_is_found_by_name(naive, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_weights, "SHIPPED", tmp_path)
    written(tmp_path / "tiny-drafter", start(WIDTH, 16, 3))
    made = build_drafter("drafter", PARAMS)
    assert isinstance(made, Distilled)
    same = [
        np.array_equal(x, y)
        for x, y in zip(*map(jax.tree.leaves, (made.net, Distilled(PARAMS, naive).net)), strict=True)
    ]
    assert all(same)


def test_chains_run_for_attention_and_mamba_models():
    mamba = dict(model_type="mamba2", vocab_size=100, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16)
    for config in (mamba | {"n_groups": 1}, TINY):
        own = ends(random(config), np.arange(4))
        ids, _ = chains(
            start(32, 8, 0), own, jnp.zeros((1, 100)), jnp.zeros((1, NEWEST), jnp.int32),
            jnp.full((1, NODES), -1, jnp.int32), jnp.int32(2), jnp.zeros(2),
        )  # fmt: skip
        assert 0 <= int(ids[0, 0]) < 4
