"""Examples of agents' layers: what a gate lets in and what layouts cost, what a cache of plans saves."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from support.scripts import example
from support.speaking import TINY, byte_tokenizer

PARAMS = replace(jkv.models.random(TINY | dict(num_hidden_layers=1), 0, jnp.float32), tokenizer=byte_tokenizer())


gates, plans = example("tool_attention"), example("plan_cache")
TOOLS, TURNS = gates.scripted(8, 4)
ENCODE = gates.embedding(PARAMS, [x.summary for x in TOOLS])


def test_gate_admits_near_callable_tools():
    confirmed = {"confirmed"}
    assert gates.Gate(TOOLS, ENCODE, theta=-1, k=8).active("anything", confirmed) == TOOLS
    unmet = [x for x in TOOLS if x.needs]
    open_ = gates.Gate(TOOLS, ENCODE, theta=-1, k=8).active(unmet[0].summary)
    assert unmet and open_ == [x for x in TOOLS if not x.needs]
    one = gates.Gate(TOOLS, ENCODE, k=1)
    assert [one.active(x.summary, confirmed)[0].summary for x in TOOLS] == [x.summary for x in TOOLS]
    assert len(gates.Gate(TOOLS, ENCODE, theta=1.1).active("nothing is so near")) == 1  # never none
    assert gates.refusal(TOOLS[0].name, TOOLS[:2]) is None
    assert gates.refusal(TOOLS[3].name, TOOLS[:2]) == {
        "error": "tool_not_active", "tool": TOOLS[3].name, "active": [x.name for x in TOOLS[:2]]
    }  # fmt: skip
    with pytest.raises(ValueError, match="no tool can be called"):
        gates.Gate(unmet, ENCODE).active("x")
    with pytest.raises(ValueError, match="0 tools"):
        gates.Gate([], ENCODE)


@pytest.mark.slow
def test_tools_after_history_preserve_prefix_reuse():
    known = sorted({word for x in TOOLS for word in x.summary.split()})
    words = lambda texts: np.array([[x.split().count(w) for w in known] for x in texts], float)  # noqa: E731
    gate = gates.Gate(TOOLS, words, theta=0.1, k=2)
    sets = [tuple(x.name for x in gate.active(turn.says, turn.facts)) for turn in TURNS]
    assert len(set(sets)) > 2
    found = {layout: gates.counted(PARAMS, gate, TURNS, layout) for layout in gates.LAYOUTS}
    assert len({x["tokens"] for x in found.values()}) == 1  # the same texts, in another order
    every = gates.counted(PARAMS, gates.Gate(TOOLS, ENCODE, theta=-1, k=8), TURNS, "published")
    assert every["tokens"] > 1.5 * found["published"]["tokens"]
    assert found["chunks"]["rows"] < found["last"]["rows"] < 0.95 * found["published"]["rows"]
    # with a set that never changes the published layout reads what is new, and the block that was not whole
    new = sum(len(f"user: {x.says}\nanswer: {x.answer}\n") for x in TURNS)
    first = gates.counted(PARAMS, gates.Gate(TOOLS, ENCODE, theta=-1, k=8), TURNS[:1], "published")["tokens"]
    assert every["rows"] <= first + new + 64 * len(TURNS)


def test_cached_plans_are_adapted_not_replanned():
    tasks = plans.scripted(40)
    plain, cached = plans.run(tasks, None), plans.run(tasks, plans.Plans(capacity=10))
    assert set(plain.calls) == {"plan", "act"} and plain.calls["plan"] == len(tasks)  # plan and act, as without it
    assert plain.done == cached.done and plain.calls["act"] == cached.calls["act"] == 4 * len(tasks)
    first = {}  # of each kind the first task that ends well is the last one that is planned
    for i, x in enumerate(tasks):
        first.setdefault(plans.keyword(x.text), []).append((i, x.well))
    made = [next((n for n, (_, well) in enumerate(some, 1) if well), len(some)) for some in first.values()]
    assert len(first) > 5 and cached.calls["plan"] == cached.misses == sum(made) < len(tasks) / 2
    assert cached.calls["adapt"] == cached.hits == len(tasks) - cached.misses
    assert sum(cached.tokens.values()) < 0.7 * sum(plain.tokens.values())


def test_plan_cache_evicts_oldest_and_failing_plans():
    a, b = "Compare the revenue of Acme and Borealis in 2019", "Compare the revenue of Cygnus and Delta in 2023"
    assert plans.keyword(a) == plans.keyword(b) != plans.keyword("Summarise the report of Acme")
    kept = plans.Plans(capacity=2)
    for key in ("a", "b"):
        kept.put(key, f"plan {key}", True)
    assert kept.get("a") == "plan a"  # b is the one of the longest ago then
    kept.put("c", "plan c", True)
    assert [kept.get(x) for x in "abc"] == ["plan a", None, "plan c"]
    kept.put("d", "plan d", False)  # a run that failed
    assert kept.get("d") is None and kept.get("a") == "plan a"
    for well in (False, False, False):
        kept.told("a", well)
    assert kept.get("a") is None  # templates that fail later go
    assert plans.template("Ask Acme for 3 offers of 2019", ["Acme"]) == "Ask {entity 0} for {number} offers of {number}"
    assert plans.template("Ask Anna and Ann", ["Ann", "Anna"]) == "Ask {entity 1} and {entity 0}"
    with pytest.raises(ValueError, match="capacity=0"):
        plans.Plans(capacity=0)
