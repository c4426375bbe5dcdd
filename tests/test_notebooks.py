"""The notebooks as they are committed; `make notebooks` runs them."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_in_order_and_tells_of_no_machine(path: Path):
    text = path.read_text("utf-8")
    assert len(text) < 400_000 and f"notebooks/{path.name}" in (ROOT / "README.md").read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert "find_spec" in "".join(cells[0]["source"]) and cells[0]["outputs"] == []
    outputs = [x for cell in cells for x in cell["outputs"]]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert not [x for x in outputs if x["output_type"] == "error" or x.get("name") == "stderr"]
    assert any("image/png" in x.get("data", {}) for x in outputs)
    assert not re.search(r"/(home|root|tmp|Users|usr|opt|content)/|site-packages|[A-Z]:\\\\", json.dumps(outputs))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_jkv_is_there(path: Path):
    cells = ["".join(x["source"]) for x in json.loads(path.read_text("utf-8"))["cells"] if x["cell_type"] == "code"]
    trees = [ast.parse(re.sub(r"(?m)^( *)%.*", r"\1pass", cell)) for cell in cells]
    found = [
        (x.module, name.name) for t in trees for x in ast.walk(t) if isinstance(x, ast.ImportFrom) for name in x.names
    ]
    ours = [(module, name) for module, name in found if module.split(".")[0] == "jkv"]
    for module, name in ours:
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")
    assert ours or any("import jkv" in cell for cell in cells)
