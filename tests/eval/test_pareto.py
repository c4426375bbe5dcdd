"""Points: what result rows say together, and which of them nothing beats."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.eval.pareto import load, pareto, points


def row(cache, task, share, **found):
    return {"cache": cache, "task": task, "bytes": int(1000 * share), "bytes_full": 1000, "kept": share, **found}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_pareto_front_is_undominated(found):
    def beaten(a):
        return any(b[0] <= a[0] and b[1] <= a[1] and a != b for b in found)

    assert pareto(found, of=lambda x: x) == sorted(x for x in found if not beaten(x))


def test_suite_tasks_form_one_weighted_point():
    rows = [row("a", "ruler/vt", 0.5, score=1.0, samples=3), row("a", "ruler/cwe", 0.3, score=0.0, samples=1)]
    found = points([("1", {"length": 64}, rows), ("2", {"length": 64}, rows), ("3", {"length": 128}, rows[:1])])
    assert [(p.length, p.tasks, p.samples) for p in found] == [
        (64, ("ruler/cwe", "ruler/vt"), 8),
        (128, ("ruler/vt",), 3),  # longer texts: not the same measurement
    ]
    assert found[0].value == 0.75 and found[0].share == pytest.approx(0.45) and found[0].files == ("1", "2")
    assert found[0].more == {"kept": pytest.approx(0.45)} and found[0].like != found[1].like


def test_loss_sign_follows_metric():
    a, b = points([("1", {}, [row("a", "ppl/x", 0.5, ppl=9.0), row("b", "fidelity/x", 0.5, kl=0.1, ppl=9.0)])])
    assert (a.metric, a.loss, b.metric, b.loss, b.more["ppl"]) == ("ppl", 9.0, "kl", 0.1, 9.0)
    assert points([("1", {}, [row("a", "ruler/vt", 0.5, score=0.25)])])[0].loss == -0.25


def test_rows_without_quality_are_skipped():
    rows = [{"what": "decode", "cache": "a", "ms": 1.0}, row("e", "x", 0.1, score=float("nan"))]
    rows += [row("e", "x", 0, score=1.0), row(None, "x", 0.5, score=1.0), {"method": "h2o", "ppl_jkv": 2.0}]
    assert points([("1", {}, rows)]) == []


def test_load_reads_names_and_wildcards(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps({"meta": {"model": name}, "rows": []}))
    found = load([f"{tmp_path}/*.json", str(tmp_path / "a.json")])
    assert [(meta, rows) for _, meta, rows in found] == [({"model": "a"}, []), ({"model": "b"}, [])]
    assert load([f"{tmp_path}/none*.json"]) == []
    with pytest.raises(ValueError, match="none.json: No such file"):
        load([str(tmp_path / "none.json")])


def test_wildcard_skips_non_results_and_name_refuses(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"meta": {}, "rows": [{"cache": "full"}]}))
    (tmp_path / "card.json").write_text(json.dumps({"method": "layers"}))
    assert [(name, rows) for name, _, rows in load([f"{tmp_path}/*.json"])] == [
        (str(tmp_path / "a.json"), [{"cache": "full"}])
    ]
    with pytest.raises(ValueError, match="card.json holds no results"):
        load([str(tmp_path / "card.json")])
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="b.json is no JSON"):
        load([f"{tmp_path}/*.json"])
