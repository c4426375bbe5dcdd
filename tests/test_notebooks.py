"""The notebooks' code knows the package as it is: what a cell imports or takes from a module is there."""

import ast
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code(path: Path) -> ast.Module:
    cells = (x["source"] for x in json.loads(path.read_text(encoding="utf-8"))["cells"] if x["cell_type"] == "code")
    lines = "".join("".join(cell) + "\n" for cell in cells).splitlines()
    return ast.parse("\n".join("pass" if line.startswith(("%", "!")) else line for line in lines))


def taken(tree: ast.Module) -> list[tuple[ModuleType, str]]:
    """(module, name) of everything that a cell takes from one of jkv's modules."""
    modules: dict[str, ModuleType] = {}
    names: list[tuple[ModuleType, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {x.asname or x.name: importlib.import_module(x.name) for x in node.names if x.name == "jkv"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jkv"):
            module = importlib.import_module(node.module or "")
            for x in node.names:
                found = getattr(module, x.name, None) or importlib.import_module(f"{module.__name__}.{x.name}")
                names.append((module, x.name))
                if isinstance(found, ModuleType):
                    modules[x.asname or x.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.append((modules[node.value.id], node.attr))
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_a_notebook_takes_from_the_package_is_there(path):
    names = taken(code(path))
    assert len(names) > 3
    assert [f"{m.__name__}.{name}" for m, name in names if not hasattr(m, name)] == []
