"""Building the C++ kernel: whole or not at all, and a reason where there is none."""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import kernels, methods, models
from jkv.generation.receipt import kernels_of, kernels_off
from jkv.kernels import cpu_library
from jkv.prompts.allocation import CacheShape

PARAMS = models.random(models.TINY)
NAME = "decode_attention"
# A compiler that says its version, and writes its output in two parts.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1.0; exit; fi
for last; do :; done
printf half > "$last"
sleep 0.3
{end}
printf ' and half' >> "$last"
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "cache"))
    cpu_library._register.cache_clear()
    kernels._say.cache_clear()
    yield
    cpu_library._register.cache_clear()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    def made(end: str = ":") -> None:
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(end=end))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return made


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_processes_that_build_at_once_leave_one_whole_library(compiler, tmp_path):
    compiler()
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(cpu_library.built(NAME))) for _ in range(3)]
    for each in (threading.Thread.start, threading.Thread.join):
        list(map(each, threads))
    assert libraries(tmp_path) == [found[0]] and found[0].read_text() == "half and half" and len(found) == 3


def test_a_build_that_fails_leaves_nothing_and_its_error_is_the_reason(compiler, tmp_path):
    compiler("echo 'x.cc:1: error: no such instruction' >&2; exit 1")
    assert "x.cc:1: error: no such instruction" in str(cpu_library.missing(NAME))
    assert libraries(tmp_path) == []


def test_a_library_is_built_again_for_other_flags_and_another_cpu(compiler, monkeypatch):
    compiler()
    monkeypatch.setenv("CXXFLAGS", "-DA")
    paths = [cpu_library.built(NAME)]
    monkeypatch.setenv("CXXFLAGS", "-DB")
    paths.append(cpu_library.built(NAME))
    monkeypatch.setattr(cpu_library, "_instruction_sets", lambda: "others")
    paths.append(cpu_library.built(NAME))
    monkeypatch.setattr(cpu_library, "version", lambda name: "0.0")
    paths.append(cpu_library.built(NAME))
    assert len(set(paths)) == 4 and cpu_library.built(NAME) == paths[-1]


def no_compiler(monkeypatch, tmp_path, compiler) -> str:
    monkeypatch.setattr(cpu_library.shutil, "which", lambda name: None)
    return "cannot be built: no C.. compiler"


def broken_compiler(monkeypatch, tmp_path, compiler) -> str:
    compiler("exit 1")
    return "cannot be built: .*compiler: no message"


def unwritable_folder(monkeypatch, tmp_path, compiler) -> str:
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "file"))
    return "cannot be built: .*Not a directory"


def broken_library(monkeypatch, tmp_path, compiler) -> str:
    compiler()
    return "cannot be loaded from .*kernels/decode_attention_"


def other_interface(monkeypatch, tmp_path, compiler) -> str:
    def register(*args, **rest):
        raise RuntimeError("API version 0.5 is not 0.3")

    compiler()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(Handler=ctypes.CFUNCTYPE(None)(lambda: None)))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    return "cannot be loaded from .*API version 0.5 is not 0.3"


@pytest.mark.parametrize(
    "cause",
    [no_compiler, broken_compiler, unwritable_folder, broken_library, other_interface],
    ids=lambda x: x.__name__,
)
def test_without_a_library_a_named_kernel_is_an_error_and_auto_runs_on_xla_and_says_why(
    monkeypatch, tmp_path, caplog, compiler, cause
):
    why = cause(monkeypatch, tmp_path, compiler)
    named = replace(methods.parse("int8"), kernels="cpu")
    with pytest.raises(ValueError, match=f"kernels='cpu': the cpu kernel of decode_attention {why}.*use 'auto'"):
        jkv.prefill(PARAMS, named, [[1, 2, 3]])
    with pytest.raises(OSError, match=why):
        cpu_library.target(NAME)
    monkeypatch.setattr(kernels, "ON_CPU", "cpu")
    with caplog.at_level(logging.INFO, "jkv"):
        cache = CacheShape(methods.parse("int8"), PARAMS.config, 1, 64, 16, jnp.float32).empty()
        assert kernels_of(cache) == "xla"
    off = kernels_off(cache)
    assert off.startswith("decode_attention runs on xla: the cpu kernel cannot be") and "\n" not in off
    assert len([r for r in caplog.records if "runs on xla" in r.message]) == 1


def test_auto_is_xla_on_a_cpu_and_builds_nothing(tmp_path):
    out = jkv.generate(PARAMS, "int8", np.ones((1, 20), int), max_new_tokens=2)
    assert out.receipt.kernels == "xla" and out.receipt.kernels_off == "" and not (tmp_path / "cache").exists()


def test_operations_without_a_module_of_the_platform_run_on_xla():
    """By name too: a CPU has a kernel of decoding alone, and kernels="cpu" is no error for prompts."""
    found = kernels.choose("prefill_attention", "cpu", lambda module: "nothing")
    assert found == kernels.Choice("xla")
