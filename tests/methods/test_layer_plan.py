"""Plans: what one gives each layer, how bytes are divided, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jkv import extend, prefill
from jkv.cache.cache import Counts, tree_bytes
from jkv.cli.app import app
from jkv.core.flush import limited
from jkv.eval.layer_cost import LayerTexts
from jkv.io import load, trained_weights
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.compatibility import check
from jkv.methods.config import resolve
from jkv.methods.layer_plan import METHOD, Plan
from jkv.prompts.allocation import CacheShape
from jkv.training.calibrate.layer_plan import Search, divided
from jkv.training.data import corpora
from jkv.training.recipes.locret import Batch
from support.planted import planted
from support.rig import MODEL, PARAMS, SENSITIVITY, L
from support.tiny import LATENT

TEXTS = ("int8", "int4(rotate=True)", "turboquant(bits=3)")
WEIGHED = tuple(f"kvtc(bits={bits}, sensitivity={SENSITIVITY!r})" for bits in (2, 3, 4))


def folder(path, texts=TEXTS, keys=(0, 2), values=(1, 0), budgets=(0, 0), **card) -> str:
    arrays = {"budgets": np.asarray(budgets), "keys": np.asarray(keys), "values": np.asarray(values)}
    trained_weights.write(
        path, arrays, dict(method=METHOD, model=trained_weights.identities(PARAMS), candidates=texts) | card
    )
    return str(path)


def same(a, b) -> bool:
    leaves = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.parametrize(
    "texts", [TEXTS, WEIGHED, tuple(f"{x} | snapkv(budget=48)" for x in TEXTS)], ids=["", "w", "e"]
)
def test_layer_codecs_equal_chosen_candidate(texts, tmp_path):
    plan = Plan.read(folder(tmp_path, texts))
    own = resolve(parse(f"planned(plan={str(tmp_path)!r})").bound(PARAMS), MODEL, 96, 16)
    others = [resolve(parse(text).bound(PARAMS), MODEL, 96, 16) for text in texts]
    for i in range(L):
        for j, tier in enumerate(own[i].tiers):
            assert same(tier.k, others[plan.keys[i]][i].tiers[j].k)
            assert same(tier.v, others[plan.values[i]][i].tiers[j].v)
        assert same(own[i].score, others[0][i].score) and own[i].size == others[0][i].size
    assert own[0].tiers[-1].k != own[1].tiers[-1].k


SIZES = ("budget=40", "keep=0.25", "keep=0.4")


@pytest.mark.parametrize("more", ["", " | append"])
def test_layer_budget_equals_chosen_candidate(more, tmp_path):
    texts = tuple(f"snapkv({size}, window=8) | int4{more}" for size in SIZES)
    counts = Counts(seen=jnp.array([96, 60]), prompt=jnp.array([80, 44]), later=jnp.array([0, 3]))
    others = [planned_for(parse(text)) for text in texts]
    for which in ((0, 1), (2, 0), (1, 2)):
        made = folder(tmp_path / f"{which}", texts, keys=(0, 0), values=(0, 0), budgets=which)
        own = planned_for(parse(f"planned(plan={made!r})"))
        for i, choice in enumerate(which):
            want = others[choice][i]
            assert own[i].size == want.size and own[i].tiers == want.tiers, which
            got, limit = (np.asarray(limited(x, counts, None)) for x in (own[i], want))
            np.testing.assert_array_equal(got, limit)
    assert len({x[0].size for x in others}) == 3


def planned_for(config):
    config = config.bound(PARAMS)
    return resolve(config, MODEL, 96, 16, CacheShape(config, MODEL, 1, 96, 16, jnp.float32).divide().sizes)


def test_plan_without_budgets_uses_budget_of_candidates(tmp_path):
    """As folders were written before plans had budgets, one of which is among the results."""
    arrays, card = trained_weights.read(folder(tmp_path / "new", [f"{x} | snapkv(budget=48)" for x in TEXTS]), METHOD)
    del arrays["budgets"]
    trained_weights.write(tmp_path / "old", arrays, card)
    assert Plan.read(tmp_path / "old") == Plan.read(tmp_path / "new")
    first = Plan.read(Path(__file__).parents[2] / "results/layers/kvtc-3.25")
    assert len(first.budgets) == len(first.keys) == 30 and not any(first.budgets) and {*first.values} == {0, 1, 2, 3}


@pytest.mark.slow
def test_cache_follows_plan_in_each_layer(tmp_path):
    texts = ("snapkv(keep=0.25, window=8)", "snapkv(keep=1.0, window=8) | int8")
    made = folder(tmp_path, texts, keys=(1, 0), values=(1, 0), budgets=(0, 1))
    ids = np.random.default_rng(0).integers(0, MODEL.vocab, (1, 80)).tolist()
    cache, _ = prefill(PARAMS, f"planned(plan={made!r})", ids, reserve=16)
    assert np.asarray(cache.kept())[:, 0].tolist() == [[20] * MODEL.heads, [80] * MODEL.heads]
    with pytest.raises(ValueError, match="prefill with a larger reserve="):  # the upper layer would lose tokens
        extend(PARAMS, cache, [ids[0] * 2])


def test_bit_division_is_near_optimal():
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


def calibrated(params, tmp_path, monkeypatch, most: int, *candidates: str, out: str = "plan"):
    ids = np.random.default_rng(5).integers(3, 90, (2, 96))
    batch = Batch(ids=jnp.asarray(ids), pos=jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape))
    monkeypatch.setattr(load, "load", lambda *_: params)
    monkeypatch.setattr(corpora, "texts", lambda *_: batch)
    asked = [x for text in candidates for x in ("--candidate", text)]
    args = ["calibrate", "layers", "--bytes", f"{most}", "--length", "96", "--out", str(tmp_path / out)]
    return CliRunner().invoke(app, [*args, *asked])


def bytes_of(params, text: str) -> int:
    return tree_bytes(CacheShape(parse(text).bound(params), params.config, 1, 96, 0, jnp.float32).layout()[1])


@pytest.mark.slow
def test_search_gives_sensitive_layer_more_bits(tmp_path, monkeypatch):
    params = planted(100)
    least, most = (bytes_of(params, text) for text in ("int4", "int8"))
    found = partial(calibrated, params, tmp_path, monkeypatch)
    done = found(least + (most - least) // 4, "int8", "int4")
    assert done.exit_code == 0 and "write: planned(plan=" in done.output, done.output
    arrays, card = trained_weights.read(tmp_path / "plan", METHOD)
    uniform = {row["cache"]: row for row in card["uniform"]}
    assert arrays["keys"][2] == 0 and card["kl"] < uniform["int4"]["kl"] / 2 and "int8" not in uniform
    assert bytes_of(params, f"planned(plan={str(tmp_path / 'plan')!r})") == card["bytes"] <= least + (most - least) / 4
    assert "holds a card.json already" in found(most, "int8", "int4").output
    few = found(least - 1, "int8", "int4", out="few")
    assert few.exit_code == 1 and f"takes {least} bytes or more" in " ".join(few.output.split())
    assert not (tmp_path / "few").exists()


@pytest.mark.slow
def test_killed_search_resumes(tmp_path, monkeypatch):
    params, asks, whole = planted(100), [], LayerTexts.swapped

    def swapped(self, *args):
        asks.append(args)
        if len(asks) == 2:
            raise MemoryError("killed")
        return whole(self, *args)

    most = bytes_of(params, "int8")
    found = partial(calibrated, params, tmp_path, monkeypatch, most)
    assert found("int8", "int4", out="once").exit_code == 0
    monkeypatch.setattr(LayerTexts, "swapped", swapped)
    assert found("int8", "int4").exit_code == 1 and len(asks) == 2
    assert "holds what another search measured (its candidates)" in " ".join(found("int8", "int3").output.split())
    assert found("int8", "int4").exit_code == 0 and len(asks) == 3  # the one that was killed, and no other, again
    assert trained_weights.read(tmp_path / "plan", METHOD)[1] == trained_weights.read(tmp_path / "once", METHOD)[1]
    assert not (tmp_path / "plan" / "measured.json").exists()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "measured.json").write_text("{}")
    assert "is not what a search wrote" in " ".join(found("int8", "int4", out="odd").output.split())


@pytest.mark.slow
def test_search_gives_silent_layer_fewest_tokens(tmp_path, monkeypatch):
    """What its attention gives is multiplied by zero: its tokens are worth nothing, and others have their bytes."""
    params, layers = planted(1), list(planted(1).layers)
    layers[1] = dict(layers[1], o=layers[1]["o"] * 0)
    params = replace(params, layers=tuple(layers))
    texts = [
        f"snapkv(keep={keep}, window=8) | {codec}" for keep, codec in ((0.25, "int8"), (0.5, "int4"), (1.0, "int8"))
    ]
    most = bytes_of(params, texts[1])
    done = calibrated(params, tmp_path, monkeypatch, most, *texts)
    assert done.exit_code == 0, done.output
    arrays, card = trained_weights.read(tmp_path / "plan", METHOD)
    assert arrays["budgets"][1] == 0 and arrays["budgets"].max() == 2
    assert card["kl"] < min(row["kl"] for row in card["uniform"])
    assert bytes_of(params, f"planned(plan={str(tmp_path / 'plan')!r})") == card["bytes"] <= most


def test_invalid_plans_are_refused_with_reason(tmp_path):
    for i, (texts, why) in enumerate(
        (
            (("int8", "kivi(group=8)"), "differ in more than their budgets and codecs"),
            (("int8", "snapkv(budget=48) | int4"), "differ in more than their budgets and codecs"),
            (("snapkv(keep=0.5)", "snapkv(keep=0.25, window=8)"), "differ in more than their budgets and codecs"),
            (("cake(keep=0.5)", "cake(keep=0.25)"), "divide their budget by each prompt"),
            (("int8", "xkv"), "learn of no prompt"),
            (("snapkv(bytes='60KiB')", "snapkv(bytes='24KiB') | int4"), "its bytes= are those of all layers"),
            (("int8", "intt4"), "did you mean"),
        )
    ):
        with pytest.raises(ValueError, match=why):
            parse(f"planned(plan={folder(tmp_path / str(i), texts, keys=(0, 1), values=(1, 0))!r})")
    spared = ("int8(exact_layers=[0])", "int4(exact_layers=[0])")
    picks = ("quest(page=8, pages=2) | int8", "quest(page=8, pages=2) | int4")
    for params, texts, why in (
        (PARAMS, spared, "goes with the plan"),
        (LATENT, TEXTS, "this model caches latents"),
        (PARAMS, picks, "a selector reads a part of each layer"),
    ):
        with pytest.raises(ValueError, match=why):
            Search(params, texts, 96, 1 << 20)
    with pytest.raises(FormatError, match="it chooses"):
        Plan.read(folder(tmp_path / "a", keys=(0, 3)))
    with pytest.raises(FormatError, match="numbers that are not whole"):
        Plan.read(folder(tmp_path / "f", budgets=(0.5, 1.0)))
    with pytest.raises(FormatError, match="its candidates are"):
        Plan.read(folder(tmp_path / "b", texts=7))
    with pytest.raises(ValueError, match="no plan: run `jkv calibrate layers"):
        parse("planned").bound(PARAMS)
    with pytest.raises(ValueError, match="trained for the model"):
        parse(f"planned(plan={folder(tmp_path / 'c')!r})").bound(planted(1))
    with pytest.raises(ValueError, match="of 3 layers, and the model has 2"):
        resolve(parse(f"planned(plan={folder(tmp_path / 'd', TEXTS, *[(0, 1, 2)] * 3)!r})"), MODEL, 96, 16)
    sizes = tuple(f"snapkv({size}, window=8)" for size in SIZES)
    tokens = parse(f"planned(plan={folder(tmp_path / 'e', sizes, (0,) * 3, (0,) * 3, (0, 1, 2))!r})")
    with pytest.raises(ValueError, match="of 3 layers, and the model has 2"):
        check(tokens, MODEL)
    with pytest.raises(ValueError, match="trained for the model"):
        tokens.bound(planted(1))
    with pytest.raises(FormatError, match="its arrays are not those of layers"):
        Plan.read(folder(tmp_path / "f", budgets=(0, 1, 2)))
