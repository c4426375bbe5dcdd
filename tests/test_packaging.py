"""What a user installs: the wheel holds every module and file, every module is of use, and no text names a stranger."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from importlib.util import resolve_name
from pathlib import Path

import pytest

import jkv
from jkv.utils import json_results, optional_deps

ROOT = Path(__file__).parents[1]
FOLDERS = {"jkv": "jkv", "models": "jkv/models", "training": "jkv/training"}  # of the repository, and where they go
LINKS = ("models", "training")  # of jkv/
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def files(folder: Path) -> Iterator[Path]:
    """All of a folder but what Python leaves in it."""
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def installed() -> dict[str, Path]:
    """Every file of the folders by its path in an installation."""
    return {
        f"{there}/{path.relative_to(ROOT / here).as_posix()}": path
        for here, there in FOLDERS.items()
        for path in files(ROOT / here)
    }


def modules() -> dict[str, Path]:
    """Every module by its name."""
    found = {name: path for name, path in installed().items() if name.endswith(".py")}
    return {name[:-3].replace("/", ".").removesuffix(".__init__"): path for name, path in found.items()}


# ---------------------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, as pip unpacks it from a .zip: what an earlier build left does not count, and links are text."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for link in LINKS:
        (source / "jkv" / link).unlink()
        (source / "jkv" / link).write_text(f"../{link}")
    return source


def built(source: Path, what: str) -> tuple[Path, str]:
    """The file that is built, and what was said on stderr."""
    code = f"from setuptools import build_meta; print(build_meta.build_{what}('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return source / done.stdout.split()[-1], done.stderr


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    path, said = built(source, "wheel")
    assert "absent from the `packages` configuration" not in said
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_editable_install_has_no_warnings(source):
    assert "Warning" not in (said := built(source, "editable")[1]) and "!!" not in said


def test_wheel_holds_exactly_package_files(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == installed().keys()
    assert (
        "jkv/kernels/attention_column_sums/tpu.py" in names
        and "jkv/methods/weights/smollm2-135m/weights.safetensors" in names
    )
    for name, path in installed().items():
        assert wheel.getinfo(name).file_size == path.stat().st_size, name


def test_the_checkout_is_the_package():
    """Type checkers, editors and clones see what is installed: links, and not a map of a build."""
    for name in LINKS:
        assert (ROOT / "jkv" / name).is_symlink() and (ROOT / "jkv" / name).resolve() == ROOT / name


def test_wheel_declares_command_and_package_name(wheel):
    about = {name.split("/")[-1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "jkv = jkv.cli.app:main" in wheel.read(about["entry_points.txt"]).decode()
    assert f"Name: {optional_deps.PACKAGE}\n" in wheel.read(about["METADATA"]).decode()


def test_installed_modules_are_found_by_name(tmp_path):
    code = "import sys, importlib.util as u\nfor name in sys.argv[1:]: assert u.find_spec(name) is not None, name"
    args = [sys.executable, "-W", "ignore", "-c", code, *sorted(modules())]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]


# -------------------------------------------------------------------------------------------------- what is of no use


PACKAGES = {name for name, path in modules().items() if path.name == "__init__.py"}


def imported(name: str, tree: ast.Module, known: set[str]) -> set[str]:
    """The modules that a module imports, wherever in it, or by a name that it makes; and the homes of jkv's names."""
    out = {f"jkv.{home}" for home in jkv._HOMES.values()} if name == "jkv" else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name if name in PACKAGES else name.rpartition(".")[0]
            home = resolve_name("." * node.level + (node.module or ""), package)
            out |= {home, *(f"{home}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.JoinedStr):  # f"jkv.kernels.{operation}.{name}"
            parts = (re.escape(x.value) if isinstance(x, ast.Constant) else r"[\w.]+" for x in node.values)
            pattern = re.compile("".join(parts))
            out |= {x for x in known if x.startswith("jkv.kernels.") and pattern.fullmatch(x)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module":
            out |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    return out & known


def reached(sources: dict[str, str]) -> set[str]:
    """The modules that are run, by the command or by `python -m`, and all that these import."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    todo = [
        name
        for name, text in sources.items()
        if name in ("jkv", "jkv.cli.app", "jkv.cli.__main__") or '\nif __name__ == "__main__"' in text
    ]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            parents = {name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)}
            todo += [*imported(name, trees[name], sources.keys() - {name}), *(parents & sources.keys())]
    return seen


@pytest.mark.slow
def test_every_module_is_reachable_from_entry_points():
    sources = {name: path.read_text("utf-8") for name, path in modules().items()}
    assert sources.keys() - reached(sources) == set()
    # what nobody imports is found, and so is what only that imports
    more = {"jkv.lonely": "import jkv.lonelier", "jkv.lonelier": "import jkv.cli.app"}
    assert sources.keys() | more.keys() - reached(sources | more) >= more.keys()


# ------------------------------------------------------------------------------------------------------- install texts

SKIPPED = {".git", ".venv", ".venv312", "build", "dist", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}
KINDS = {".py", ".md", ".toml", ".ipynb", ".cfg", ".yaml", ".yml", ".txt", ""}
# `jkv` as the package of an installation, or with an extra: that is a package of somebody else
STRANGER = re.compile(r"""(?:install|uv\s+add)(?:\s+-{1,2}[\w-]+)*\s+['"\\]*jkv(?![\w-])|(?<![\w./-])jkv\[""")
EXTRA = re.compile(rf"""(?:['"]\.|\.\.|{optional_deps.PACKAGE})\[([\w,-]+)\]""")


def texts() -> Iterator[tuple[Path, str]]:
    """Every text of the repository."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [x for x in inner if x not in SKIPPED and not x.endswith(".egg-info")]
        for path in (Path(folder, name) for name in names):
            if path.suffix in KINDS and path.name != ".git":
                yield path, path.read_text("utf-8")


def test_install_commands_name_jkv_cache():
    found = [(str(path.relative_to(ROOT)), m[0]) for path, text in texts() for m in STRANGER.finditer(text)]
    assert found == []
    for wrong in ("pip install {}", "pip install -U '{}'", "pip install\n'{}[train]'", 'uv add "{}"', "({}[train])"):
        assert STRANGER.search(wrong.format("jkv")), wrong
    for right in (f"pip install '{optional_deps.PACKAGE}[train] @ git+URL'", "pip install -e '.[train]'", 'x["jkv"]'):
        assert not STRANGER.search(right), right


def test_mentioned_extras_exist():
    named = {
        (str(path.relative_to(ROOT)), x) for path, text in texts() for m in EXTRA.findall(text) for x in m.split(",")
    }
    assert {x for _, x in named} >= {"train", "plot", "test", "tpu-aot"}
    assert {(path, x) for path, x in named if x not in PROJECT["optional-dependencies"]} == set()
    hints = re.compile(r"\binstall\('([\w-]+)'\)")
    asked = {x for name in modules().values() for x in hints.findall(name.read_text("utf-8"))}
    assert {"train", "plot", "hub", "datasets"} <= asked <= PROJECT["optional-dependencies"].keys()


def test_metadata_is_read_by_distribution_name():
    assert PROJECT["name"] == optional_deps.PACKAGE and PROJECT["scripts"] == {"jkv": "jkv.cli.app:main"}
    assert metadata(optional_deps.PACKAGE)["Name"] == optional_deps.PACKAGE and requires(optional_deps.PACKAGE)
    assert json_results.versions(["jkv", "nothing"]).keys() == {"python", "jkv"}
    assert json_results.versions(["jkv"])["jkv"] == jkv.__version__
    for name, path in modules().items():
        assert not re.search(r"\b(?:version|distribution|metadata|requires)\(.jkv.\)", path.read_text("utf-8")), name
