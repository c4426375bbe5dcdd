"""What a cache is said to hold is what it holds."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.generation import inspect

PARAMS = jkv.models.random(jkv.models.TINY)
IDS = [5, 6, 7, 8, 9] * 24
COMPOSITIONS = (
    "full",
    "h2o(budget=40) | int8",
    "kivi(bits=2, group=8)",
    "streaming(budget=40)",
    "quest(dense_layers=0)",
)


def _image(fig, title):
    return next(ax for ax in fig.axes if ax.get_title() == title).images[0]


@pytest.fixture(scope="module", params=COMPOSITIONS)
def cache(request):
    return jkv.prefill(PARAMS, request.param, [IDS, IDS[:70]])[0]


def test_summary_counts_every_byte_once(cache):
    found = inspect.summary(cache)
    assert found.nbytes == cache.nbytes
    for layer, here in zip(found.layers, cache.layers, strict=True):
        assert layer.nbytes == inspect.tree_bytes(here)


def test_summary_and_kept_share_match_cache(cache):
    found = inspect.summary(cache)
    assert found.seen == [120, 70]
    kept = np.asarray(cache.kept())
    np.testing.assert_allclose([layer.kept for layer in found.layers], kept.mean(1), atol=0.1)
    # the same tokens, counted from the map of positions
    share = inspect.kept_share(cache)
    assert share.shape == (len(cache.layers), 120)
    np.testing.assert_allclose(share.sum(1), kept.mean((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("text", ["knorm(budget=40) | int8", "knorm(budget=40) | pooled"])
def test_mask_and_norm_column_match_keys(text):
    """Of all keys, in order: the norms of those that a smaller cache keeps, and which they are."""
    whole, _ = jkv.prefill(PARAMS, jkv.parse("knorm(budget=40)").uncompressed(120), [IDS, IDS[:70]], reserve=0)
    cache, _ = jkv.prefill(PARAMS, text, [IDS, IDS[:70]])
    mask, norms, first = inspect.mask(cache), inspect.column(cache, "k_norm"), cache.plan[0].sinks
    np.testing.assert_array_equal(mask.sum(-1), cache.kept())
    np.testing.assert_array_equal(np.isnan(norms), ~mask)
    for layer, part in enumerate(whole.layers):
        for row, n in enumerate((120, 70)):
            keys = np.asarray(part.recent.k[row], np.float64)[:, np.asarray(part.recent.pos[row]) >= 0]
            want = np.linalg.norm(keys, axis=-1)
            here = mask[layer, row, :, :n]
            np.testing.assert_allclose(norms[layer, row, :, :n][here], want[here], rtol=1e-5)
            assert here[:, n - 16 :].all()
            assert here[:, :first].all()
            old, stay = want[:, first : n - 16], here[:, first : n - 16]
            for head in () if "pooled" in text else range(2):  # of the others the shortest
                assert old[head][stay[head]].max() <= old[head][~stay[head]].min() + 1e-5
    assert not mask[:, 1, :, 70:].any()


def test_unknown_score_column_is_refused(cache):
    with pytest.raises(ValueError, match="remembers .* and no 'k_norm'; ask for one of these"):
        inspect.column(cache, "k_norm")


def test_summary_counts_int4_codes_and_scales():
    cache, _ = jkv.prefill(PARAMS, "snapkv(budget=40, window=8) | int4", IDS)
    tier = inspect.summary(cache).layers[0].parts[1]
    slots, heads, dim = cache.plan[0].tiers[0].capacity, PARAMS.config.heads, PARAMS.config.head_dim
    assert tier.codec == "4 bits"
    assert tier.codes == 2 * heads * slots * dim // 2
    assert tier.scales == 2 * heads * slots * 2 * 2  # a scale and a lowest value of two bytes each, for keys and values


def test_streaming_keeps_sinks_and_newest():
    cache, _ = jkv.prefill(PARAMS, "streaming(budget=40, sinks=4)", IDS)
    expected = np.zeros(120)
    expected[:4] = expected[84:] = 1
    np.testing.assert_array_equal(inspect.kept_share(cache), np.stack([expected] * 2))
    layer = inspect.summary(cache).layers[0]
    assert (layer.first, layer.last) == (0, 119)


def test_figure_shows_kept_tokens(tmp_path, cache):
    fig = inspect.figure(cache)
    counts, places = _image(fig, "Tokens kept"), _image(fig, "Which positions are kept")
    np.testing.assert_allclose(counts.get_array(), np.asarray(cache.kept()).mean(1))
    np.testing.assert_allclose(places.get_array(), inspect.kept_share(cache), rtol=1e-6)
    inspect.plot(cache, tmp_path / "kept.svg")
    assert b"<svg" in (tmp_path / "kept.svg").read_bytes()


def test_figure_shows_isolated_position_of_long_text(cache):
    layer = cache.layers[0]
    pos = jnp.full_like(layer.recent.pos, -1).at[:, 0].set(7001)
    long = replace(
        cache,
        layers=(replace(layer, recent=replace(layer.recent, pos=pos), tiers=()),) * 2,
        counts=replace(cache.counts, seen=jnp.full_like(cache.seen, 9000)),
    )
    shown = _image(inspect.figure(long), "Which positions are kept").get_array()
    assert shown.shape == (2, inspect.COLUMNS)
    assert (shown[0] > 0).sum() == 1 and shown[0].argmax() == 777


def test_page_shades_text_by_weight():
    pieces, weight = ["one", " two\n\nthree", "", " four $5 five six"], [0.0, 0.5, 1.0, 0.25]
    drawn = inspect.page(pieces, weight, "share", width=12)
    texts, boxes = drawn.axes[0].texts, drawn.axes[0].patches
    lines = {}
    for text, box in zip(texts, boxes, strict=True):
        (x, y), run = text.get_position(), text.get_text()
        assert (x, len(run)) == (box.get_x(), box.get_width()) and x + len(run) <= 12
        assert x == len(lines.get(y, ""))
        lines[y] = lines.get(y, "") + run
    assert [lines[y] for y in sorted(lines)] == ["one two", "three four $", "5 five six"]
    assert sorted(lines) == [0.5, 2.5, 3.5]  # an empty line between them
    ground = {text.get_text(): sum(box.get_facecolor()[:3]) for text, box in zip(texts, boxes, strict=True)}
    assert ground["one"] > ground["5 five six"] > ground["three"]
    with pytest.raises(ValueError, match="3 pieces of text and 4 weights"):
        inspect.page(pieces[:3], weight, "share")


@pytest.mark.parametrize("name, says", [("kept.xyz", "ending must be one of"), ("no/kept.png", "there is no folder")])
def test_invalid_figure_path_is_refused(tmp_path, name, says):
    with pytest.raises(ValueError, match=says):
        inspect.check_path(tmp_path / name)


def test_missing_matplotlib_names_plot_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"\.\[plot\]"):
        inspect.check_path(tmp_path / "kept.png")
