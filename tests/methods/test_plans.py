"""Codecs by layer: what a plan gives each layer, how bits are divided, and what is refused."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jkv.cli.app import app
from jkv.io import learned, load
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.config import resolve
from jkv.methods.plans import METHOD, Plan
from jkv.training import data
from jkv.training.estimates import Batch
from jkv.training.plans import divided, layers
from support.planted import planted
from support.rig import MODEL, PARAMS, SENSITIVITY, L
from support.tiny import LATENT

TEXTS = ("int8", "int4(rotate=True)", "turboquant(bits=3)")
WEIGHED = tuple(f"kvtc(bits={bits}, sensitivity={SENSITIVITY!r})" for bits in (2, 3, 4))


def folder(path, texts=TEXTS, keys=(0, 2), values=(1, 0), **card) -> str:
    arrays = {"keys": np.asarray(keys), "values": np.asarray(values)}
    learned.write(path, arrays, dict(method=METHOD, model=learned.identities(PARAMS), candidates=texts) | card)
    return str(path)


def same(a, b) -> bool:
    leaves = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.parametrize(
    "texts", [TEXTS, WEIGHED, tuple(f"{x} | snapkv(budget=48)" for x in TEXTS)], ids=["", "w", "e"]
)
def test_a_layer_has_what_a_cache_of_its_choice_would_have_there(texts, tmp_path):
    plan = Plan.read(folder(tmp_path, texts))
    own = resolve(parse(f"planned(plan={str(tmp_path)!r})").bound(PARAMS), MODEL, 96, 16)
    others = [resolve(parse(text).bound(PARAMS), MODEL, 96, 16) for text in texts]
    for i in range(L):
        for j, tier in enumerate(own[i].tiers):
            assert same(tier.k, others[plan.keys[i]][i].tiers[j].k)
            assert same(tier.v, others[plan.values[i]][i].tiers[j].v)
        assert same(own[i].score, others[0][i].score) and own[i].size == others[0][i].size
    assert own[0].tiers[-1].k != own[1].tiers[-1].k


def test_bits_go_where_they_gain_most():
    """Never dearer than one choice for all, and as cheap as the best of all divisions but for the last step."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        sizes = np.tile([2.0, 3.0, 4.0, 8.0], (4, 1))
        costs = np.sort(rng.exponential(rng.exponential(1, (4, 1)), (4, 4)))[:, ::-1]
        most = rng.uniform(8, 32)
        got = divided(costs, sizes, most)
        rows = np.arange(4)
        fits = [x for x in product(range(4), repeat=4) if sizes[rows, x].sum() <= most]
        paid = costs[rows, got].sum()
        assert sizes[rows, got].sum() <= most + 1e-6
        best, step = min(costs[rows, x].sum() for x in fits), (costs[:, 0] - costs[:, -1]).max()
        assert best - 1e-12 <= paid <= best + step
        assert paid <= min(costs[:, i].sum() for i in range(4) if (i,) * 4 in fits)


@pytest.mark.slow
def test_the_layer_that_needs_more_bits_has_them(tmp_path, monkeypatch):
    params, ids = planted(100), np.random.default_rng(5).integers(3, 90, (1, 96))
    batch = Batch(ids=jnp.asarray(ids), pos=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
    monkeypatch.setattr(load, "load", lambda *_: params)
    monkeypatch.setattr(data, "texts", lambda *_: batch)
    sizes = ("--bits", "9", "--length", "96", "--candidate", "int8", "--candidate", "int4")
    args = ["calibrate", "layers", *sizes, "--out"]
    done = CliRunner().invoke(app, [*args, str(tmp_path / "plan")])
    assert done.exit_code == 0 and "write: planned(plan=" in done.output, done.output
    arrays, card = learned.read(tmp_path / "plan", METHOD)
    assert arrays["keys"][2] == 0 and card["bits"] <= 9 and card["kl"] < card["uniform"]["int4"] / 2
    again = CliRunner().invoke(app, [*args, str(tmp_path / "plan")])
    assert again.exit_code == 1 and "holds a card.json already" in again.output
    few = CliRunner().invoke(app, ["calibrate", "layers", "--bits", "2", *sizes[2:], "--out", str(tmp_path / "few")])
    assert few.exit_code == 1 and "the smallest candidates have" in few.output


def test_what_is_no_plan_is_refused_by_name(tmp_path):
    for i, (texts, why) in enumerate(
        (
            (("int8", "kivi(group=8)"), "differ in more than their codecs"),
            (("int8", "snapkv(budget=48) | int4"), "differ in more than their codecs"),
            (("int8", "xkv"), "learn of no prompt"),
            (("int8", "intt4"), "did you mean"),
        )
    ):
        with pytest.raises(ValueError, match=why):
            parse(f"planned(plan={folder(tmp_path / str(i), texts, keys=(0, 1), values=(1, 0))!r})")
    spared = ("int8(exact_layers=[0])", "int4(exact_layers=[0])")
    for params, texts, why in ((PARAMS, spared, "goes with the plan"), (LATENT, TEXTS, "this model caches latents")):
        with pytest.raises(ValueError, match=why):
            layers(params, 1, 64, 0, lambda _: None, texts, 6.0)
    with pytest.raises(FormatError, match="it chooses"):
        Plan.read(folder(tmp_path / "a", keys=(0, 3)))
    with pytest.raises(FormatError, match="its candidates are"):
        Plan.read(folder(tmp_path / "b", texts=7))
    with pytest.raises(ValueError, match="no plan: run `jkv calibrate layers"):
        parse("planned").bound(PARAMS)
    with pytest.raises(ValueError, match="trained for the model"):
        parse(f"planned(plan={folder(tmp_path / 'c')!r})").bound(planted(1))
    with pytest.raises(ValueError, match="of 3 layers, and the model has 2"):
        resolve(parse(f"planned(plan={folder(tmp_path / 'd', keys=(0, 1, 2), values=(0, 1, 2))!r})"), MODEL, 96, 16)
