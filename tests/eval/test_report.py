"""Tables and pictures of result rows."""

import io

from matplotlib.image import imread
from rich.console import Console

from jkv.eval import report
from jkv.eval.pareto import points


def row(cache, task="ppl/pydoc", size=50, **more):
    return {"cache": cache, "task": task, "kept": 0.5, "bytes": size, "bytes_full": 100, **more}


def printed(rows, *others):
    out = io.StringIO()
    files = [("a.json", {"model": "m"}, rows), *others]
    Console(file=out, width=200).print(report.table(points(files)))
    return out.getvalue()


def test_suite_tasks_share_line_and_question_modes_do_not():
    asked = [("vt", 1.0), ("cwe", 0.5)]
    rows = [row("full", f"ruler/{t}", question="seen", score=s) for t, s in asked]
    rows += [row("full", "ruler/vt", question="unseen", score=0.25)]
    lines = [line for line in printed(rows).splitlines() if "full" in line]
    assert len(lines) == 2
    assert "0.750" in lines[0] and "ruler (2 tasks)" in lines[0] and "| seen" in lines[0]
    assert "0.250" in lines[1] and "| unseen" in lines[1]


def test_names_are_not_table_markup():
    assert "[/bold]" in printed([row("[/bold]", ppl=9.0)])


def test_star_marks_pareto_front():
    text = printed([row("full", size=100, ppl=9.0), row("int8", size=50, ppl=9.1), row("h2o", size=60, ppl=9.5)])
    assert "full * " in text and "int8 * " in text and "h2o * " not in text
    assert "2.00" in text  # times smaller


def test_session_shows_honest_probe_rate():
    rows = [row("full", f"multiturn/{t}", mode="reused", question="unseen", score=0.5, honest=h) for t, h in TOLD]
    assert "0.500 (honest 0.75)" in printed(rows) and "unseen reused" in printed(rows)


def test_score_shows_confidence_interval():
    few, many = row("full", "niah/512/0.00", score=0.5, samples=6), row("h2o", "niah/512/0.00", score=0.5, samples=600)
    assert "0.500 [0.19, 0.81]" in printed([few]) and "0.500 [0.46, 0.54]" in printed([many])
    told = row("full", "multiturn/kv", mode="reused", score=1.0, samples=3, answers=15, context=694)
    assert "1.000 [0.80, 1.00]" in printed([told]) and "0.500 of 694" in printed([told])
    assert "[" not in printed([row("full", ppl=9.0, samples=4), row("full", "fidelity/pydoc", kl=0.1, samples=4)])


TOLD = (("kv", 1.0), ("vt", 0.5))


def test_different_settings_are_separate_lines():
    """Longer texts, another model, a frozen cache: three numbers, not their mean."""
    rows = [row("full", ppl=9.0)]
    others = [
        ("b.json", {"model": "m", "prefix": 512, "continue": 64}, [row("full", ppl=7.0)]),
        ("c.json", {"model": "n"}, [row("full", ppl=5.0)]),
        ("d.json", {"model": "m", "frozen": True}, [row("full", ppl=3.0)]),
    ]
    lines = [line for line in printed(rows, *others).splitlines() if "full" in line]
    assert len(lines) == 4 and all("full *" in line for line in lines)
    for line, says in zip(lines, ("ppl 9", "512 + 64", "| n", "frozen"), strict=True):
        assert says in line
    assert "model" not in printed(rows)


def test_plots_of_every_kind_are_drawn(tmp_path):
    rows = [row(f"snapkv(budget={n})", size=n, ppl=9 - n / 100, ms_token=1.0 + n) for n in (10, 20)]
    for asked, score in (("seen", 1.0), ("unseen", 0.0)):
        rows += [
            row("full", f"niah/{n}/{d}", question=asked, score=score) for n in (512, 1024) for d in ("0.00", "1.00")
        ]
    rows += [row("h2o", "fidelity/pydoc", kl=0.1, mass=[[0.5, 0.6], [0.7, 0.8]], by_layer=[0.3, 0.1], spare=[0])]
    rows += [row("quest", "attention/pydoc", recovered=0.9, by_layer=[0.8, 1.0], tokens_read=64)]
    for n in (1, 2, 4):
        found = dict(recovered=n / 9, tokens_share=n / 20, bytes_share=n / 10, by_layer=[1.0])
        rows += [row(f"quest(pages={n})", "picks/pydoc", **found)]
    paths = report.draw(rows, points([("a.json", {}, rows)]), tmp_path / "plots")
    assert sorted(p.name for p in paths) == [
        "layers-h2o.png",
        "niah-full-question-seen.png",
        "niah-full-question-unseen.png",
        "picks-pydoc.png",
        "ppl-pydoc-by-bytes.png",
        "ppl-pydoc-by-ms-token.png",
    ]
    assert all(imread(p).std() > 0.01 for p in paths)
    needles = [imread(p) for p in sorted(paths) if "niah" in p.name]
    assert abs(needles[0] - needles[1]).max() > 0.1


def test_plots_of_two_lengths_have_distinct_names(tmp_path):
    rows = [row(f"snapkv(budget={n})", "ruler/vt", size=n, question="seen", score=0.5) for n in (10, 20)]
    files = [("a.json", {"model": "m", "length": n}, rows) for n in (512, 1024)]
    names = [p.name for p in report.draw(rows, points(files), tmp_path)]
    assert names == ["ruler-seen-m-at-512-1-tasks-by-bytes.png", "ruler-seen-m-at-1-024-1-tasks-by-bytes.png"]
