"""How large inputs are, and which block comes next: against whole passes, and after a kill."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.io.bitstack import Folder
from jkv.models.weights import bitstack as signed
from jkv.training.calibrate import bitstack
from jkv.training.resumable_search import Measured
from support.tiny import HYBRID

PARAMS = models.random(dict(models.TINY, hidden_size=64))
IDS = np.random.default_rng(0).integers(0, 100, (3, 12)).astype(np.int32)
LEVELS = 3


def silent(_: str) -> None: ...


def run(path: Path, params: models.Params = PARAMS, say=silent) -> list:
    folder = Folder(path, dict(model="", k=2, levels=LEVELS))
    return bitstack.calibrate(params, IDS, 2, folder, Measured(path / "measured.json", folder.what), say)


def dense(folder: Folder, counts) -> models.Params:
    """The model of so many blocks of each matrix, in floats by numpy."""
    layers = [dict(w) for w in PARAMS.layers]
    for (i, field), n in counts.items():
        signs, left, right = folder.blocks((i, field))
        bits = np.unpackbits(signs, axis=-1, count=right.shape[-1]).astype(bool)
        size = np.einsum("...nk,nki->...ni", left.astype(np.float32), right.astype(np.float32))
        layers[i][field] = jnp.asarray(np.where(bits, size, -size)[..., :n, :].sum(-2))
    return models.Params(
        embed=PARAMS.embed, layers=tuple(layers), norm=PARAMS.norm, head=PARAMS.head, config=PARAMS.config
    )


@pytest.mark.slow
def test_level_order_follows_whole_model_perplexity(tmp_path):
    order = run(tmp_path)
    folder, places = Folder(tmp_path, dict(model="", k=2, levels=LEVELS)), sorted({*order})
    ids = jnp.asarray(IDS[:2])
    pos = jnp.broadcast_to(jnp.arange(12)[None], ids.shape)
    forward = jax.jit(models.forward)
    assert len(places) == 8 and len(order) == 16
    for level in (1, 2):
        losses = {}
        for place in places:
            p = dense(folder, {**dict.fromkeys(places, level), place: level + 1})
            said = jax.nn.log_softmax(forward(p, ids, pos)[:, :-1])
            losses[place] = -float(jnp.take_along_axis(said, ids[:, 1:, None], 2).mean())
        assert order[8 * (level - 1) : 8 * level] == sorted(places, key=losses.get)


@pytest.mark.slow
def test_input_norms_match_numpy(tmp_path):
    """Of the first layer's norm, by numpy; and of every field that a hybrid has."""
    x = np.asarray(PARAMS.embed, np.float64)[IDS]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + PARAMS.config.eps) * np.asarray(PARAMS.layers[0]["norm1"])
    want = np.sqrt((x**2).sum(1)).mean(0) + bitstack.FLOOR
    found = bitstack.norms(PARAMS, IDS, silent)
    np.testing.assert_allclose(found[0, "qkv"], want, rtol=1e-4)
    blocks = signed.decompose(np.asarray(PARAMS.layers[0]["qkv"]), 2, LEVELS, want)
    run(tmp_path)
    kept = Folder(tmp_path, dict(model="", k=2, levels=LEVELS)).blocks((0, "qkv"))
    np.testing.assert_allclose(kept[2].astype(np.float32), blocks[2].astype(np.float32), atol=2e-3)
    mixed = bitstack.norms(HYBRID, IDS[:1], silent)
    assert {place for place in mixed if place[0] == 1} >= {(1, "mix"), (1, "o")}


@pytest.mark.slow
def test_killed_run_resumes(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")

    class Killed(Exception):
        pass

    for after in ("layer 1, o: 3 blocks", "level 1, layer 2, qkv"):

        def say(text: str, after: str = after) -> None:
            if text.startswith(after):
                raise Killed

        with pytest.raises(Killed):
            run(tmp_path / "cut", say=say)
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "cut").glob("*.safetensors")}
    measured = Measured(tmp_path / "cut" / "measured.json", dict(model="", k=2, levels=LEVELS)).found
    assert len(times) == 8 and len(measured) == 5
    monkeypatch.setattr(bitstack, "decompose", None)  # nothing is made again
    assert run(tmp_path / "cut") == whole
    assert times == {file: file.stat().st_mtime_ns for file in times}
    other = Folder(tmp_path / "cut", dict(model="", k=3, levels=LEVELS))
    with pytest.raises(ValueError, match="of another run"):
        bitstack.calibrate(PARAMS, IDS, 2, other, Measured(tmp_path / "other.json", other.what), silent)


def test_nonfinite_level_takes_order_of_next_level():
    places = [(0, "qkv"), (0, "o"), (0, "down")]
    losses = [np.array([1.0, np.nan, 2.0]), np.array([3.0, 2.0, 1.0]), np.array([np.inf, 1.0, 2.0])]
    assert bitstack.order(losses, places) == [*places[::-1], *places[::-1], *places]


def test_nan_model_is_refused():
    broken = {**PARAMS.layers[0], "norm1": PARAMS.layers[0]["norm1"] * np.float32("nan")}
    one = models.Params(
        embed=PARAMS.embed, layers=(broken,), norm=PARAMS.norm, head=None, config=PARAMS.config.block(0)
    )
    with pytest.raises(ValueError, match="layer 1 gives NaN or infinity"):
        bitstack.norms(one, IDS[:1], silent)
