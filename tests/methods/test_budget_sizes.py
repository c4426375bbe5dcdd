"""The law of budgets: every method that has one takes it in tokens, as a fraction and in bytes, and keeps to it."""

from __future__ import annotations

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.cache import Counts, tree_bytes
from jkv.core.flush import limited
from jkv.methods import METHODS, parse
from jkv.methods.budgets.layers import pyramid
from jkv.methods.budgets.sizes import Beyond, Tokens, beyond
from jkv.methods.compatibility import check
from jkv.prompts.allocation import CacheShape
from jkv.protocols import Budget
from support.rig import AROUND, CASES, MODEL, PARAMS

LENGTH, NEW, KEEP = 120, 40, 0.45
TOKENS = 54  # floor(0.45 * 120)
SIZED = [name for name, method in METHODS.items() if method.sized]
IDS = np.random.default_rng(3).integers(0, MODEL.vocab, LENGTH).tolist()


def written(name: str, size: str) -> str:
    """A method with the arguments of its case, and a size: small windows, so that a small text is long enough."""
    text = CASES[name][0].text.split(" | ")[0].format(b=12, p=3, t=0.0)
    return re.sub(r"\((budget|keep)=[0-9.]+", f"({size}", text)


def planned(text: str, longest: int = LENGTH, new: int = 0):
    return CacheShape(parse(text), MODEL, 1, longest, new, jnp.float32).layout()


def limits(plans, seen: int, generated: int = 0) -> list[int]:
    """Tokens that each layer may hold of a row, its recent window and its sinks included."""
    of = Counts(seen=jnp.array([seen]), prompt=jnp.array([seen - generated]), later=jnp.array([0]))
    return [int(limited(plan, of, None)[0]) + plan.exact for plan in plans]


def divided(plans) -> list[bool]:
    """Which layers have a part of the size: all but those that keep everything."""
    return [plan.size.whole[0] < plan.size.whole[1] for plan in plans]


def of_prompt(text: str) -> Budget:
    """The budget of a composition, without what goes around it."""
    budget = parse(text).budget
    return budget.budget if isinstance(budget, Beyond) else budget


ALIKE = [name for name in SIZED if not parse(written(name, f"budget={TOKENS}")).budget.statistic]
DIVIDED = [name for name in SIZED if of_prompt(written(name, f"budget={TOKENS}")) != Tokens(tokens=TOKENS)]


@pytest.mark.parametrize("name", SIZED)
def test_every_method_takes_its_size_in_three_forms(name: str):
    for size in (f"budget={TOKENS}", f"keep={KEEP}", "bytes='64MiB'"):
        config = parse(written(name, size))
        check(config, MODEL)
        assert config.budget.bounded
    assert {"budget", "keep", "bytes"} <= {*METHODS[name].arguments}


@pytest.mark.parametrize("name", ALIKE)
def test_fraction_equals_its_token_count(name: str):
    number, arrays = planned(written(name, f"budget={TOKENS}"))
    fraction, same = planned(written(name, f"keep={KEEP}"))
    assert [p.capacity for p in fraction] == [p.capacity for p in number]
    assert limits(fraction, LENGTH) == limits(number, LENGTH) and tree_bytes(same) == tree_bytes(arrays)
    assert np.mean([n for n, own in zip(limits(number, LENGTH), divided(number), strict=True) if own]) == TOKENS


@pytest.mark.parametrize("name", ALIKE)
def test_fraction_grows_with_row_in_every_layer(name: str):
    """Never more than was asked, less by no whole unit, and what a layer was given is not taken back."""
    config = parse(written(name, f"keep={KEEP}"))
    plans, _ = planned(written(name, f"keep={KEEP}"), 4 * LENGTH, NEW)
    before, mine = [0] * len(plans), divided(plans)
    for seen in (60, 61, 100, 240, 333, 4 * LENGTH - NEW):
        now = limits(plans, seen)
        want = parse(f"knorm(keep={KEEP})").budget.count(seen)
        budget = of_prompt(written(name, f"keep={KEEP}"))
        least = getattr(budget, "size", budget).least
        mean = np.mean([n for n, own in zip(now, mine, strict=True) if own])
        assert max(want, least) - config.unit <= mean <= max(want, least, config.recent)
        assert all(a <= b for a, b in zip(before, now, strict=True))
        before = now


