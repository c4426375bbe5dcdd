"""Runs the notebooks from top to bottom, each in a process and a folder of its own; the first error ends it.

python notebooks/run.py [NAME ...]            less work in every cell; the files stay as they are
python notebooks/run.py --refresh [NAME ...]  all of it, and the outputs are written into the files
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent
PLAIN = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; raises CellExecutionError with the traceback of a cell that fails."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(book, timeout=None, resources=where, coalesce_streams=True).execute()
    return book


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
    parser.add_argument("--refresh", action="store_true", help="run them in full and keep the outputs")
    asked = parser.parse_args()
    os.environ["JKV_FAST"] = "0" if asked.refresh else "1"
    for name in asked.names or sorted(path.stem for path in HERE.glob("*.ipynb")):
        start = time.perf_counter()
        book = execute(HERE / f"{name}.ipynb")
        if asked.refresh:
            write(book, HERE / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
