"""What prints: a value fits on a screen, costs no program, and is HTML that shows text as text."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jkv
from support.speaking import PARAMS

CACHE = "snapkv(budget=40, window=8)"


@pytest.fixture(scope="module")
def out():
    return jkv.generate(PARAMS, CACHE, "<b>tides</b> & moons " * 4, max_new_tokens=4, stop_ids=())


def test_values_print_on_a_screen(out):
    for value in (out, out.cache, PARAMS, out.receipt):
        assert len(repr(value)) < 2500 and len(repr(value).splitlines()) < 20
        html = value._repr_html_()
        assert len(html) < 5000 and html.count("<table>") == html.count("</table>") == 1
        assert not any(x in html for x in ("http", "src=", "<script", "<link", "<style"))
    assert CACHE in repr(out.cache) and f"{out.cache.nbytes:,}" in repr(out.cache)
    assert str(int(out.cache.seen[0])) in repr(out.cache)


def test_a_result_prints_as_its_text_and_one_line(out):
    *text, line = repr(replace(out, text="A ferry.")).splitlines()
    assert text == ["A ferry."] and CACHE in line and f"{out.cache.nbytes:,} bytes" in line
    assert repr(replace(out, text="")).startswith(str(out.tokens))
    rows = replace(out, text=["one", ""], tokens=[[1], [2]])
    assert repr(rows).splitlines()[:2] == ["[0] one", "[1] [2]"]
    many = replace(out, text=["x" * 10**5] * 500, tokens=[[1]] * 500)
    assert len(repr(many)) < 40_000 and "484 more rows" in repr(many)


def test_html_shows_markup_as_text(out):
    html = replace(out, text="<script>&", receipt=replace(out.receipt, config="<i>"))._repr_html_()
    assert "&lt;script&gt;&amp;" in html and "&lt;i&gt;" in html and "<script" not in html and "<i>" not in html


def test_caches_without_numbers_print_too(out):
    shapes = jax.eval_shape(lambda: jkv.cache.cache.jax.tree.map(lambda x: x, out.cache))
    assert "tokens seen: unknown" in repr(shapes)
    seen = []
    jax.jit(lambda cache: seen.append(repr(cache)))(out.cache)
    assert "tokens seen: unknown" in seen[0]
    cache, logits = jkv.prefill(PARAMS, "full", [[5, 6, 7]])
    jkv.step(PARAMS, cache, np.asarray(logits).argmax(-1).astype("int32"))
    assert "tokens seen: 3" in repr(cache) or "unknown" in repr(cache)
    assert "Params(" in repr(jkv.models.abstract(PARAMS.config))


def test_a_stream_has_token_ids_and_a_result():
    options: dict = dict(max_new_tokens=20, stop_ids=())
    want = jkv.generate(PARAMS, CACHE, "tides and moons " * 6, **options)
    stream = jkv.stream(PARAMS, CACHE, "tides and moons " * 6, **options)
    assert stream.tokens == [] and "going on" in repr(stream)
    first = next(stream)
    assert stream.tokens == want.tokens[: len(stream.tokens)] != []
    assert stream.result.text == want.text and stream.tokens == stream.result.tokens == want.tokens
    assert next(stream, "over") == "over" and want.text.startswith(first)
    closed = jkv.stream(PARAMS, CACHE, "tides", **options)
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = closed.result

    def delegate():
        return (yield from jkv.stream(PARAMS, CACHE, "tides and moons " * 6, **options))

    pieces = delegate()
    try:
        text = ""
        while True:
            text += next(pieces)
    except StopIteration as end:
        assert end.value.tokens == want.tokens and text == want.text
