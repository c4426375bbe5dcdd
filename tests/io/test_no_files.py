"""What stands where a file belongs and has no end, or is far too large, is refused at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv.io import safetensors, trained_weights
from jkv.io.errors import FormatError

NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def folder(path: Path) -> Path:
    """A folder with all that is read of a model."""
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    save_file({"x": np.ones(2, np.float32)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_pipes_devices_and_huge_files_are_refused(tmp_path: Path, name: str, kind: str):
    path = folder(tmp_path) / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 30)  # takes no room on the disk
    with pytest.raises(FormatError, match="regular file" if kind != "large" else "are the most"):
        safetensors.read_folder(tmp_path)


def test_card_writes_nan_as_null(tmp_path: Path):
    trained_weights.write(tmp_path, {"x": np.ones(2)}, {"method": "trimkv", "model": ["a"], "loss": float("nan")})
    card = json.loads((tmp_path / trained_weights.CARD).read_text(), parse_constant=pytest.fail)
    assert card["loss"] is None and card["method"] == "trimkv"
