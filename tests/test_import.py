"""The package is light to import, and its names mean the same in whatever order its modules are imported."""

import subprocess
import sys

import pytest

import jkv

HELP = """
import sys; from jkv.cli import app; sys.argv = ["jkv", {}"--help"]
try: app.main()
except SystemExit as e: assert not e.code
"""


def fresh(code):
    """Runs code in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import jkv; dir(jkv)",
        HELP.format(""),
        "from jkv.cli.app import app; app(['--version'], standalone_mode=False)",
        HELP.format("'train', 'dms', "),
        HELP.format("'eval', 'ppl', "),
        HELP.format("'bench', 'decode', "),
    ],
    ids=["import", "help", "version", "train", "eval", "bench"],
)
def test_jax_is_imported_lazily(code):
    fresh(f"{code}\nimport sys; assert 'jax' not in sys.modules")


def test_flax_is_not_imported_without_trained_weights():
    fresh("""
import sys, jkv
jkv.generate(jkv.models.random(jkv.models.TINY), "snapkv(budget=48) | int8", [[5, 6, 7]], max_new_tokens=2)
assert not {"flax", "optax", "orbax", "tensorstore"} & {*sys.modules}
""")


@pytest.mark.parametrize(
    "code",
    [
        "import jkv",
        "import jkv, jkv.generation.api",
        "import jkv; jkv.generate; import jkv.generation.api",
        "from jkv.generation.api import Result; import jkv",
        "import jkv; jkv.step; from jkv import models, methods",
    ],
)
def test_generate_is_function_in_any_import_order(code):
    fresh(f"{code}\nimport types; assert isinstance(jkv.generate, types.FunctionType), jkv.generate")


def test_submodules_load_on_attribute_access():
    fresh("import jkv; jkv.models.random(jkv.models.TINY); jkv.methods.parse('full')")


def test_public_names_resolve():
    assert {*jkv._HOMES, "models"} == set(jkv.__all__) == {x for x in dir(jkv) if not x.startswith("__")}
    assert all(hasattr(jkv, name) for name in jkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jkv.nothing