@pytest.mark.parametrize("name", ALIKE)
def test_byte_budget_is_filled_and_not_exceeded(name: str):
    _, arrays = planned(written(name, f"budget={TOKENS}"), LENGTH, NEW)
    most = tree_bytes(arrays)
    plans, made = planned(written(name, f"bytes={most}"), LENGTH, NEW)
    assert tree_bytes(made) == most
    plans, less = planned(written(name, f"bytes={most - 1}"), LENGTH, NEW)
    assert 0.9 * most < tree_bytes(less) < most


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("form", ["keep", "bytes"])
def test_prompt_fills_requested_budget(name: str, form: str):
    plain = planned(f"snapkv(budget={2 * TOKENS}, window=8)", LENGTH + 64, 64)[1]
    asked = {"keep": f"keep={KEEP}", "bytes": f"bytes={tree_bytes(plain)}"}[form]
    cache, _ = jkv.prefill(PARAMS, written(name, asked), [IDS], reserve=64)
    kept = np.asarray(cache.kept())[:, 0].mean(1)
    if form == "keep":
        mine = divided(cache.plan)
        assert 0.95 * TOKENS <= np.mean([n for n, own in zip(kept, mine, strict=True) if own]) <= TOKENS
    else:
        assert 0.8 * tree_bytes(plain) <= cache.nbytes <= tree_bytes(plain)


def refusal(text: str) -> str:
    """What is said of it, when it is read, checked or laid out; "" where nothing is wrong."""
    try:
        check(parse(text), MODEL)
        planned(text, LENGTH, NEW)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", SIZED)
def test_reported_minimum_size_works_and_less_is_refused(name: str):
    said, least = refusal(written(name, "budget=1")), 1
    while said:  # what a method needs is found before what a layer needs
        found = re.search(r"(?:take|to) budget=([0-9]+).* or more", said)
        assert found and int(found[1]) > least, said
        least = int(found[1])
        assert refusal(written(name, f"budget={least - 1}"))
        said = refusal(written(name, f"budget={least}"))
    said = refusal(written(name, "bytes=1"))
    found = re.search(r"take bytes=([0-9]+) or more", said)
    assert found, said
    assert not refusal(written(name, f"bytes={found[1]}"))
    assert refusal(written(name, f"bytes={int(found[1]) - 1}"))
    if said := refusal(written(name, f"keep={0.5 / MODEL.context}")):
        found = re.search(r"keep=([0-9.]*[0-9]), or more", said)
        assert found, said
        assert not refusal(written(name, f"keep={found[1]}"))
        assert refusal(written(name, f"keep={float(found[1]) - 1 / MODEL.context}"))


NATURAL = [name for name, method in METHODS.items() if not method.sized]


@pytest.mark.parametrize("name", NATURAL)
@pytest.mark.parametrize("form", ["budget=256", "keep=0.5", "bytes='1MiB'"])
def test_size_of_unsized_method_is_refused_with_remedy(name: str, form: str):
    method = METHODS[name]
    if form.split("=")[0] in method.arguments:
        return  # mikv's own share
    with pytest.raises(ValueError) as error:
        parse(f"{name}({form})")
    if {"budget", "score"} & {*method.axes}:
        assert all(f"{x}=" in str(error.value) for x in method.arguments)
    elif name in AROUND - {"pooled", "values"}:
        check(parse(re.search(r"as in '(.*)'", str(error.value))[1]), MODEL)
    elif parse(name).taught:
        assert "it keeps every token" in str(error.value)
    else:
        config = parse(re.search(r"write '(.*)'", str(error.value))[1].replace(form.split("=")[0] + "=...", form))
        check(replace(config, recent=min(config.recent, 64)), MODEL)  # windows that are longer than these budgets


# ------------------------------------------------------------------------------- what follows, on top of a budget


@pytest.mark.parametrize("name", METHODS)
def test_append_composes_with_any_budget_in_either_order(name: str):
    text = written(name, f"budget={TOKENS}") if name in SIZED else name
    try:
        after = parse(f"{text} | append")
    except ValueError as error:
        alone = f"write 'quest | {name}'"  # what changes a selector
        assert f"{name} and append both fill the axis 'append'" in str(error) or alone in str(error)
        return
    assert after.budget == parse(f"append | {text}").budget == beyond(parse(text).budget, 1.0)


# -------------------------------------------------------------------------------------- what layers hand on


@pytest.mark.parametrize("most", range(20, 61, 5))
@pytest.mark.parametrize(("layers", "group"), [(2, 1), (7, 1), (30, 1), (30, 8), (9, 4)])
def test_pyramid_gives_unfillable_budget_to_upper_layers(layers: int, group: int, most: int):
    got = pyramid(40, layers, 20, group, most)
    assert sum(got) == 40 * layers and max(got) <= max(most, 40)
    assert list(np.diff(got[::group]) <= 1) == [True] * (len(got[::group]) - 1)
    if most >= 80:
        assert got == pyramid(40, layers, 20, group)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_short_row_fills_divided_budget(name: str):
    """Most of a text, divided: layers that want more than the text leave it to the others."""
    text = written(name, "budget=100")
    cache, _ = jkv.prefill(PARAMS, text, [IDS[:112]], reserve=0)
    kept = [n for n, own in zip(np.asarray(cache.kept())[:, 0].mean(1), divided(cache.plan), strict=True) if own]
    assert np.mean(kept) == 100 or cache.plan[0].expires
