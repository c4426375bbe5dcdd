"""C++ kernels for CPUs: compiled on first use for this machine, kept in the cache folder, and registered with XLA.

A library is built by the C++ compiler of the system (CXX, c++, g++ or clang++, with CXXFLAGS) from `cpu.cc` of an
operation's package and the headers that come with jaxlib. Its file name has a digest of all that it depends on, the
instruction sets of this CPU included.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax

from jkv.utils.compile_cache import cache_dir

FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
PATIENCE = 300  # seconds of a compilation
log = logging.getLogger("jkv")
_LOCK = threading.Lock()


def missing(operation: str) -> str | None:
    """Explain why the C++ kernel of an operation cannot run in this process; None if it can.

    The first call for an operation compiles the kernel, unless an earlier process did.
    """
    found = _registered(operation)
    return None if isinstance(found, str) else str(found)


def target(operation: str) -> str:
    """Return the name under which XLA knows the kernel of an operation.

    Raises:
        OSError: The kernel cannot be built or loaded.
    """
    found = _registered(operation)
    if isinstance(found, str):
        return found
    raise OSError(f"the cpu kernel of {operation} {found}")


def _registered(operation: str) -> str | OSError:
    with _LOCK:
        return _register(operation)


@cache
def _register(operation: str) -> str | OSError:
    """Build, load and register the kernel. Returns its name, or the error, so that a failure is not tried again."""
    try:
        path = built(operation)
    except OSError as error:
        return OSError(f"cannot be built: {error}")
    name = f"jkv_{path.stem}"
    try:
        handler = jax.ffi.pycapsule(ctypes.CDLL(str(path)).Handler)
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception as error:  # jaxlib raises errors of its own for another version of the interface
        return OSError(f"cannot be loaded from {path}: {_line(str(error))}")
    return name


def built(operation: str) -> Path:
    """Return the library of an operation, compiling it first if there is none.

    It is compiled under another name and then renamed, so that there never is a part of a library, and processes that
    compile it at once do not disturb each other.

    Raises:
        OSError: There is no compiler, it fails, or the folder cannot be written.
    """
    source = Path(__file__).with_name(operation) / "cpu.cc"
    command = [*_compiler(), *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), "-isystem", jax.ffi.include_dir()]
    versions = [_run([command[0], "--version"]), version("jaxlib")]
    parts = [source.read_text("utf-8"), *command, *versions, _instruction_sets()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_dir() / "kernels"
    path = folder / f"{operation}_{digest}.so"
    if path.exists():
        return path
    log.info("compiling the cpu kernel of %s, once for this machine", operation)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        whole = Path(place) / path.name
        _run([*command, str(source), "-o", str(whole)])
        os.replace(whole, path)
    return path


def _compiler() -> list[str]:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if (words := shlex.split(name)) and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    raise FileNotFoundError("no C++ compiler (c++, g++, clang++ or the one that CXX names)")


def _run(command: list[str]) -> str:
    """Run a command, and return what it prints. Raises OSError with the first error that it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} took more than {PATIENCE} seconds") from None
    if done.returncode:
        said = done.stderr.splitlines()
        raise OSError(f"{command[0]}: {next((x for x in said if 'error' in x), _line(done.stderr))}")
    return done.stdout


def _line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no message")


def _instruction_sets() -> str:
    """Return what identifies the CPU's instruction sets, because a folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.processor()) + platform.machine()
