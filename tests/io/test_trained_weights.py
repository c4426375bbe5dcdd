"""Folders of what was trained: no damaged number is served, and what comes with the package is for its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jkv.io import array_file, hub, load, trained_weights
from jkv.io.errors import FormatError

CARD = {"method": "trimkv", "model": ["one", "two"]}
FOLDERS = sorted(path.parent for path in Path(str(trained_weights.SHIPPED)).glob("*/card.json"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_not_served(tmp_path, bad):
    """Also where the card vouches for them."""
    arrays = {"a": np.array([1, bad], np.float16)}
    array_file.write(tmp_path / trained_weights.WEIGHTS, arrays, {})
    (tmp_path / trained_weights.CARD).write_text(
        json.dumps({**CARD, "sha256": array_file.digest(arrays, CARD["model"])})
    )
    with pytest.raises(FormatError, match="a holds NaN or infinity"):
        trained_weights.read(tmp_path, "trimkv")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_numbers_that_are_none_are_not_written(tmp_path, bad):
    """Nor those that float16 has not; what the folder held stays."""
    trained_weights.write(tmp_path, {"a": np.zeros(2)}, CARD)
    with pytest.raises(ValueError, match="a holds NaN, infinity or numbers beyond float16; nothing was written"):
        trained_weights.write(tmp_path, {"a": np.array([1, bad])}, CARD)
    assert trained_weights.read(tmp_path, "trimkv")[0]["a"].tolist() == [0, 0]


def test_a_kill_between_weights_and_card_is_seen(tmp_path, monkeypatch):
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
def test_what_comes_with_jkv_is_for_its_model(folder, names):
    method = json.loads((folder / trained_weights.CARD).read_text())["method"]
    arrays, card = trained_weights.read(folder, method)
    assert card["model"] == names and arrays
