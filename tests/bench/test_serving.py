"""A server under load: rates by the time that passed, what is left of one that dies, and a peer's beside it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jkv import models
from jkv.bench import serve
from jkv.bench.serve import Answer, ask, beside, folder, load, resident, row
from jkv.io.load import load as loaded
from jkv.io.load import read
from support import ggufs


def test_rates_are_by_the_time_that_passed(monkeypatch: pytest.MonkeyPatch):
    answers = [Answer([0.1, 0.3], 5), Answer([0.2, 0.8], 8, first=4), Answer(wrong="no end")]
    got = row(answers, [1.0, 2.0], 4.0)
    assert (got["answers"], got["lost"], got["tokens_per_s"], got["mib"]) == (2, 1, 3.25, [1, 2])
    assert got["token_ms"]["p50"] == 100.0 and got["first_ms"]["p50"] == 150.0

    def slow(port: int, body: dict[str, object], last: bytes) -> Answer:
        time.sleep(0.3 if "seed" in body else 0)
        return Answer([0.3], 8)

    monkeypatch.setattr(serve, "ask", slow)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found, held, elapsed = load(0, child.pid, "m", ["full"], 2, 0.1, 8)  # each answer ends after the time is over
        assert len(found) == 2 and held[0] > 0 and 0.3 <= elapsed < 3
        child.communicate()


def test_a_server_that_dies_leaves_its_answers(monkeypatch: pytest.MonkeyPatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    turn, asked = threading.Lock(), []

    def ask(port: int, body: dict[str, object], last: bytes) -> Answer:
        with turn:
            asked.append(body)
            if len(asked) == 5:
                child.kill()
            while len(asked) >= 5 and resident(child.pid) is not None:
                time.sleep(0.01)
        return Answer([0.1], 8) if len(asked) < 5 else Answer(wrong="gone")

    monkeypatch.setattr(serve, "ask", ask)
    monkeypatch.setattr(serve.time, "sleep", lambda x, real=time.sleep: real(min(x, 0.05)))
    answers, held, elapsed = load(0, child.pid, "m", ["full"], 1, 60, 8)  # two of them before the clients begin
    assert [x.wrong for x in answers] == ["", "", "gone"] and held[0] > 0 and elapsed < 30
    child.communicate()
    assert resident(child.pid) is None
    assert row(answers, held, elapsed)["lost"] == 1


PEER = """
import http.server, sys
if "--broken" in sys.argv:
    sys.exit("no fastapi")
class Says(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(422 if b'"cache"' in asked else 200)
        self.end_headers()
        for said in ('"text": "a", "finish_reason": null}]', '"text": "", "finish_reason": "length"}], "usage": USED'):
            said = said.replace("USED", '{"completion_tokens": 2}')
            self.wfile.write(("data: {\\"choices\\": [{" + said + "}\\n\\n").encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[1:5] == ["serve", sys.argv[2], "--dtype", "float32"] and sys.argv[-1] == "--continuous-batching"
http.server.HTTPServer(("127.0.0.1", port), Says).serve_forever()
"""


def test_a_peer_is_asked_for_no_cache_and_says_no_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "transformers" / "cli"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    (package / "transformers.py").write_text(PEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with beside(tmp_path, "--continuous-batching", 1) as (port, pid):
        assert ask(port, {"prompt": "x"}).wrong == "no end" and ask(port, {"prompt": "x"}, b"").wrong == ""
        answers, held, _ = load(port, pid, "m", [""], 2, 0.1, 8, b"")
        assert (
            answers
            and all((x.wrong, x.tokens, len(x.pieces), x.first) == ("", 2, 1, 1) for x in answers)
            and held[0] > 0
        )
        assert ask(port, {"prompt": "x", "cache": "full"}, b"").wrong == "status 422"
    assert resident(pid) is None
    with pytest.raises(ChildProcessError, match="no fastapi"), beside(tmp_path, "--broken", 1):
        pass


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # of torch and transformers, not ours
def test_a_folder_is_the_same_model_to_transformers(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = ggufs.tiny(tmp_path / "m.gguf")
    made = folder(read(path), tmp_path / "made")
    params, text = loaded(path), "hello there"
    ids = transformers.AutoTokenizer.from_pretrained(made)(text)["input_ids"]
    assert ids == params.tokenizer.encode(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(made)
    theirs = model(torch.tensor([ids])).logits.detach().numpy()
    own = models.forward(params, jnp.asarray([ids]), jnp.arange(len(ids))[None])
    np.testing.assert_allclose(np.asarray(own), theirs, atol=1e-4)
