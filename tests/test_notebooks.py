"""The notebooks as they are committed; `make notebooks` runs them."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import jkv

ROOT = Path(__file__).parents[1]
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_notebook_outputs_are_in_order_and_machine_independent(path: Path):
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
def test_notebook_header_suits_colab(path: Path):
    """A badge, a form whose revision is this version, a model that can be chosen; and never another project's jkv."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    source = ["".join(x["source"]) for x in cells]
    first, second = source[0], source[1]
    assert first.startswith(
        "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab."
    )
    forms = dict(re.findall(r'(?m)^([A-Z]+) = (".*")  # @param [{\[]', "\n".join(source)))
    assert (
        forms["SOURCE"] == '""' and forms["REVISION"] == f'"v{jkv.__version__}"' and forms["MODEL"] == '"smollm2-135m"'
    )
    assert "jkv.load(MODEL)" in "\n".join(source) and second.startswith("# @title")
    pips = re.findall(r"(?m)^ *%pip install .*", "\n".join(source))
    assert len(pips) == 1 and re.search(r'-q "jkv-cache\[\w+\] @ \{FROM\}" "\{JAX\}"$', pips[0])


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_notebook_jkv_names_resolve(path: Path):
    """What it imports, and what it then takes from a module that it has imported."""
    cells = ["".join(x["source"]) for x in json.loads(path.read_text("utf-8"))["cells"] if x["cell_type"] == "code"]
    nodes = [x for cell in cells for x in ast.walk(ast.parse(re.sub(r"(?m)^( *)%.*", r"\1pass", cell)))]
    modules: dict[str, ModuleType] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {x.name: importlib.import_module(x.name) for x in node.names if x.name == "jkv"}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "jkv":
            module = importlib.import_module(str(node.module))
            for x in node.names:
                if not hasattr(module, x.name):
                    importlib.import_module(f"{node.module}.{x.name}")
                found = getattr(module, x.name)
                modules |= {x.asname or x.name: found} if isinstance(found, ModuleType) else {}
    assert modules
    taken = [(x.value.id, x.attr) for x in nodes if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)]
    assert [(name, attr) for name, attr in taken if name in modules and not hasattr(modules[name], attr)] == []
