"""Small multiples: every cache in its family's panel, in grey in all the others, every name in reach."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from jkv.eval import small_multiples
from jkv.eval.method_families import FULL, JOINED, ORDER, OTHER, family
from jkv.eval.pareto import pareto, points
from jkv.methods import METHODS
from support.points import HOSTILE, catalogue


def test_family_follows_parts_of_method():
    """Read from the classes of the parts and the arguments alone, not as the families read them."""
    codes, by = (
        {
            "Affine",
            "Bfp",
            "Float",
            "Float4",
            "Gear",
            "Levels",
            "LowRank",
            "Mixed",
            "Nsn",
            "OfPrompt",
            "Polar",
            "Principal",
        }
        | {"Sensitive", "Separable", "Sparse", "Thinned"},
        {name: family(name) for name in METHODS},
    )
    for name, method in METHODS.items():
        parts, own = {*method.parts}, {*method.axes}
        said = {
            "selection": bool({"select", "vote", "steps", "layers"} & own),
            "precision": bool(codes & parts) and "select" not in own,
            "merging": "merge" in own,
            "eviction by trained": "gate" in method.arguments and "merge" not in own,
        }
        assert [x for x in said if by[name].startswith(x)] == [x for x, is_so in said.items() if is_so], (
            name,
            by[name],
        )
    assert {*by.values()} | {JOINED, OTHER} == {*ORDER} and by["full"] == FULL
    assert all(family(f"{a}(budget=8) | {b}") == JOINED for a, b in itertools.pairwise(METHODS))


@given(st.text())
def test_unknown_names_have_family(name):
    assert family(name) in ORDER and family(f"?{name}") == OTHER


def test_method_ignores_sizes():
    a, b = (f"snapkv(budget={n}, window=8) | int4" for n in (128, 512))
    assert (
        small_multiples.method(a)
        == small_multiples.method(b)
        != small_multiples.method("snapkv(budget=128, window=16) | int4")
    )
    assert small_multiples.method("quest(pages=8)") == "quest" and small_multiples.method("int8") == "int8"


def drawn(axes):
    """(points in grey, points in colour, names) of a panel."""
    grey, *_ = axes.collections
    colored = [xy for line in axes.lines if line.get_marker() != "None" for xy in line.get_xydata()]
    return {*map(tuple, grey.get_offsets())}, {*map(tuple, colored)}, {t.get_text() for t in axes.texts}


@pytest.mark.parametrize("metric, cost", [("kl", "bytes"), ("ppl", "ms_token"), ("score", "bytes")])
def test_every_cache_is_in_own_panel_and_grey_elsewhere(metric, cost):
    found = catalogue(metric)
    place = {p.cache: (100 * p.share if cost == "bytes" else p.more[cost], p.value) for p in found}
    wide, *panels = small_multiples.multiples(found, cost, "title").axes
    for axes in (wide, *panels):
        assert drawn(axes)[0] == {*place.values()}
    front = pareto(found, lambda p: (place[p.cache][0], p.loss))
    shown = {*(p.cache for p in front), *(p.cache for p in found if family(p.cache) == FULL)}
    assert drawn(wide)[1:] == ({place[x] for x in shown}, shown)
    assert [axes.get_title("left") for axes in panels] == [name for name in ORDER if name != FULL]
    for axes in panels:
        own = [p.cache for p in found if family(p.cache) == axes.get_title("left")]
        assert drawn(axes)[1:] == ({place[x] for x in own}, {*map(small_multiples.method, own)})


@pytest.mark.parametrize("seed", range(3))
def test_labels_do_not_overlap_and_stay_in_panel(seed):
    figure = small_multiples.multiples(catalogue(seed=seed), "bytes", "title")
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    for axes in figure.axes:
        boxes = [Text.get_window_extent(t, renderer).extents for t in axes.texts]  # without the leader
        frame = axes.bbox.extents
        for box in boxes:
            assert (box[:2] >= frame[:2] - 3).all() and (box[2:] <= frame[2:] + 3).all()
        for a, b in itertools.combinations(boxes, 2):
            assert (a[:2] > b[2:] - 3).any() or (b[:2] > a[2:] - 3).any()


@pytest.mark.filterwarnings("ignore:Glyph")
def test_special_characters_are_drawn_as_text(tmp_path):
    rows = [
        {"cache": x, "task": "t/$x", "bytes": 9 + i, "bytes_full": 99, "score": i / 9} for i, x in enumerate(HOSTILE)
    ]
    figure = small_multiples.multiples(points([("a.json", {}, rows)]), "bytes", "$\\frac{$")
    figure.savefig(tmp_path / "a.png")
    said = {t.get_text() for axes in figure.axes for t in axes.texts}
    assert {"</script><b>", "$\\frac{$", "a b", "x" * 43 + "…"} <= said and np.isfinite(figure.bbox.extents).all()
