"""llama.cpp beside jkv: what is asked of it, what is made of what it says; and itself, on the real model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import jkv
from benchmarks import llama, requirements, speed
from jkv import models
from jkv.bench.trials import Jkv
from support.commands import refused

PARAMS = models.random(models.TINY)


def call(*args):
    return CliRunner().invoke(speed.app, ["decode", *map(str, args)])


class Server:
    """Says `logprobs` after a prompt, or counts; `started` are the settings of all, `asked` the requests."""

    started: list[Any] = []
    asked: list[dict[str, Any]] = []
    logprobs: dict[int, float] = {}
    error: dict[str, Any] = {}

    def __init__(self, p: Any) -> None:
        self.started.append(p)

    def handle_completions(self, asked: dict[str, Any], say: Any) -> None:
        self.asked.append(asked)
        if self.error:
            return say({"error": self.error})
        top = [{"id": word, "logprob": p} for word, p in self.logprobs.items()]
        for n in (1, 2, 4, 5, 5):  # the third and the fourth token are one character
            timings = {"prompt_ms": 70.0, "predicted_n": n, "predicted_ms": 10.0 * n**2}
            say({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}], "timings": timings})


@pytest.fixture
def peer(monkeypatch):
    settings = lambda: SimpleNamespace(  # noqa: E731
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    kinds = SimpleNamespace(GGML_TYPE_F16=1, GGML_TYPE_Q8_0=8, GGML_TYPE_Q4_0=2)
    module = SimpleNamespace(CommonParams=settings, Server=Server, ggml_type=kinds)
    monkeypatch.setitem(__import__("sys").modules, "xllamacpp", module)
    for name in ("started", "asked"):
        monkeypatch.setattr(Server, name, [])
    return llama.LlamaCpp(Path("x.gguf"), 2)


def test_llama_cpp_times_each_token_and_reuses_prompt(peer):
    assert [peer.follow(cache, 9) for cache in ("full", "int8", "int4")] == ["F16", "Q8_0", "Q4_0"]
    trial = peer.trial("decode", np.arange(9)[None], 4)
    assert trial() == trial() == [30.0, 60.0, 60.0, 90.0]
    (p,) = Server.started
    assert (p.model.path, p.n_ctx, p.n_gpu_layers, p.cpuparams.n_threads, p.cache_type_v) == ("x.gguf", 14, 0, 2, 2)
    assert Server.asked[0] == Server.asked[1]
    assert [Server.asked[0][x] for x in ("prompt", "n_predict", "cache_prompt")] == [[*range(9)], 5, True]
    assert peer.trial("prefill", np.arange(9)[None], 0)() == [70.0]
    assert not Server.asked[-1]["cache_prompt"]


def test_llama_cpp_errors_are_raised(peer, monkeypatch):
    engine = Jkv(PARAMS)
    monkeypatch.setattr(Server, "logprobs", {3: -90.0})
    with pytest.raises(ValueError, match="do not run the same model: log-probabilities differ by 8"):
        peer.apart(engine)
    own = np.asarray(jkv.prefill(PARAMS, "full", [Server.asked[-1]["prompt"]])[1][0], np.float64)
    own -= np.logaddexp.reduce(own)
    monkeypatch.setattr(Server, "logprobs", {word: own[word] + 0.1 for word in np.argsort(own)[-20:].tolist()})
    assert peer.apart(engine) == pytest.approx(0.1, abs=1e-4)
    with pytest.raises(ValueError, match="asked for one row"):
        peer.trial("decode", np.zeros((2, 4)), 4)
    monkeypatch.setattr(Server, "error", {"code": 400, "message": "no room"})
    with pytest.raises(ValueError, match="llama.cpp: .*no room"):
        peer.trial("prefill", np.zeros((1, 4)), 0)()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--shape", "smollm2-135m", "--random-weights", "--cache", "full"), "it reads .gguf files alone, and"),
        (("--cache", "snapkv(keep=0.25)"), "it has no snapkv(keep=0.25); both have full, int8, int4"),
    ],
)
def test_unsupported_llama_cpp_arguments_are_refused(peer, monkeypatch, args, word):
    monkeypatch.setattr(requirements, "find_spec", lambda name: True)
    refused(call(*args, "--context", 40, "--vs", "llama.cpp"), word)


def test_missing_llama_cpp_names_extra(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    refused(call("--vs", "llama.cpp"), "beside llama.cpp: xllamacpp is missing", "[llama]")


@pytest.mark.peers
def test_llama_cpp_takes_turns_with_same_file(tmp_path):
    pytest.importorskip("xllamacpp")
    out, caches = tmp_path / "x.json", ("--cache", "full", "--cache", "int8")
    args = ("--context", 40, *caches, "--steps", 4, "--rounds", 1, "--threads", 1, "--json", out)
    result = call(*args, "--vs", "llama.cpp")
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [r["peer"]["cache"] for r in rows] == ["F16", "Q8_0"]
    assert all(r["ratio"] == pytest.approx(r["ms"] / r["peer"]["ms"]) for r in rows)
