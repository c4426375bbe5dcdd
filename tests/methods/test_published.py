"""Weights that authors publish: what is read of them, what is made of it, and what is no such folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jkv.io import learned as io
from jkv.io import published
from jkv.io.errors import FormatError
from jkv.methods import parse
from jkv.methods.checks import check
from jkv.methods.scores.published import Linear, Repeated, Surrogate
from jkv.protocols import Born
from support.tiny import DUO, MODEL, PARAMS, ZAP, H, L, published_zap


@pytest.mark.parametrize("hidden", [None, 8])
def test_a_surrogate_is_the_module_that_it_was(hidden: int | None, tmp_path):
    folder = published_zap(str(tmp_path / "zap"), hidden, MODEL.width, H, L)
    score, arrays = Repeated().of(folder), load_file(f"{folder}/model.safetensors")
    x = np.random.default_rng(0).standard_normal((2, 5, MODEL.width))
    for layer in range(L):
        own = {name.removeprefix(f"layers.{layer}."): a for name, a in arrays.items() if f"layers.{layer}." in name}
        y, last = x, ""
        if hidden is not None:
            y = y @ own["0.weight"].T + own["0.bias"]
            y, last = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2))), "2."
        want = (y @ own[f"{last}weight"].T + own[f"{last}bias"]).transpose(0, 2, 1)
        one = type(score)(gate=type(score.weights)(**{n: a[layer] for n, a in vars(score.weights).items()}))
        k = jnp.zeros((2, H, 5, 4))
        new = Born(x=jnp.asarray(x, jnp.float32), k=k, v=k, pos=jnp.zeros((2, 5), jnp.int32), out=jnp.eye(4))
        np.testing.assert_allclose(one.birth(new)["repeated"], want, rtol=1e-4, atol=1e-5)


def test_heads_are_read_with_their_numbers():
    heads, sinks, recent = published.duoattention(DUO)
    np.testing.assert_allclose(heads, [[0.1, 0.9], [1.0, 0.3]])
    assert (sinks, recent) == (4, 48)
    config = parse(f"duoattention(share=0.25, heads={DUO!r})")
    assert config.budget.whole == (1, 2) and (config.budget.first, config.budget.local) == (4, 48)
    np.testing.assert_array_equal(config.score.score.heads, [[0, 1], [1, 1]])


def test_without_a_folder_they_say_what_to_give():
    with pytest.raises(ValueError, match="='FOLDER'"):
        parse("duoattention").bound(PARAMS)
    with pytest.raises(ValueError, match="`jkv train kvzap --model"):
        parse("kvzap(budget=24)").bound(PARAMS)


@pytest.mark.parametrize("kind", [Linear, Surrogate])
def test_surrogates_that_were_trained_here_are_read_too(kind: type, tmp_path):
    rng, sizes = np.random.default_rng(1), {"L": L, "H": H, "E": MODEL.width, "W": 8}
    arrays = {name: rng.normal(0, 1, [sizes[a] for a in axes]) for name, axes in kind.axes.items()}
    io.write(tmp_path, arrays, {"method": "kvzap", "model": io.identities(PARAMS)})
    score = parse(f"kvzap(budget=24, gate={str(tmp_path)!r})").bound(PARAMS).score.score
    assert isinstance(score.weights, kind) and score.models == tuple(io.identities(PARAMS))
    for name, x in arrays.items():
        np.testing.assert_array_equal(getattr(score.weights, name), x.astype(np.float16))
    (tmp_path / "card.json").write_text("{}")
    with pytest.raises(FormatError, match="describes None"):
        parse(f"kvzap(budget=24, gate={str(tmp_path)!r})")


def test_weights_of_another_model_are_refused(tmp_path):
    wide = published_zap(str(tmp_path / "wide"), None, MODEL.width + 1, H, L)
    with pytest.raises(ValueError, match="published for it"):
        parse(f"kvzap(budget=24, gate={wide!r})").score.for_layer(MODEL, 0)
    deep = published_zap(str(tmp_path / "deep"), None, MODEL.width, H, L + 1)
    with pytest.raises(ValueError, match="another number of layers"):
        check(parse(f"kvzap(budget=24, gate={deep!r})"), MODEL)


def changed(folder: str, to: Path, **config: object) -> Path:
    """A copy of a folder with other fields in its config."""
    to.mkdir()
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    old = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({k: v for k, v in (old | config).items() if v != "gone"}))
    return to


def test_what_is_no_such_folder_is_refused(tmp_path):
    for i, (fields, why) in enumerate(
        (
            ({"n_modules": "gone"}, "no whole numbers n_modules"),
            ({"hidden_dim": None}, "'layers.0.0.bias' is none of its tensors"),
            ({"n_modules": 3}, "'layers.2.0.bias' is missing"),
            ({"input_dim": 7}, r"'layers.0.0.weight' is \[8, 64\], not \[8, 7\]"),
        )
    ):
        with pytest.raises(FormatError, match=why):
            published.kvzap(changed(ZAP, tmp_path / str(i), **fields))
    bad = changed(ZAP, tmp_path / "nan")
    arrays = load_file(bad / "model.safetensors")
    save_file(arrays | {"layers.1.2.bias": np.full(H, np.nan, np.float32)}, bad / "model.safetensors")
    with pytest.raises(FormatError, match="NaN"):
        published.kvzap(bad)
    (bad / "model.safetensors").rename(bad / "model.pt")
    with pytest.raises(FormatError, match="pickled"):
        published.kvzap(bad)
    with pytest.raises(FormatError, match="sink_size and recent_size"):
        published.duoattention(changed(DUO, tmp_path / "a", sink_size="gone"))
    words = changed(DUO, tmp_path / "b")
    for text, why in (("one\ttwo\n", "no table of numbers"), ("nan\t1\n", "NaN or infinity")):
        (words / published.HEADS).write_text(text)
        with pytest.raises(FormatError, match=why):
            published.duoattention(words)
