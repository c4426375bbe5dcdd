"""Folders of what was trained: no damaged number is served, and what comes with the package is for its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jkv import methods
from jkv.io import array_file, hub, load, trained_weights
from jkv.io.errors import FormatError

CARD = {"method": "trimkv", "model": ["one", "two"]}
FOLDERS = sorted(path.parent for path in Path(str(trained_weights.SHIPPED)).glob("*/card.json"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_are_refused_on_read(tmp_path, bad):
    """Also where the card vouches for them."""
    arrays = {"a": np.array([1, bad], np.float16)}
    array_file.write(tmp_path / trained_weights.WEIGHTS, arrays, {})
    (tmp_path / trained_weights.CARD).write_text(
        json.dumps({**CARD, "sha256": array_file.digest(arrays, CARD["model"])})
    )
    with pytest.raises(FormatError, match="a holds NaN or infinity"):
        trained_weights.read(tmp_path, "trimkv")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_non_finite_numbers_are_refused_on_write(tmp_path, bad):
    """Nor those that float16 has not; what the folder held stays."""
    trained_weights.write(tmp_path, {"a": np.zeros(2)}, CARD)
    with pytest.raises(ValueError, match="a holds NaN, infinity or numbers beyond float16; nothing was written"):
        trained_weights.write(tmp_path, {"a": np.array([1, bad])}, CARD)
    assert trained_weights.read(tmp_path, "trimkv")[0]["a"].tolist() == [0, 0]


def test_interrupted_write_is_detected(tmp_path, monkeypatch):
    trained_weights.write(tmp_path, {"a": np.zeros(3)}, CARD)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trained_weights, "overwrite", killed)
    with pytest.raises(KeyboardInterrupt):
        trained_weights.write(tmp_path, {"a": np.ones(3)}, CARD)
    with pytest.raises(FormatError, match="card.json was not written with its weights.safetensors"):
        trained_weights.read(tmp_path, "trimkv")


@pytest.fixture(scope="module")
def names() -> list[str]:
    return trained_weights.identities(load.load(next(iter(hub.NAMES))))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_bundled_weights_match_their_model(folder, names):
    method = json.loads((folder / trained_weights.CARD).read_text())["method"]
    arrays, card = trained_weights.read(folder, method)
    assert card["model"] == names and arrays


@pytest.mark.parametrize("method", ["trimkv", "locret", "dms", "attentiongate", "utility", "lococo"])
def test_an_array_of_another_name_or_shape_is_refused(method, tmp_path):
    folder = next(x for x in FOLDERS if json.loads((x / trained_weights.CARD).read_text())["method"] == method)
    arrays, card = trained_weights.read(folder, method)
    arrays = {name: np.zeros(x.shape, np.float16) for name, x in arrays.items()}
    for name, x in arrays.items():
        others = {k: y for k, y in arrays.items() if k != name}
        for i, wrong in enumerate((others, others | {f"{name}s": x}, arrays | {name: x[..., None]})):
            trained_weights.write(to := tmp_path / f"{name}-{i}", wrong, card)
            with pytest.raises(FormatError, match=f"its arrays are not those of {method} .*; give a folder that `jkv"):
                methods.parse(f"{method}(budget=4096, gate={str(to)!r})")
