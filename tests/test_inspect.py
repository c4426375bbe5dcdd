"""What a cache is said to hold is what it holds."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import inspect

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


def test_every_byte_is_in_one_place(cache):
    found = inspect.summary(cache)
    assert found.nbytes == cache.nbytes
    for layer, here in zip(found.layers, cache.layers, strict=True):
        assert layer.nbytes == inspect.tree_bytes(here)


def test_tokens_are_those_of_the_cache(cache):
    found = inspect.summary(cache)
    assert found.seen == [120, 70]
    kept = np.asarray(cache.kept())
    np.testing.assert_allclose([layer.kept for layer in found.layers], kept.mean(1), atol=0.1)
    # the same tokens, counted from the map of positions
    share = inspect.held(cache)
    assert share.shape == (len(cache.layers), 120)
    np.testing.assert_allclose(share.sum(1), kept.mean((1, 2)), rtol=1e-5)


def test_codes_and_scales_of_integers():
    cache, _ = jkv.prefill(PARAMS, "snapkv(budget=40, window=8) | int4", IDS)
    tier = inspect.summary(cache).layers[0].parts[1]
    slots, heads, dim = cache.plan[0].tiers[0].capacity, PARAMS.config.heads, PARAMS.config.head_dim
    assert tier.codec == "4 bits"
    assert tier.codes == 2 * heads * slots * dim // 2
    assert tier.scales == 2 * heads * slots * 2 * 2  # a scale and a lowest value of two bytes each, for keys and values


def test_streaming_keeps_the_first_and_the_newest():
    cache, _ = jkv.prefill(PARAMS, "streaming(budget=40, sinks=4)", IDS)
    expected = np.zeros(120)
    expected[:4] = expected[84:] = 1
    np.testing.assert_array_equal(inspect.held(cache), np.stack([expected] * 2))
    layer = inspect.summary(cache).layers[0]
    assert (layer.first, layer.last) == (0, 119)


def test_a_picture_shows_what_is_kept(tmp_path, cache):
    fig = inspect._draw(cache)
    counts, places = _image(fig, "Tokens kept"), _image(fig, "Which positions are kept")
    np.testing.assert_allclose(counts.get_array(), np.asarray(cache.kept()).mean(1))
    np.testing.assert_allclose(places.get_array(), inspect.held(cache), rtol=1e-6)
    inspect.plot(cache, tmp_path / "kept.svg")
    assert b"<svg" in (tmp_path / "kept.svg").read_bytes()


def test_a_lone_position_of_a_long_text_is_not_lost(cache):
    layer = cache.layers[0]
    pos = jnp.full_like(layer.recent.pos, -1).at[:, 0].set(7001)
    long = replace(
        cache,
        layers=(replace(layer, recent=replace(layer.recent, pos=pos), tiers=()),) * 2,
        seen=jnp.full_like(cache.seen, 9000),
    )
    shown = _image(inspect._draw(long), "Which positions are kept").get_array()
    assert shown.shape == (2, inspect.COLUMNS)
    assert (shown[0] > 0).sum() == 1 and shown[0].argmax() == 777


@pytest.mark.parametrize("name, says", [("kept.xyz", "ending must be one of"), ("no/kept.png", "there is no folder")])
def test_a_path_that_cannot_be_drawn_is_refused(tmp_path, name, says):
    with pytest.raises(ValueError, match=says):
        inspect.check_path(tmp_path / name)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"jkv\[plot\]"):
        inspect.check_path(tmp_path / "kept.png")
