"""Runs the notebooks from top to bottom, each in a process and a folder of its own; the first error ends it.

python notebooks/run.py [NAME ...]            less work in every cell; the files stay as they are
python notebooks/run.py --refresh [NAME ...]  all of it, and the outputs are written into the files
python notebooks/run.py --colab [NAME ...]    as Colab does: no jkv is installed, no checkout is near; the first cell
                                              installs it from a new wheel, or from --source ADDRESS
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent
PLAIN = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, kernel: str = "python3", form: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    """The notebook with its outputs; raises CellExecutionError with the traceback of a cell that fails.

    form: what a user would fill into the form of the first cell.
    """
    book = nbformat.read(path, as_version=4)
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    for name, value in (form or {}).items():
        line = re.compile(rf'(?m)^{name} = ".*"(?=  # @param)')
        assert line.search(first.source), f"{path.name} has no field {name}"
        first.source = line.sub(lambda _, name=name, value=value: f"{name} = {value!r}", first.source)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(book, timeout=None, kernel_name=kernel, resources=where, coalesce_streams=True).execute()
    return book


def wheel(folder: Path) -> str:
    """The path of a wheel of the checkout, built of a copy: it leaves nothing there, and takes nothing old."""
    copy = folder / "copy"
    skipped = shutil.ignore_patterns(".*", "build", "results", "shared", "tests", "*.egg-info", "__pycache__")
    shutil.copytree(HERE.parent, copy, ignore=skipped)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, copy], check=True)
    return str(next(folder.glob("*.whl")))


@contextlib.contextmanager
def clean_kernel() -> Iterator[str]:
    """The name of a kernel in an environment of its own, which has what this one has, but no jkv."""
    with tempfile.TemporaryDirectory() as folder:
        env = Path(folder) / "env"
        venv.create(env, with_pip=True)
        python = env / "bin" / "python"
        # Paths in a .pth file are searched for packages; the .pth files there, an editable jkv's among them, are not.
        seen = "\n".join(x for x in sys.path if x.endswith("site-packages"))
        (next(env.glob("lib/*/site-packages")) / "seen.pth").write_text(seen)
        missing = "import jax, importlib.util as i; assert not i.find_spec('jkv')"
        subprocess.run([python, "-c", missing], check=True, cwd=folder)
        spec = Path(folder) / "kernels" / "clean" / "kernel.json"
        spec.parent.mkdir(parents=True)
        argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "clean", "language": "python"}))
        os.environ["JUPYTER_PATH"] = folder
        yield "clean"


def small(png: str) -> str:
    """A picture (base64) in at most 256 colours: a third of the bytes."""
    out = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(256).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def write(book: nbformat.NotebookNode, path: Path) -> None:
    """The notebook without what differs from run to run; ValueError if it tells of this machine."""
    book.metadata = nbformat.from_dict(PLAIN)
    for cell in book.cells:
        cell.metadata = nbformat.from_dict({})
        for data in (x["data"] for x in cell.get("outputs", ()) if "image/png" in x.get("data", {})):
            data["image/png"] = small(data["image/png"])
    text = nbformat.writes(book) + "\n"
    words = re.sub(r'"image/png": ".*"', "", text)
    here = {str(Path.home()), str(HERE.parent), sys.prefix, tempfile.gettempdir(), socket.gethostname()}
    if told := sorted(x for x in here if re.search(rf"\b{re.escape(x)}\b", words) or ("/" in x and x in words)):
        raise ValueError(f"{path.name}: its outputs name this machine ({', '.join(told)}); change the cells that do")
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of notebooks, without .ipynb; default: all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--refresh", action="store_true", help="run them in full and keep the outputs")
    how.add_argument("--colab", action="store_true", help="by the install of the first cell, into a clean environment")
    parser.add_argument("--source", help="for --colab: a git address or a wheel; default: a new wheel")
    parser.add_argument("--revision", help="for --colab: of the git address; default: that of the form")
    asked = parser.parse_args()
    os.environ["JKV_FAST"] = "0" if asked.refresh else "1"
    names = asked.names or sorted(path.stem for path in HERE.glob("*.ipynb"))
    if asked.colab:
        with tempfile.TemporaryDirectory() as folder:
            form = {"SOURCE": asked.source or wheel(Path(folder))}
            form |= {"REVISION": asked.revision} if asked.revision else {}
            for name in names:
                with clean_kernel() as kernel:
                    timed(name, kernel, form)
        return
    for name in names:
        book = timed(name)
        if asked.refresh:
            write(book, HERE / f"{name}.ipynb")


def timed(name: str, kernel: str = "python3", form: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    start = time.perf_counter()
    book = execute(HERE / f"{name}.ipynb", kernel, form)
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return book


if __name__ == "__main__":
    main()
