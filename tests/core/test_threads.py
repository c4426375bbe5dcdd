"""Programs of several threads, and of processes that were forked."""

import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import jkv
from jkv.core import compilation


@pytest.fixture
def made(monkeypatch):
    """The programs that were compiled, by the size of their argument; each takes a while."""
    sizes, compiling = [], compilation.Compiled.__init__

    def init(self, lowered, free):
        sizes.append(lowered.in_avals[0][0].shape[0])
        time.sleep(0.1)
        compiling(self, lowered, free)

    monkeypatch.setattr(compilation.Compiled, "__init__", init)
    monkeypatch.setattr(compilation, "PROGRAMS", {})
    return sizes


def together(*works):
    """What each returned or raised, all run at once."""
    out, gate = [None] * len(works), threading.Barrier(len(works))

    def run(i):
        gate.wait()
        try:
            out[i] = works[i]()
        except Exception as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@pytest.mark.parametrize("ahead", [False, True])
def test_threads_compile_program_once(made, ahead):
    """Two programs, four threads each, in opposite orders; ahead: two more threads begin them."""
    double = jax.jit(lambda x: 2 * x)

    def sums(first, second):
        return [
            compilation.compiled(double, np.ones(n, np.float32))[0](np.ones(n, np.float32)).sum()
            for n in (first, second)
        ]

    begin = [lambda n=n: compilation.ahead(double, np.ones(n, np.float32)).result() for n in (3, 4)] if ahead else []
    works = [lambda: sums(3, 4), lambda: sums(4, 3)] * 4
    assert together(*begin, *works)[len(begin) :] == [[6, 8], [8, 6]] * 4
    assert sorted(made) == [3, 4] and not compilation.BEGUN


def test_compile_error_reaches_all_waiters_and_is_retried(made, monkeypatch):
    double, one = jax.jit(lambda x: 2 * x), np.ones(5, np.float32)

    def init(self, lowered, free):
        made.append(0)
        time.sleep(0.3)
        raise MemoryError("no room for the program")

    with monkeypatch.context() as broken:
        broken.setattr(compilation.Compiled, "__init__", init)
        errors = together(*[lambda: compilation.compiled(double, one)] * 4)
    assert [str(e) for e in errors] == ["no room for the program"] * 4 and made == [0] and not compilation.BEGUN
    assert compilation.compiled(double, one)[0](one).sum() == 10


def test_ahead_compilations_are_kept(made):
    double = jax.jit(lambda x: 2 * x)
    for n in (3, 4, 5):
        compilation.ahead(double, np.ones(n, np.float32))
    for n in (3, 4, 5):
        compilation.compiled(double, np.ones(n, np.float32))
    assert sorted(made) == [3, 4, 5]


def test_program_cache_limit_holds_across_threads(made, monkeypatch):
    monkeypatch.setattr(compilation, "LIMIT", 2)
    double = jax.jit(lambda x: 2 * x)

    def turn(n):
        return [
            compilation.compiled(double, np.ones(m, np.float32))[0](np.ones(m, np.float32)).sum()
            for m in range(n, n + 3)
        ]

    assert together(*[lambda n=n: turn(n) for n in (1, 2, 3)]) == [[2, 4, 6], [4, 6, 8], [6, 8, 10]]
    assert len(compilation.PROGRAMS) == 2 and not compilation.BEGUN


@pytest.mark.slow
def test_threaded_generation_equals_sequential():
    params = jkv.models.random(dict(jkv.models.TINY, num_hidden_layers=1))
    prompts = [[(7 * i + j) % 97 for i in range(20)] for j in range(3)]
    run = lambda p: jkv.generate(params, None, p, max_new_tokens=4, stop_ids=()).tokens  # noqa: E731
    got = together(*[lambda p=p: run(p) for p in prompts])
    assert got == [run(p) for p in prompts]


CHILD = """
import os, sys, warnings
import jkv
from jkv.core import compilation
warnings.simplefilter("ignore")
params = jkv.models.random(dict(jkv.models.TINY, num_hidden_layers=1))
if {warm}:
    jkv.generate(params, None, [1, 2, 3], max_new_tokens=2)
    cache, _ = jkv.prefill(params, None, [1, 2, 3])
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    {call}
except RuntimeError as error:
    print(error)
    sys.stdout.flush()
    os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 3)
os._exit(4)
"""
CALLS = {
    "generate": "jkv.generate(params, None, [1, 2, 3], max_new_tokens=2)",
    "stream": "next(jkv.stream(params, None, [1, 2, 3], max_new_tokens=2))",
    "prefill": "jkv.prefill(params, None, [1, 2, 3])",
    "extend": "jkv.extend(params, cache, [1, 2, 3])",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked on this system")
@pytest.mark.parametrize("call, warm", [("generate", True), ("generate", False), ("stream", False), ("extend", True)])
def test_forked_child_raises_instead_of_hanging(call, warm):
    """Also one of a process that has only loaded a model."""
    text = CHILD.format(call=CALLS[call], warm=warm)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
