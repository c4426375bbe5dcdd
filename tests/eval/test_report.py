"""Tables and pictures of result rows."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from jkv.eval import report


def row(cache, task="ppl/pydoc", size=50, **more):
    return {"cache": cache, "task": task, "kept": 0.5, "bytes": size, "bytes_full": 100, **more}


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@pytest.mark.parametrize("good, sign", [("score", -1), ("ppl", 1)])
@given(points)
def test_the_front_is_what_nothing_beats(good, sign, made):
    rows = [{"bytes": a, good: b} for a, b in made]

    def beaten(r):
        return any(
            o["bytes"] <= r["bytes"]
            and sign * o[good] <= sign * r[good]
            and (o["bytes"], o[good]) != (r["bytes"], r[good])
            for o in rows
        )

    front = report.pareto(rows, "bytes", good)
    assert {(r["bytes"], r[good]) for r in front} == {(r["bytes"], r[good]) for r in rows if not beaten(r)}


def test_sizes_do_not_make_a_family():
    a, b = (f"snapkv(budget={n}, window=8) | int4" for n in (128, 512))
    assert report.family(a) == report.family(b) != report.family("snapkv(budget=128, window=16) | int4")
    assert report.family("quest(pages=8)") == "quest" and report.family("int8") == "int8"


def printed(rows):
    out = io.StringIO()
    Console(file=out, width=200).print(report.table(rows))
    return out.getvalue()


def test_tasks_of_a_suite_are_one_line_and_ways_of_asking_are_not():
    asked = [("vt", 1.0), ("cwe", 0.5)]
    rows = [row("full", f"ruler/{t}", question="seen", score=s) for t, s in asked]
    rows += [row("full", "ruler/vt", question="unseen", score=0.25)]
    lines = [line for line in printed(rows).splitlines() if "full" in line]
    assert len(lines) == 2
    assert "0.750" in lines[0] and "ruler (2 tasks)" in lines[0] and "| seen" in lines[0]
    assert "0.250" in lines[1] and "| unseen" in lines[1]


def test_the_star_is_on_what_nothing_beats_at_its_bytes():
    text = printed([row("full", size=100, ppl=9.0), row("int8", size=50, ppl=9.1), row("h2o", size=60, ppl=9.5)])
    assert "full * " in text and "int8 * " in text and "h2o * " not in text
    assert "2.00" in text  # times smaller


def test_pictures_of_every_kind_are_drawn(tmp_path):
    rows = [row(f"snapkv(budget={n})", size=n, ppl=9 - n / 100, ms_token=1.0 + n) for n in (10, 20)]
    rows += [row("full", f"niah/{n}/{d}", question="seen", score=1.0) for n in (512, 1024) for d in ("0.00", "1.00")]
    rows += [row("h2o", "fidelity/pydoc", kl=0.1, mass=[[0.5, 0.6], [0.7, 0.8]], by_layer=[0.3, 0.1], spare=[0])]
    paths = report.draw(rows, tmp_path / "plots")
    assert sorted(p.name for p in paths) == [
        "layers-h2o.png",
        "niah-full.png",
        "ppl-pydoc-by-bytes.png",
        "ppl-pydoc-by-ms-token.png",
    ]
    assert all(imread(p).std() > 0.01 for p in paths)
